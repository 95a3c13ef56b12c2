"""Exit codes: one meaning each, and signals."""

import re

import pytest

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


def test_what_may_go_well_at_a_second_start_is_worth_one():
    """Mistakes, finished runs and wrong numbers would end as before; only faults of hosts and links may not."""
    assert {code for code, ending in exit_codes.ENDINGS.items() if ending.restart} == {
        exit_codes.RAISED,
        exit_codes.HUNG,
        exit_codes.PEER_LOST,
        exit_codes.UNREACHABLE,
        exit_codes.JAX_ABORTED,
        exit_codes.PREEMPTED,
    }
    assert all(re.search(r"[a-z]{3}", ending.meaning) for ending in exit_codes.ENDINGS.values())


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (14, 14), (-9, 137), (-15, exit_codes.PREEMPTED)])
def test_a_process_that_a_signal_ended_has_the_code_that_a_shell_gives_it(returncode, code):
    assert exit_codes.of_process(returncode) == code
