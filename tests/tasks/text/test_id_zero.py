"""Id 0 can be an ordinary token: only weights and segment_ids mark padding."""

import dataclasses
import io
import itertools
import sys
import types

import haiku as hk
import jax
import numpy as np
import pytest
import sentencepiece

from core import logical, optimizers, step
from core.types import DataLayout
from models import losses
from models.haiku_model import HaikuModel
from tasks import text
from tasks.text import document_streams, vocabularies

LENGTH = 8
TEXTS = ("abba", "a", "caab" * 5, "aaaaaaaa", "zza")


@dataclasses.dataclass(frozen=True)
class Letters(vocabularies.Bytes):
    """The letters a to z from id `first`, and an end of document."""

    first: int
    eos_id: int
    size = 27
    pad_id = None
    bos_id = 26
    hash = "letters"

    def encode(self, text):
        return [byte - ord("a") + self.first for byte in text.encode()]


A_IS_ZERO, END_IS_ZERO = Letters(first=0, eos_id=26), Letters(first=1, eos_id=0)


def files(folder, vocabulary):
    for number, content in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(content)
    named = {"train": f"{folder}/*.txt", "validation": f"{folder}/*.txt"}
    return text.files(**named, length=LENGTH, num_streams=1, vocabulary=vocabulary)


def from_hub(monkeypatch, vocabulary):
    class Examples(list):
        num_shards = 1

        def shard(self, num_shards, index):
            return self

        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...

    module = types.ModuleType("datasets")
    module.load_dataset = lambda *_, **__: Examples({"text": content} for content in TEXTS)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(document_streams, "WINDOW_IDS", 40)
    return text.huggingface(name="owner/letters", length=LENGTH, num_streams=1, vocabulary=vocabulary)


def batches_of(task, rows=2):
    return task.evaluation(DataLayout(rows, tuple(range(rows)), tuple(range(rows))))


@pytest.mark.parametrize("vocabulary", [A_IS_ZERO, END_IS_ZERO], ids=["a is 0", "end of document is 0"])
@pytest.mark.parametrize("source", ["files", "hub"])
def test_zeros_are_packed_as_tokens(source, vocabulary, tmp_path, monkeypatch):
    task = files(tmp_path, vocabulary) if source == "files" else from_hub(monkeypatch, vocabulary)
    whole = [(*vocabulary.encode(content), vocabulary.eos_id) for content in TEXTS]
    wanted = {ids[at : at + LENGTH] for ids in whole for at in range(0, len(ids), LENGTH)}
    seen = set()
    for batch in batches_of(task):
        real = batch["segment_ids"] > 0
        assert (batch["weights"] == real).all()
        for key in ("inputs", "targets", "positions"):
            assert (batch[key][~real] == 0).all()
        for row, ids in zip(range(2), batch["segment_ids"], strict=True):
            for number in range(1, ids.max() + 1):
                targets, inputs, positions = (batch[k][row][ids == number] for k in ("targets", "inputs", "positions"))
                assert inputs.tolist() == [26, *targets[:-1]]
                assert positions.tolist() == list(range(len(targets)))
                seen.add(tuple(targets.tolist()))
    assert seen == wanted


class Bigrams(HaikuModel):
    """Predicts each id from the one before it."""

    def sums(self, batch, *, is_training):
        table = logical.param("table", (27, 27), ("vocab", None), hk.initializers.Constant(0.0))
        return losses.cross_entropy(table[batch["inputs"]], batch["targets"], batch["weights"], vocab_size=27)


def test_a_model_learns_and_is_evaluated_on_zeros(tmp_path):
    batches = list(batches_of(files(tmp_path, A_IS_ZERO)))
    first = batches[0]
    optimizer = optimizers.adamw(learning_rate=optimizers.constant(0.1)).for_model(Bigrams(), first)
    state = step.create(Bigrams(), optimizer, Bigrams().init(jax.random.key(0), first), first)
    train = jax.jit(step.train_step(Bigrams(), optimizer, seed=0))
    evaluate = jax.jit(step.eval_step(Bigrams(), optimizer, seed=0))
    before = evaluate(state, first)["loss"]
    tokens = (first["segment_ids"] > 0).sum()
    assert tokens > (first["targets"] != 0).sum()  # some of the tokens are the letter a
    assert (float(before.weight), float(before.total)) == (tokens, pytest.approx(tokens * np.log(27), rel=1e-5))
    for batch in itertools.islice(itertools.cycle(batches), 20):
        state, metrics = train(state, batch)
        assert float(metrics["weight"]) == (batch["segment_ids"] > 0).sum()
    assert float(evaluate(state, first)["loss"].total) < 0.8 * float(before.total)


def test_a_vocabulary_that_pads_with_zero_refuses_a_zero_in_a_document(tmp_path, monkeypatch):
    class Padded(Letters):
        pad_id = 0

    for task in (files(tmp_path, Padded(0, 26)), from_hub(monkeypatch, Padded(0, 26))):
        with pytest.raises(ValueError, match=r"expected 1 to 26 \(id 0 is reserved"):
            next(batches_of(task))


@pytest.fixture
def without_padding(tmp_path):
    """A model without a padding id, whose id 0 ends documents."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba", "abba baab"] * 20),
        model_writer=model,
        model_type="char",
        vocab_size=8,
        hard_vocab_limit=False,
        pad_id=-1,
        eos_id=0,
        unk_id=1,
        bos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "own.model").write_bytes(model.getvalue())
    return vocabularies.sentencepiece(f"{tmp_path}/own.model")


def test_a_sentencepiece_model_may_lack_padding(without_padding):
    assert (without_padding.pad_id, without_padding.eos_id, without_padding.bos_id) == (None, 0, 0)
    ids = without_padding.encode("abba")
    assert without_padding.decode([*ids, 0, *ids]) == "abba"
