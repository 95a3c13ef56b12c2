"""Exit codes: one meaning each, the table of the README, and signals."""

import pathlib

from core.hosts import exit_codes

SIGNAL = exit_codes._BY_SIGNAL.meaning.format("N")
ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_the_readme_has_the_table():
    rows = ["| code | meaning | can a restart help? |", "|---|---|---|"]
    listed = [*exit_codes.ENDINGS.items(), ("128 + N", exit_codes._BY_SIGNAL._replace(meaning=SIGNAL))]
    rows += [f"| {code} | {said.meaning} | {'yes' if said.restart else 'no'} |" for code, said in listed]
    assert "\n".join(rows) + "\n" in (ROOT / "launch" / "README.md").read_text()


def test_every_code_has_a_name_of_its_own():
    named = {name: value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert sorted(named.values()) == sorted(exit_codes.ENDINGS)
    assert len(set(named.values())) == len(named)


def test_a_code_above_128_is_a_signal_and_worth_a_start():
    assert exit_codes.ending(137).meaning.startswith("ended by signal 9 (9: killed, often for lack of memory;")
    assert exit_codes.ending(137).restart
    assert exit_codes.ending(143).meaning.startswith("preempted")
    assert not exit_codes.ending(99).restart
