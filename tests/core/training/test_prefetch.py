import threading
import time
import traceback

import jax
import numpy as np
import pytest

from core.training import prefetch


class Counting:
    """Batches 0, 1, 2 … of one stream, with a snapshot that is the next number."""

    def __init__(self, end=None, pause=0.0):
        self.next, self.end, self.pause, self.snapshots = 0, end, pause, 0
        self.spec = {"x": jax.ShapeDtypeStruct((2,), np.int32)}

    def __next__(self):
        time.sleep(self.pause)
        if self.next == self.end:
            raise StopIteration
        self.next += 1
        return {"x": np.full(2, self.next - 1, np.int32)}

    def state(self):
        self.snapshots += 1
        return {"stream_0": str(self.next).encode(), "stream_1": b""}

    def restore(self, state):
        assert set(state) == {"stream_0", "stream_1"}
        self.next = int(state["stream_0"])


def values(batches, count):
    return [int(next(batches)["x"][0]) for _ in range(count)]


@pytest.fixture
def start():
    started = []

    def begin(batches, **kwargs):
        kwargs = {"to_device": jax.device_put, "snapshot_interval": 4} | kwargs
        started.append(prefetch.Prefetch(batches, **kwargs))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.mark.covers("D06")
def test_every_batch_once_in_order_then_the_end(start):
    batches = start(Counting(end=9))
    assert [int(batch["x"][0]) for batch in batches] == list(range(9))
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.covers("D05")
def test_batches_are_device_arrays_made_ahead(start):
    source = Counting()
    batches = start(source, depth=3)
    assert isinstance(next(batches)["x"], jax.Array)
    deadline = time.monotonic() + 5
    while source.next < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert source.next == 5  # One consumed, three waiting, one in hand; no more.
    assert batches.input_wait_seconds < 5


@pytest.mark.covers("D05")
def test_a_slow_input_is_seen_and_a_quick_one_is_not(start):
    slow = start(Counting(pause=0.1))
    values(slow, 3)
    assert slow.input_wait_seconds > 0.05
    quick = start(Counting())
    waits = []
    for _ in range(5):
        time.sleep(0.05)
        next(quick)
        waits.append(quick.input_wait_seconds)
    assert sorted(waits)[2] < 0.02


@pytest.mark.parametrize("consumed", [0, 1, 3, 4, 5, 8, 11])
def test_the_position_counts_consumed_batches(start, consumed):
    first = start(Counting(), depth=3)
    values(first, consumed)
    position = first.position()
    time.sleep(0.05)  # The thread goes on reading.
    assert first.position() == position
    again = Counting()
    prefetch.restore(again, position)
    assert values(again, 3) == [consumed, consumed + 1, consumed + 2]
    resumed = Counting()
    prefetch.restore(resumed, position)
    assert values(start(resumed), 2) == [consumed, consumed + 1]


def test_snapshots_are_rare(start):
    source = Counting(end=20)
    list(start(source, snapshot_interval=10))
    assert source.snapshots == 3


def test_an_exception_comes_with_its_own_traceback_after_the_batches_before_it(start):
    def fails_at_two(batch):
        if batch["x"][0] == 2:
            raise OverflowError("id 300 in a vocabulary of 259")
        return batch

    batches = start(Counting(), to_device=fails_at_two)
    assert values(batches, 2) == [0, 1]
    for _ in range(2):
        with pytest.raises(OverflowError, match="id 300") as caught:
            next(batches)
    assert "fails_at_two" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_close_joins_and_later_use_is_an_error(start):
    batches = start(Counting())
    next(batches)
    batches.close()
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        values(batches, 10)


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="depth is 0"):
        prefetch.Prefetch(Counting(), to_device=jax.device_put, depth=0)
    with pytest.raises(ValueError, match="no data position"):
        prefetch.restore(Counting(), {})
    at_one, at_two = (n.to_bytes(8, "big") + b"0" for n in (1, 2))
    with pytest.raises(ValueError, match="different positions"):
        prefetch.restore(Counting(), {"stream_0": at_one, "stream_1": at_two})
