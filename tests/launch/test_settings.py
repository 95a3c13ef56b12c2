"""Settings that disagree with one another are refused."""

import pytest

from core.errors import UserError
from launch import settings


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"statistics_interval": 15}, "statistics_interval = 15: expected a multiple of log_interval = 10"),
        ({"profile_steps": (20, 10, 12)}, "profile_steps has 10 and 12: expected steps at least 3 apart"),
        ({"profile_steps": (0,)}, r"profile_steps = \(0,\): expected a sequence of steps from 1 up"),
        ({"memory_profile_steps": (True,)}, "expected a sequence of steps from 1 up"),
    ],
)
def test_logging_that_would_leave_something_out_is_refused(fields, said):
    with pytest.raises(UserError, match=said):
        settings.Logging(**fields)


def test_profiles_may_follow_one_another():
    assert settings.Logging(profile_steps=(10, 13, 13, 16)).profile_steps == (10, 13, 13, 16)
