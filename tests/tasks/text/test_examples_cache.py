"""Token caches of examples with prompts and of several epochs, and their mixtures, are read without seqio."""

import collections
import itertools
import json
import zlib

import numpy as np
import pytest

from core.errors import UserError
from tasks import text
from tasks.text import seqio_cache, token_cache, tokenizing, vocabularies
from tasks.text.documents import StreamSpec
from tasks.text.mixed_documents import MixedChunks
from tasks.text.token_cache import TokenCache
from tasks.text.token_writer import Batch, Converted

LENGTH = 12
ABOUT = {"format": 2, "dtype": "uint16", "field": "", "by_hash": False, "excluded": "", "near_duplicates": None}
BYTES = {"kind": "bytes", "size": 259, "eos_id": 1, "pad_id": 0, "hash": vocabularies.Bytes().hash}


def write(folder, first, *, epochs=(9, 11), prompts=True):
    """Examples of 2 to 7 ids, `first` and then their number; half of them is a prompt. The last epoch is held out."""
    numbers = [np.array([first, *[3 + n] * (1 + n % 6)], np.uint16) for n in range(sum(epochs))]
    bounds = np.cumsum([0, *epochs])

    def convert(files, position):
        for start, stop in itertools.pairwise(bounds):
            found, held_out = numbers[start:stop], stop == bounds[-1]
            sizes = np.array([len(ids) for ids in found])
            yield (
                Batch([], "validation" if held_out else "train", frozenset(), None, 0, 0, 1.0),
                Converted(
                    ids=np.concatenate(found),
                    sizes=sizes,
                    text_bytes=sizes * 0,
                    checks=np.array([zlib.crc32(ids) for ids in found], np.uint32),
                    is_validation=np.full(len(found), held_out),
                    shares_text=np.zeros(len(found), bool),
                    prompts=(sizes // 2).astype(np.int32) if prompts else None,
                ),
            )

    def require(writer):
        writer.counts.splits["train"]["epochs"] = list(map(int, epochs[:-1]))

    about = {**ABOUT, "has_prompts": prompts, "vocabulary": {"name": "bytes", "described": "bytes"} | BYTES}
    options = {"require": require, "say": print, "report": lambda counts: None, "check": lambda: None}
    tokenizing.write(str(folder), about, [], convert, quiet=True, **options)
    return TokenCache(str(folder), vocabularies.Bytes(), False), numbers


def spec(split="train", *, seed=3, once=False, index=0, num_streams=1):
    return StreamSpec(split, index, num_streams, 1, LENGTH, seed, vocabularies.Bytes(), once)


def ids_of(chunks, count, most=LENGTH):
    return [tuple(chunks.next_segment(most).targets.tolist()) for _ in range(count)]


def test_a_prompt_has_weight_0_in_every_piece_of_an_example(tmp_path):
    cache, numbers = write(tmp_path / "cache", 3)
    for most in (1, 2, LENGTH):
        chunks = cache.chunks(spec("validation", seed=None, once=True))
        for ids in numbers[9:]:
            pieces = [chunks.next_segment(most) for _ in range(0, len(ids), most)]
            assert np.concatenate([piece.targets for piece in pieces]).tolist() == ids.tolist()
            weights = np.concatenate([piece.weights for piece in pieces])
            assert weights.tolist() == [float(at >= len(ids) // 2) for at in range(len(ids))]
        assert chunks.next_segment(most) is None


def test_cached_epochs_follow_one_another_each_in_an_order_of_its_own(tmp_path):
    cache, numbers = write(tmp_path / "cache", 3, epochs=(9, 7, 8, 2))
    epochs = [collections.Counter(map(tuple, numbers[a:b])) for a, b in ((0, 9), (9, 16), (16, 24))]
    chunks, orders = cache.chunks(spec()), []
    for wanted in (*epochs, *epochs):
        orders.append(ids_of(chunks, wanted.total()))
        assert collections.Counter(orders[-1]) == wanted
    assert orders[0] != orders[3]
    moved = cache.chunks(spec())
    moved.move({"document": 9 + 7 + 8 + 3, "id": 0})
    assert ids_of(moved, 6) == orders[3][3:]


def test_a_mixture_holds_its_rates_over_all_streams_and_continues_exactly(tmp_path, monkeypatch):
    for name, few in (("_BOUNDS", 16), ("_REQUEST_TOKENS", 256), ("AHEAD_TOKENS", 1024)):  # of many short epochs
        monkeypatch.setattr(token_cache, name, few)
    caches = [write(tmp_path / name, first)[0] for name, first in (("a", 4), ("b", 5), ("c", 6))]
    rates, streams = (2.0, 0.5, 1.5), 4
    mixed = [
        MixedChunks(
            [cache.chunks(spec(index=i, num_streams=streams)) for cache in caches],
            rates,
            spec(index=i, num_streams=streams),
        )
        for i in range(streams)
    ]
    drawn = np.array([ids_of(chunks, 1)[0][0] for _ in range(200) for chunks in mixed])
    for first, rate in zip((4, 5, 6), rates, strict=True):
        for start in range(0, 700, 31):
            assert abs((drawn[start : start + 80] == first).sum() - 80 * rate / 4) <= 2
        of_streams = (drawn.reshape(200, streams) == first).mean(axis=0)
        assert abs(of_streams - rate / 4).max() <= 0.02  # every stream reads every source
    again = MixedChunks([cache.chunks(spec(num_streams=streams)) for cache in caches], rates, spec(num_streams=streams))
    again.move(json.loads(json.dumps(mixed[0].position())))
    assert ids_of(again, 20) == ids_of(mixed[0], 20)


def test_a_finished_cache_is_read_without_its_module(tmp_path):
    task = text.seqio(name="a.b", module="nowhere", cache=str(tmp_path), inputs_length=4, length=LENGTH, num_streams=1)
    write(tmp_path / "00_a.b", 4)
    about = {"rate": 1.0, "shards": {"train": 1, "validation": 1}, "files": [], "draws": False}
    asked = {"name": "a.b", "module": "nowhere", "inputs": 4, "targets": 8, "epochs": None, "module_hash": "of another"}
    saved = {"asked": asked, "vocabulary": BYTES, "tasks": {"a.b": about}}
    (tmp_path / seqio_cache.FILE).write_text(json.dumps(saved))
    task.prepare("unused", is_host_zero=True)
    assert (task.problems(), task.vocabulary.size, task.train_tokens()) == ([], 259, 36)
    assert "20 examples" in task.describe()
    assert task.corpus.packing == 2
    longer = text.seqio(name="a.b", module="nowhere", cache=str(tmp_path), inputs_length=4, length=16, num_streams=1)
    (problem,) = longer.problems()
    assert "now 12" in problem
    with pytest.raises(UserError, match="now 12"):
        longer.prepare("unused", is_host_zero=True)
