"""Streams do not depend on hosts; tested without TensorFlow on the synthetic task."""

import numpy as np
import pytest

from core.batches import Field
from core.errors import UserError
from core.types import DataLayout
from tasks import streams, synthetic

TASK = synthetic.random_tokens(vocab_size=50, length=7, num_streams=4)


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].dtype == right[key].dtype, key
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


@pytest.mark.covers("D02", "D15")
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_any_number_of_hosts_sees_the_same_global_batches(hosts, strided, host_layouts, global_batch):
    whole = TASK.train(host_layouts(16, 1)[0], seed=3)
    layouts = host_layouts(16, hosts, strided)
    parts = [TASK.train(layout, seed=3) for layout in layouts]
    for _ in range(3):
        assert_equal(global_batch(layouts, [next(part) for part in parts]), next(whole))


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_every_stream_is_saved_by_one_host_and_continues_on_others(hosts, host_layouts, global_batch):
    layouts = host_layouts(16, 4, strided=True)
    parts = [TASK.train(layout, seed=3) for layout in layouts]
    for _ in range(5):
        assert [next(part) for part in parts]
    states = [part.state() for part in parts]
    assert sorted(name for state in states for name in state) == [streams.stream_name(i) for i in range(4)]
    union = {name: value for state in states for name, value in state.items()}
    expected = global_batch(layouts, [next(part) for part in parts])
    fewer = host_layouts(16, hosts)
    restored = [TASK.train(layout, seed=3) for layout in fewer]
    for batches in restored:
        batches.restore(union)
    assert_equal(global_batch(fewer, [next(batches) for batches in restored]), expected)


def test_a_row_on_two_hosts_is_saved_once():
    rows = (0, 1, 2, 3)
    owner = TASK.train(DataLayout(4, rows, rows), seed=0)
    other = TASK.train(DataLayout(4, rows, ()), seed=0)
    assert len(owner.state()) == 4
    assert other.state() == {}
    assert_equal(next(owner), next(other))


def test_a_host_opens_only_the_streams_of_its_rows():
    opened = []

    def open_stream(index, rows):
        opened.append((index, rows))
        return iter(())

    layout = DataLayout(16, (0, 3, 13), (0, 3, 13))
    streams.StreamBatches(layout, spec=TASK.spec(16), num_streams=8, open_stream=open_stream, identity={})
    assert opened == [(0, 2), (1, 2), (6, 2)]


@pytest.mark.parametrize("count", [1, 6, 7, 12])
def test_a_pass_reads_every_row_once_in_order_and_fills_the_last_batch_with_zeros(count, host_layouts, global_batch):
    spec = {"x": Field((6, 2), np.int32, ("batch", "length"))}

    def rows():
        for row in range(1, count + 1):
            yield {"x": np.full((1, 2), row, np.int32)}

    layouts = host_layouts(6, 3, strided=True)
    hosts = [iter(streams.PassBatches(layout, spec=spec, stream=rows())) for layout in layouts]
    found = [global_batch(layouts, batches)["x"] for batches in zip(*hosts, strict=True)]
    expected = np.zeros(-(-count // 6) * 6, np.int32)
    expected[:count] = range(1, count + 1)
    np.testing.assert_array_equal(np.concatenate(found), np.repeat(expected[:, None], 2, axis=1))


def test_spec_is_of_the_global_batch(host_layouts):
    spec = TASK.train(host_layouts(16, 4)[1], seed=0).spec
    assert spec == TASK.spec(16)
    assert {key: (value.shape, value.dtype) for key, value in spec.items()} == {
        "inputs": ((16, 7), np.int32),
        "targets": ((16, 7), np.int32),
        "weights": ((16, 7), np.float32),
        "segment_ids": ((16, 7), np.int32),
        "positions": ((16, 7), np.int32),
    }


@pytest.mark.covers("D01")
@pytest.mark.parametrize(
    ("batch_size", "num_streams", "advice"),
    [
        (10, 4, "BATCH_SIZE = 8 or 12$"),
        (3, 4, "BATCH_SIZE = 4$"),
    ],
)
def test_streams_must_divide_the_batch(batch_size, num_streams, advice):
    with pytest.raises(ValueError, match=advice):
        streams.rows_per_stream(batch_size, num_streams=num_streams)
    task = synthetic.random_tokens(vocab_size=50, length=7, num_streams=num_streams)
    with pytest.raises(ValueError, match=advice):
        task.spec(batch_size)


SAYS = r"the checkpoint has positions of 3 streams of data, and this run has NUM_STREAMS = 4 \(.*stream_00002\): resume"


def test_a_position_of_other_data_is_refused(host_layouts):
    layout = host_layouts(16, 1)[0]
    state = TASK.train(layout, seed=3).state()
    with pytest.raises(ValueError, match=r"SEED = 4, was 3"):
        TASK.train(layout, seed=4).restore(state)
    with pytest.raises(ValueError, match=r"BATCH_SIZE = 8, was 16"):
        TASK.train(host_layouts(8, 1)[0], seed=3).restore(state)
    with pytest.raises(ValueError, match="is not a data position"):
        TASK.train(layout, seed=3).restore({name: b"garbage" for name in state})
    with pytest.raises(ValueError, match=SAYS):
        TASK.train(layout, seed=3).restore({name: value for name, value in state.items() if not name.endswith("2")})


@pytest.mark.parametrize("state", [b"garbage", b"\xff", b"[3]", b"{}", b'{"rows": "3"}'])
def test_bytes_that_are_not_a_position_are_refused(state):
    with pytest.raises(UserError, match=r"is not a data position: the checkpoint is damaged"):
        streams.read_position(state, rows=int)


def test_a_layout_outside_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"rows \[16\]"):
        TASK.train(DataLayout(16, (0, 16), (0,)), seed=0)
    with pytest.raises(ValueError, match=r"owned_rows \[5\]"):
        TASK.train(DataLayout(16, (0, 1), (5,)), seed=0)
