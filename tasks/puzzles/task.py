"""The puzzle task: reads batches from a dataset in a folder, which the run may build first.

B: rows. S: tokens per puzzle.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from core import identity
from core.batches import BatchSpec, Field, listing_of
from core.errors import Problem, UserError
from core.files import paths
from core.types import IGNORED, Batches, DataLayout, Model, can
from tasks import streams, whole_folder
from tasks.puzzles import arc_voting, files, order, random_grids, writing
from tasks.puzzles.files import Split
from tasks.streams import Stream
from tasks.text import vocabularies

WHOLE = files.Cut()
_EMPTY = "{!r} has a split without puzzles; build it again"


class _HasPuzzles(Protocol):
    num_puzzles: int


class Recipe(Protocol):
    """The parameters of a dataset that can be built: a frozen dataclass whose fields are JSON values."""

    @property
    def seq_len(self) -> int:
        """Tokens per puzzle."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens, including padding."""

    @property
    def num_train(self) -> int | None:
        """Number of training puzzles; None: all."""

    def about(self) -> dict[str, Any]:
        """Returns the kind and parameters of the dataset, as JSON values."""

    def build(self, directory: str) -> Mapping[str, Any]:
        """Writes the dataset and returns the content of its build.json."""


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Stored:
    """An existing dataset in a folder.

    Attributes:
      directory: local or gs://; "" if it is not set.
      asked: the requested numbers of training puzzles, and of copies of each; None: all.
    """

    directory: str
    asked: files.Cut
    _splits: dict[str, Split] = dataclasses.field(metadata=identity.NOT_IDENTITY)

    def __init__(self, directory: str, *, cut: files.Cut = WHOLE):
        self.directory, self.asked = directory, cut
        self._splits = {}

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Reads the dataset. Raises UserError if it is damaged or smaller than requested."""
        if not all(self.split(split).num_examples for split in files.SPLITS):
            raise UserError(_EMPTY.format(self.directory))

    def split(self, name: str) -> Split:
        """Returns one split."""
        if name not in self._splits:
            found = files.read_split(self.directory, name)
            if name == "train":
                found = self._part(found)
            self._splits[name] = found
        return self._splits[name]

    def problems(self) -> list[str]:
        """Returns the problems found in the metadata; a dataset on gs:// is not checked."""
        if not self.directory:
            return ["DATA is not set: bind it to a folder of puzzles written by launch/run make-dataset"]
        if paths.is_remote(self.directory):
            return []
        try:
            if any(files.read_metadata(self.directory, split).total_groups < 1 for split in files.SPLITS):
                return [Problem(_EMPTY.format(self.directory), file=self.directory)]
            if self.asked != WHOLE:
                self.asked.require(files.read_group_indices(self.directory, "train"), directory=self.directory)
        except UserError as error:
            return [Problem(str(error), file=self.directory)]
        return []

    def named_files(self) -> tuple[str, ...]:
        """Returns the folder that the user named, if any."""
        return (self.directory,) if self.directory else ()

    def rehearsal(self) -> Stored | None:
        """Returns the dataset for a smoke run: itself, or None if it has problems."""
        return None if self.problems() else self

    def describe(self) -> str:
        """Returns a short description for the run summary."""
        named = zip(("training puzzles", "copies of each"), self.asked, strict=True)
        part = "".join(f", {count:,} {what}" for what, count in named if count is not None)
        return f"puzzles of {self.directory or '(DATA is not set)'}{part}"

    def _part(self, split: Split) -> Split:
        self.asked.require(split.group_indices, directory=self.directory)
        return self.asked.of(split)

    def fingerprint(self) -> str:
        """Returns a hash of the metadata, the indices and a sample of the examples."""
        return files.fingerprint(self.split(name) for name in files.SPLITS)


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Built(Stored):
    """A dataset that host 0 builds if it does not exist.

    Attributes:
      directory: where it is; "" before `prepare`.
      recipe: the parameters of the dataset.
    """

    directory: str = dataclasses.field(metadata=identity.NOT_IDENTITY)
    recipe: Recipe
    _named: str | None

    def __init__(self, recipe: Recipe, *, directory: str | None = None):
        super().__init__("")
        self.recipe, self._named = recipe, directory
        self.asked = files.Cut(recipe.num_train, getattr(recipe, "num_aug", None))

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Builds the dataset on host 0 if it does not exist, and reads it on every host.

        Raises UserError if the folder has other puzzles.
        """
        self.directory = self._named or f"{run_dir}/puzzles"
        self._splits = {}
        if is_host_zero and not files.is_dataset(self.directory):
            print(f"building {self.describe()}, in {self.directory}", flush=True)
            if self._named is None:
                whole_folder.remove(self.directory)  # a start that was stopped may have left a part in a bucket
            self.recipe.build(self.directory)
        if not files.is_dataset(self.directory):
            raise UserError(
                f"no puzzles in {self.directory!r}: host 0 builds them first; do all hosts see this folder?"
            )
        if different := self._differences():
            raise UserError(
                f"{self.directory!r} holds other puzzles ({different}): name another directory, or remove it"
            )
        super().prepare(run_dir, is_host_zero=is_host_zero)

    def problems(self) -> list[str]:
        if not self._named or paths.is_remote(self._named) or not files.is_dataset(self._named):
            return []
        different = self._differences()
        if not different:
            return []
        said = f"{self._named!r} holds other puzzles ({different})"
        return [Problem(said, file=self._named, fix="name another directory")]

    def named_files(self) -> tuple[str, ...]:
        return (self._named,) if self._named else ()

    def rehearsal(self) -> Built:
        few = {name: min(8, getattr(self.recipe, name) or 8) for name in ("num_train", "num_test")}
        recipe: Any = self.recipe
        return Built(dataclasses.replace(recipe, **few))

    def describe(self) -> str:
        return "puzzles: " + ", ".join(f"{k} {v}" for k, v in self.recipe.about().items() if v not in (None, ""))

    def fingerprint(self) -> str:
        return super().fingerprint() if self.directory else json.dumps(self.recipe.about(), sort_keys=True)

    def _part(self, split: Split) -> Split:
        return split  # the recipe builds only the requested part

    def _differences(self) -> str:
        file = paths.resolve(self.directory or self._named or "") / writing.BUILD
        saved = json.loads(file.read_text()) if file.exists() else {}
        now = json.loads(json.dumps(self.recipe.about()))
        return ", ".join(f"{k}: saved {saved.get(k)!r}, now {v!r}" for k, v in now.items() if saved.get(k) != v)


@dataclasses.dataclass(frozen=True)
class PuzzleTask:
    """A `core.types.Task` of puzzles.

    A batch has `inputs` and `labels` [B, S] (labels of -100 are not scored) and `puzzle_ids` [B], all int32.

    Attributes:
      source: the dataset.
      length: S, tokens per puzzle.
      vocab_size: tokens are 0 to vocab_size - 1.
      epochs_per_iteration: epochs shuffled together; None: chosen automatically.
      eval_puzzles: held-out examples in an evaluation; None: all.
      eval_seed: seed that selects them.
    """

    source: Stored
    length: int
    vocab_size: int
    epochs_per_iteration: int | None = None
    eval_puzzles: int | None = None
    eval_seed: int = 0

    @property
    def num_streams(self) -> int:
        """The global batch is one stream."""
        return 1

    @property
    def vocabulary(self) -> vocabularies.Numbers:
        """Formats tokens as decimal numbers."""
        return vocabularies.Numbers(self.vocab_size)

    @property
    def asked(self) -> files.Cut:
        """The requested numbers of training puzzles, and of copies of each; None: all."""
        return self.source.asked

    @property
    def num_puzzles(self) -> int:
        """Rows that the model's puzzle embedding table needs."""
        return self.source.split("train").metadata.num_puzzle_identifiers

    def model_problems(self, model: Model, *, prepared: bool) -> list[str]:
        """Returns a problem if the model's puzzle embedding table has too few rows."""
        if not (prepared and can(model, _HasPuzzles)) or model.num_puzzles >= self.num_puzzles:
            return []
        return [
            f"the model has num_puzzles {model.num_puzzles}, but the data has {self.num_puzzles} puzzle identifiers: "
            f"set its num_puzzles = {self.num_puzzles} (more is allowed)"
        ]

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch."""
        streams.rows_per_stream(batch_size, num_streams=1)
        tokens = Field((batch_size, self.length), np.int32, ("batch", "length"))
        return {"inputs": tokens, "labels": tokens, "puzzle_ids": Field((batch_size,), np.int32, ("batch",))}

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Reads the dataset, which host 0 builds if necessary. Raises UserError if it does not fit the task."""
        self.source.prepare(run_dir, is_host_zero=is_host_zero)
        if problems := self._misfits({name: self.source.split(name).metadata for name in files.SPLITS}):
            raise UserError("\n".join(problems))

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator of batches."""
        split = self.source.split("train")

        def visits(rows: int) -> order.Shuffled:
            return order.Shuffled(split, batch_size=rows, seed=seed, epochs=self.epochs_per_iteration)

        return self._batches(layout, split, visits, {"split": "train", "seed": seed})

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns batches with each selected held-out example once."""
        split = self.source.split("test")

        def visits(rows: int) -> order.InOrder:
            return order.InOrder(split, batch_size=rows, subset=self.eval_puzzles, seed=self.eval_seed)

        return self._batches(layout, split, visits, {"split": "test", "seed": self.eval_seed})

    def evaluated_on(self, most: int | None = None) -> str:
        """Describes which held-out puzzles an evaluation of at most `most` rows (None: all) scores."""
        count = self.source.split("test").num_examples
        drawn = count if self.eval_puzzles is None else min(self.eval_puzzles, count)
        taken = drawn if most is None else min(most, drawn)
        if taken == count:
            return f"all {count:,} held-out puzzles"
        if drawn == count:
            return f"the first {taken:,} of {count:,} held-out puzzles"
        if taken < drawn:
            return (
                f"the first {taken:,} of the {drawn:,} drawn with seed {self.eval_seed} of {count:,} held-out puzzles"
            )
        return f"{drawn:,} of {count:,} held-out puzzles, drawn with seed {self.eval_seed}"

    def evaluating(self, rows: int | None) -> PuzzleTask:
        """Returns a copy whose evaluations have `rows` held-out examples; None: all."""
        return dataclasses.replace(self, eval_puzzles=rows)

    def judge(self) -> arc_voting.Judge | None:
        """Returns the judge that scores answers by voting; None if this is no ARC dataset."""
        return arc_voting.read_judge(self.source.directory) if self.source.directory else None

    def problems(self) -> list[str]:
        """Returns the problems that can be found without reading the puzzles."""
        directory = self.source.directory
        if (found := self.source.problems()) or not directory or paths.is_remote(directory):
            return found
        return self._misfits({name: files.read_metadata(directory, name) for name in files.SPLITS})

    def named_files(self) -> tuple[str, ...]:
        """Returns the folder that the user named, if any."""
        return self.source.named_files()

    def rehearsal(self) -> PuzzleTask:
        """Returns a task of the same shapes for smoke runs."""
        grids = random_grids.RandomGrids(seq_len=self.length, vocab_size=self.vocab_size)
        source = self.source.rehearsal() or Built(grids)
        return dataclasses.replace(self, source=source, epochs_per_iteration=None, eval_puzzles=8)

    def describe(self) -> str:
        """Returns one line for the run summary."""
        return f"{self.source.describe()}; length {self.length}"

    def fingerprint(self) -> str:
        """Returns a text that is equal on all hosts that read the same data."""
        return self.source.fingerprint()

    def _misfits(self, of: Mapping[str, files.Metadata]) -> list[str]:
        found = []
        for split, meta in of.items():
            wanted = [("seq_len", "length", meta.seq_len, self.length)]
            wanted += [("vocab_size", "vocab_size", meta.vocab_size, self.vocab_size)]
            found += [
                f"{self.source.directory!r}, {split}: {theirs} is {actual}, but the task's {ours} is {expected}; "
                f"set it to {actual}"
                for theirs, ours, actual, expected in wanted
                if actual != expected
            ]
        return found

    def _batches(self, layout: DataLayout, split: Split, visits: Any, identity: Mapping[str, Any]) -> Batches:
        return streams.StreamBatches(
            layout,
            spec=self.spec(layout.batch_size),
            num_streams=1,
            open_stream=lambda index, rows: PuzzleStream(split, visits(rows)),
            identity={"source": listing_of(self.fingerprint()), "epochs": self.epochs_per_iteration, **identity},
        )


class PuzzleStream(Stream):
    """Implements `streams.Stream` for a puzzle dataset; each element is one global batch."""

    def __init__(self, split: Split, visits: order.Shuffled | order.InOrder):
        self._split, self._visits = split, visits

    def __next__(self) -> Mapping[str, np.ndarray]:
        picked = next(self._visits)
        split, meta = self._split, self._split.metadata
        filler = picked.examples == order.FILLER
        rows = np.where(filler, 0, picked.examples)
        labels = split.labels[rows].astype(np.int32)  # [B, S]
        if meta.ignore_label_id is not None:
            labels[labels == meta.ignore_label_id] = IGNORED
        inputs = split.inputs[rows].astype(np.int32)
        ids = np.where(filler, meta.blank_identifier_id, split.puzzle_identifiers[picked.puzzles]).astype(np.int32)
        inputs[filler], labels[filler] = meta.pad_id, IGNORED
        return {"inputs": inputs, "labels": labels, "puzzle_ids": ids}

    def state(self) -> bytes:
        return self._visits.state()

    def restore(self, state: bytes) -> None:
        self._visits.restore(state)
