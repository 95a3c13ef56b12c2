"""Exit codes: one meaning each, and signals."""

from core.hosts import exit_codes


def test_every_code_has_a_name_of_its_own():
    named = {name: value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert sorted(named.values()) == sorted(exit_codes.ENDINGS)
    assert len(set(named.values())) == len(named)


def test_a_code_above_128_is_a_signal_and_worth_a_start():
    assert exit_codes.ending(137).meaning.startswith("ended by signal 9 (9: killed, often for lack of memory;")
    assert exit_codes.ending(137).restart
    assert exit_codes.ending(143).meaning.startswith("preempted")
    assert not exit_codes.ending(99).restart
