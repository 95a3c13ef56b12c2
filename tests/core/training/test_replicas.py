"""Fingerprints of replicated arrays: copies that differ are detected, shards are not compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.hosts import exit_codes, failure_diagnosis
from core.training import replicas
from core.training.trainer import StepReport


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))


def place(mesh, array, *axes):
    return jax.device_put(jnp.asarray(array), NamedSharding(mesh, PartitionSpec(*axes)))


def with_wrong_copy(array, chip):
    """The same array, with one element of what one chip holds changed."""
    shards = [shard.data for shard in array.addressable_shards]
    shards[chip] = jax.device_put(shards[chip].at[(0,) * array.ndim].add(1), shards[chip].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@pytest.mark.covers("X07", "X15")
def test_copies_have_one_number_and_a_wrong_one_has_another(mesh):
    state = {
        "norm": place(mesh, np.arange(6.0)),
        "weights": place(mesh, np.arange(24.0).reshape(4, 6), "fsdp"),
        "own": place(mesh, np.arange(8.0), ("data", "fsdp")),
        "step": place(mesh, np.int32(3)),
    }
    common = replicas.Replicas(state)
    numbers = common.hash(state)()
    assert sorted(numbers) == ["norm", "step", "weights [0:2, 0:6]", "weights [2:4, 0:6]"]
    assert [len(numbers[name]) for name in sorted(numbers)] == [4, 4, 2, 2]
    assert all(len(set(held)) == 1 for held in numbers.values())
    for name, piece in (("norm", "norm"), ("weights", "weights [2:4, 0:6]"), ("step", "step")):
        wrong = common.hash(state | {name: with_wrong_copy(state[name], 3)})()
        assert [at for at, held in wrong.items() if len(set(held)) > 1] == [piece]
        assert wrong[piece][-1] != numbers[piece][-1]


def test_the_majority_is_right_and_two_hosts_are_undecided():
    same, other = {"w": [5, 5], "v": [1]}, {"w": [5, 6], "v": [1]}
    assert failure_diagnosis.judge_copies(8, {0: same, 1: same, 2: same}) is None
    verdict = failure_diagnosis.judge_copies(8, {0: same, 1: other, 2: same})
    assert verdict.hosts == (1,)
    assert verdict.says == "after step 8, host 1 disagrees with the majority: w"
    assert (verdict.code, verdict.others) == (exit_codes.DIVERGED, exit_codes.DIVERGED)
    verdict = failure_diagnosis.judge_copies(8, {0: {"w": [5], "v": [1]}, 1: {"w": [6], "v": [2]}})
    assert verdict.hosts == (0, 1)
    assert verdict.says == "after step 8, hosts 0, 1 disagree, and none is in the majority: v, w"


def test_the_hook_hands_over_one_step_later_and_the_last_at_the_end(mesh):
    handed = []
    compare = replicas.Compare(lambda step, numbers: handed.append((step, sorted(numbers))), every=3)
    state = {"w": place(mesh, np.arange(6.0))}
    for step in range(1, 7):
        compare.after_step(StepReport(step, {"loss": float("nan")}, {}, 0.1, 0.0))
        if compare.needs_state(step):
            compare.at_boundary(step, state)
        assert len(handed) == (step > 3)
    compare.close()
    assert handed == [(3, ["metrics/loss", "w"]), (6, ["metrics/loss", "w"])]
