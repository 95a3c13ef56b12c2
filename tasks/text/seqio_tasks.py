"""Finds tasks and mixtures that the user's module registered with seqio, and describes their vocabulary."""

import base64
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from core.errors import Problem, UserError
from tasks import edit_distance
from tasks.text.ids import Vocabulary, before_end
from tasks.text.tfds_source import tensorflow
from tasks.text.vocabularies import Bytes

_SAMPLES = ("The quick brown fox jumps over 13 lazy dogs.", "  x = [1, 2]\n", "naïve café, 你好")


def library() -> Any:
    """Imports and returns seqio. Raises UserError if it is not installed."""
    if importlib.util.find_spec("seqio") is None:
        fix = f"{sys.executable} -m pip install --no-deps seqio"  # docs/how-to/install.md says when it is missing
        raise UserError(Problem("text.seqio and --task need the package seqio", fix=fix))
    tensorflow()
    edit_distance.stand_in()
    import seqio

    return seqio


@functools.cache
def own_vocabulary() -> Any:
    """Returns the class of seqio vocabularies that have the ids of a vocabulary of Renga, `ours`."""
    seqio, tf = library(), tensorflow()

    class OwnVocabulary(seqio.Vocabulary):  # type: ignore[name-defined]  # of a library that is imported late
        def __init__(self, ours: Vocabulary) -> None:
            super().__init__(extra_ids=0)
            self.ours = ours

        bos_id = property(lambda self: self.ours.bos_id)
        eos_id = property(lambda self: self.ours.eos_id)
        unk_id = property(lambda self: None)
        _base_vocab_size = property(lambda self: self.ours.size)

        def _encode(self, s: str) -> Sequence[int]:
            return self.ours.encode(s)

        def _decode(self, ids: Iterable[int]) -> str:
            return self.ours.decode(ids)

        def _encode_tf(self, s: Any) -> Any:
            def encode(content: Any) -> np.ndarray:
                return np.array(self.ours.encode(content.decode()), np.int32)

            ids = tf.numpy_function(encode, [s], tf.int32)
            ids.set_shape([None])
            return ids

        def _decode_tf(self, ids: Any) -> Any:
            return tf.numpy_function(lambda values: self.ours.decode(values.tolist()).encode(), [ids], tf.string)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, OwnVocabulary) and self.ours.hash == other.ours.hash

        def __hash__(self) -> int:
            return hash(self.ours.hash)

    return OwnVocabulary


@functools.cache
def registered(name: str, where: str = "text.seqio.name", *, module: str | None = None) -> Any:
    """Imports the module, and returns a seqio Task or Mixture.

    Raises UserError if there is no such task for a decoder.
    """
    seqio = library()
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # the user's code may raise anything
            said = " ".join(str(error).split())
            raise UserError(f"text.seqio.module: importing {module} fails: {type(error).__name__}: {said}") from error
    names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"registered names: {', '.join(sorted(names)[:8]) or 'none'}."
        raise UserError(
            f"{where}: no seqio task or mixture {name!r}; {hint} Name the module that registers it: "
            "text.seqio.module, or --module"
        )
    found = seqio.get_mixture_or_task(name)
    if set(found.output_features) not in ({"targets"}, {"inputs", "targets"}):
        raise UserError(
            f"{where}: {name} has features {sorted(found.output_features)}, expected targets, or inputs and targets, "
            "as for a decoder"
        )
    for feature, about in found.output_features.items():
        if about.rank != 1 or about.dtype != tensorflow().int32:
            raise UserError(
                f"{where}: the feature {feature} of {name} is {about.dtype.name} of rank {about.rank}, expected int32 "
                "of rank 1: ids of tokens"
            )
    first, *others = (feature.vocabulary for feature in found.output_features.values())
    if any(vocabulary != first for vocabulary in others):
        raise UserError(f"{where}: the inputs and targets of {name} have different vocabularies, expected the same one")
    return found


def described(name: str) -> dict[str, Any]:
    """Returns a description of a registered task's vocabulary, as JSON values.

    It has `kind` (bytes, sentencepiece, other), `size`, `eos_id` (-1: none), `pad_id` (None: none) and `hash`; for
    SentencePiece also its `model` in base64.
    """
    vocabulary, seqio = registered(name).output_features["targets"].vocabulary, library()
    size, pad_id = int(vocabulary.vocab_size), 0 if reserves_zero(vocabulary) else None
    found = {"kind": "other", "size": size, "eos_id": eos_id(vocabulary), "pad_id": pad_id}
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        model = vocabulary.sp_model
        digest = hashlib.sha256(model).hexdigest()
        return found | {"kind": "sentencepiece", "hash": digest, "model": base64.b64encode(model).decode()}
    if type(vocabulary) is seqio.ByteVocabulary:
        digest = Bytes().hash if size == Bytes.size else hashlib.sha256(f"bytes, {size} ids".encode()).hexdigest()
        return found | {"kind": "bytes", "hash": digest}
    if isinstance(vocabulary, own_vocabulary()):
        return found | {"hash": vocabulary.ours.hash}
    texts = () if isinstance(vocabulary, seqio.PassThroughVocabulary) else _SAMPLES
    what = [type(vocabulary).__name__, size, [list(map(int, vocabulary.encode(text))) for text in texts]]
    return found | {"hash": hashlib.sha256(json.dumps(what).encode()).hexdigest()}


def eos_id(vocabulary: Any) -> int:
    """Returns the end-of-document id of a seqio vocabulary; -1 if it has none."""
    return -1 if vocabulary.eos_id is None else int(vocabulary.eos_id)


def reserves_zero(vocabulary: Any) -> bool:
    """Returns whether id 0 of a seqio vocabulary is used only for padding."""
    seqio = library()
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return vocabulary.tokenizer.pad_id() == 0
    return isinstance(vocabulary, seqio.ByteVocabulary)


@dataclasses.dataclass(frozen=True)
class SeqioVocabulary(Vocabulary):
    """The vocabulary of a registered task, as `tasks.text.ids.Vocabulary`.

    Attributes:
      name: name of the task.
      module: the Python module that registers it; None: none is imported.
    """

    name: str
    module: str | None = None
    pad_id = 0
    bos_id = 0

    @property
    def _theirs(self) -> Any:
        return registered(self.name, module=self.module).output_features["targets"].vocabulary

    @property
    def size(self) -> int:
        return int(self._theirs.vocab_size)

    @property
    def eos_id(self) -> int:
        return eos_id(self._theirs)

    @property
    def hash(self) -> str:
        model = getattr(self._theirs, "sp_model", None) or json.dumps([type(self._theirs).__name__, self.size]).encode()
        return hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._theirs.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._theirs.decode(before_end(ids, self))

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        _ = self.size

    def problems(self) -> list[str]:
        return []

    def describe(self) -> str:
        return f"the vocabulary of {self.name}"


def has_ids_of(name: str, vocabulary: Any) -> bool:
    """Returns whether a task's vocabulary has the size of `vocabulary` and its ids for sample texts.

    False if `vocabulary` is None.
    """
    theirs = SeqioVocabulary(name)
    if vocabulary is None or theirs.hash == vocabulary.hash:
        return vocabulary is not None
    return theirs.size == vocabulary.size and all(theirs.encode(text) == vocabulary.encode(text) for text in _SAMPLES)
