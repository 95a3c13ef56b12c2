"""What of a run under way is a message to the user, and what is a fault with a traceback."""

import json
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core import slices
from core.training import prefetch
from launch.under_way import refusing


def unpacked():
    one, two = [1, 2, 3]
    return one, two


def not_split():
    four = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    return jax.device_put(np.zeros(3), NamedSharding(four, PartitionSpec("fsdp")))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda: json.loads("{x"), "JSONDecodeError: Expecting property name"),
        (lambda: b"\xff".decode(), "UnicodeDecodeError: "),
        (unpacked, "ValueError: too many values to unpack"),
        (lambda: np.concatenate([]), "ValueError: need at least one array"),
        (not_split, "IndivisibleError: "),
    ],
    ids=["json", "text", "unpacking", "numpy", "jax"],
)
def test_a_fault_is_no_refusal(fault, said):
    with pytest.raises(RuntimeError, match=said) as caught, refusing.own_refusals_alone():
        fault()
    assert isinstance(caught.value.__cause__, ValueError)


def refused_in_a_thread():
    """As what reads data ahead hands its errors over."""
    errors = []

    def reads():
        try:
            prefetch.restore(None, {})
        except ValueError as error:
            errors.append(error)

    reader = threading.Thread(target=reads)
    reader.start()
    reader.join()
    raise errors[0]


@pytest.mark.parametrize("refusal", [lambda: slices.get("v9-1"), refused_in_a_thread], ids=["slice", "thread"])
def test_a_refusal_of_ours_stays_one(refusal):
    with pytest.raises(ValueError, match=r"v9-1|no data position"), refusing.own_refusals_alone():
        refusal()


def test_what_is_no_value_error_is_left_alone():
    with pytest.raises(KeyError), refusing.own_refusals_alone():
        {}["missing"]
