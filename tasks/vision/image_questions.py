"""Reads questions about images from JSON lines.

A line has `image` (a path, relative to the folder of its file), `question` and `answer`. It may have `kind`, by which
evaluations count answers, and `weight`: how often it is drawn in training, relative to other lines. `grid` and `cells`
say where in the image the question points: at some cells of a grid of `grid` x `grid`, numbered row by row from 0.

  line -> image [size, size, 3] uint8;   slots, question, answer -> ids, weights, until [T]

T: tokens per row.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import posixpath
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from core import units
from core.batches import BatchSpec, Field, fingerprint_of
from core.checkpoints.image_processor import ImageInput
from core.errors import Problem, UserError, check_integer, check_text
from core.files import paths
from core.types import Batches, DataLayout
from tasks import streams
from tasks.sampled import SampledTask
from tasks.text import content_hash, documents
from tasks.text.documents import VALIDATION_PERCENT, File, list_files, pattern_problems, validation_names
from tasks.text.ids import Vocabulary, with_eos
from tasks.text.tokenizer_folders import FolderTokenizer
from tasks.vision import image_prompts, images, question_rows
from tasks.vision.image_prompts import ImagePrompts
from tasks.vision.question_lines import Question, read_question, read_questions

BROKEN = ("refuse", "skip")
_CACHE_BYTES = 2**28  # size of the cache of decoded images
_HELD_OUT = "by name"  # how images are held out; earlier versions chose them by absolute paths, which fingerprints lack
NO_KIND = -1


class BrokenImage(UserError):
    """Raised for an image that cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageQuestions:
    """A `core.types.Task` of questions about images.

    Attributes:
      train_files, validation_files: patterns of .jsonl files. validation_files (): the questions about 5% of the
        images, chosen by hash, are held out.
      image_size: rows and columns of pixels to which images are resized.
      image_tokens: S, positions per image.
      length: T, tokens per row; at least S + 2.
      num_streams: number of data streams; divides the batch size.
      kinds: names of kinds of questions, in the order of the numbers in the field `kind`; (): there is no such field.
      weighted: whether training lines are drawn by their weights; otherwise each occurs once per epoch.
      max_shift: training images are shifted by up to this many pixels.
      mirror: whether training images are mirrored, left to right, with probability 1/2.
      broken: for an image that cannot be read: "refuse": an error; "skip": its line is left out.
      ends: whether the end-of-document id follows each answer.
      evaluated: number of rows that an evaluation scores; None: all.
      prompts: how a published model reads images and questions; None: S positions first, then the question.
    """

    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    image_size: int
    image_tokens: int
    length: int
    num_streams: int
    vocabulary: Vocabulary
    kinds: tuple[str, ...] = ()
    weighted: bool = False
    max_shift: int = 0
    mirror: bool = False
    broken: str = "refuse"
    ends: bool = True
    evaluated: int | None = None
    prompts: ImagePrompts | None = None

    def spec(self, batch_size: int) -> BatchSpec:
        """Returns the fields of a global batch."""
        streams.rows_per_stream(batch_size, num_streams=self.num_streams)
        return batch_spec(
            batch_size,
            image_size=self.image_size,
            image_tokens=self.image_tokens,
            length=self.length,
            has_kinds=bool(self.kinds),
        )

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        """Prepares the vocabulary. Raises UserError if a file is for training and for validation."""
        if found := self._overlaps(remote=True):
            raise UserError("\n".join(found))
        self.vocabulary.prepare(run_dir, is_host_zero=is_host_zero, sample=self._texts)

    def train(self, layout: DataLayout, *, seed: int) -> Batches:
        """Returns an endless iterator of batches."""
        return self._batches(layout, "train", seed)

    def evaluation(self, layout: DataLayout) -> Batches:
        """Returns batches of the held-out questions, or the first `evaluated` ones."""
        return self._batches(layout, "validation", None)

    def evaluated_on(self, most: int | None = None) -> str:
        """Describes the questions that an evaluation scores, at most `most`; None: no such limit."""
        count = len(self.questions("validation"))
        taken = min(n for n in (count, self.evaluated, most) if n is not None)
        return f"all {count:,} held-out questions" if taken == count else f"{taken:,} of {count:,} held-out questions"

    def evaluating(self, rows: int | None) -> ImageQuestions:
        """Returns a copy whose evaluations score the first `rows` held-out questions; None: all."""
        return dataclasses.replace(self, evaluated=rows)

    def problems(self) -> list[str]:
        """Returns the problems of settings, of the vocabulary, and of the beginning of local files."""
        if not self.train_files:
            return ["DATA is not set: bind it to your questions, e.g. --gin \"DATA = '/data/questions.jsonl'\""]
        found = []
        for name, patterns in (("train", self.train_files), ("validation", self.validation_files)):
            local = [pattern for pattern in patterns if not paths.is_remote(pattern)]
            wrong = pattern_problems(f"vision.questions.{name}", local, kinds=(".jsonl",))
            files = () if wrong else list_files(tuple(local))
            read = functools.partial(documents.first_lines, functools.partial(read_question, kinds=self.kinds))
            found += wrong + documents.first_problems(files, first=read, where=f"vision.questions.{name}")
        all_found = [*(found or self._overlaps(remote=False)), *self.vocabulary.problems()]
        return all_found or self._refusal()

    def _overlaps(self, *, remote: bool) -> list[Problem]:
        files = (self.train_files, self.validation_files)
        return documents.overlaps(*files, where="vision.questions.validation", remote=remote)

    def _refusal(self) -> list[str]:
        """Returns why the first question of a local file does not become a row by `prompts`."""
        files = list_files(tuple(pattern for pattern in self.train_files if not paths.is_remote(pattern)))
        first = next(read_questions(files[:1], kinds=self.kinds), None)
        try:
            if first is not None and self.prompts is not None:  # a vocabulary may still have to be trained
                self._ids(first)
        except UserError as error:
            return [str(error)]
        return []

    def named_files(self) -> tuple[str, ...]:
        """Returns the patterns of the files of questions."""
        return (*self.train_files, *self.validation_files)

    def begins_with_bos(self) -> bool:
        """Returns whether a prompt begins with the begin-of-text id."""
        return self.prompts is None or cast(FolderTokenizer, self.vocabulary).begins_with_bos

    def stop_ids(self) -> tuple[int, ...]:
        """Returns the ids that end an answer."""
        ends = () if self.prompts is None else cast(FolderTokenizer, self.vocabulary).turn_ends
        return tuple(dict.fromkeys([self.vocabulary.eos_id, *ends]))

    def describe(self) -> str:
        """Returns one line for the run summary."""
        validation = (
            ", ".join(self.validation_files) or f"{VALIDATION_PERCENT} % of its images, by their paths below its folder"
        )
        return (
            f"vision.questions: train {', '.join(self.train_files) or '(DATA is not set)'}; validation {validation}; "
            f"images of {self.image_size} x {self.image_size} in {self.image_tokens} of {self.length} positions"
        )

    def fingerprint(self) -> str:
        """Returns a hash of the files of questions (not of images), and of how images are held out."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        train, validation = (
            [(file.name, file.size_bytes) for file in list_files(patterns)]
            for patterns in (self.train_files, self.validation_files)
        )
        read = repr([train, validation] if self.validation_files else (train, _HELD_OUT))
        return fingerprint_of(hashlib.sha256(read.encode()).hexdigest()[:16], content_hash.of_files(self._files))

    def rehearsal(self) -> Any:
        """Returns a task of random images and questions with the same shapes, without kinds."""
        return RandomQuestions(
            image_size=self.image_size,
            image_tokens=self.image_tokens,
            length=self.length,
            num_streams=1,
            vocab_size=8,
        )

    def questions(self, split: str) -> tuple[Question, ...]:
        """Returns the lines of the split "train" or "validation". Raises UserError if there are none."""
        if not (found := self._splits[split]):
            raise UserError(
                f"vision.questions: no question for {split} in {', '.join(self.train_files)}; add lines, or set "
                "vision.questions.validation"
            )
        return found

    @functools.cached_property
    def _files(self) -> tuple[File, ...]:
        return (*list_files(self.train_files), *list_files(self.validation_files))

    @functools.cached_property
    def _splits(self) -> dict[str, tuple[Question, ...]]:
        train, validation = (
            tuple(read_questions(list_files(patterns), kinds=self.kinds))
            for patterns in (self.train_files, self.validation_files)
        )
        if not self.validation_files:  # all questions about an image are in one split
            chosen = validation_names({question.name for question in train})
            places = [posixpath.normpath(question.image) for question in train]
            held_out = {place for place, one in zip(places, train, strict=True) if one.name in chosen}
            validation = tuple(one for place, one in zip(places, train, strict=True) if place in held_out)
            train = tuple(one for place, one in zip(places, train, strict=True) if place not in held_out)
        return {"train": train, "validation": validation}

    def _texts(self) -> Iterator[str]:
        for question in self.questions("train"):
            yield f"{question.question} {question.answer}"

    def _batches(self, layout: DataLayout, split: str, seed: int | None) -> Batches:
        weighted = "over all lines" if self.weighted and self.num_streams > 1 else self.weighted
        settings = (self.kinds, weighted, self.max_shift, self.mirror, self.image_size, self.image_tokens)
        rows, former = repr(settings), {}
        if self.prompts is not None:
            anywhere = dataclasses.replace(self.prompts.input, folder="")
            rows = repr((*settings, dataclasses.replace(self.prompts, input=anywhere)))
            former = {"rows": repr((*settings, self.prompts))}  # of a model that was not moved since
        identity = {"source": self.fingerprint(), "split": split, "seed": seed, "vocabulary": self.vocabulary.hash}
        no_end = None if self.ends else True  # None, as in positions that were saved before this setting existed
        return streams.StreamBatches(
            layout,
            spec=self.spec(layout.batch_size),
            num_streams=self.num_streams,
            open_stream=lambda index, rows: _Stream(self, split, seed, index, rows),
            identity={**identity, "rows": rows, "evaluated": self.evaluated, "without_end": no_end},
            former=former,
        )

    def row(self, question: Question, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
        """Returns the row of one question; `rng` draws how its image is shifted and mirrored (None: not at all).

        Raises:
          BrokenImage: its image cannot be read.
        """
        slots, asked, said = self._ids(question)
        row = question_rows.laid_out(slots, asked, said, length=self.length)
        row["images"] = self._image(question, rng)
        if self.kinds:
            row["kind"] = np.asarray(self.kinds.index(question.kind) if question.kind else NO_KIND, np.int32)
        return row

    def _ids(self, question: Question) -> tuple[Sequence[int], list[int], list[int]]:
        """Returns the positions of the image, the ids of the question, which include them, and those of the answer."""
        if self.prompts is None:
            answer = self.vocabulary.encode(f" {question.answer}")
            said = with_eos(answer, self.vocabulary) if self.ends and answer else answer
            asked = [*([0] * self.image_tokens), *self.vocabulary.encode(question.question)]
            slots: Sequence[int] = range(self.image_tokens)
        else:
            texts, vocabulary = (question.question, question.answer), cast(FolderTokenizer, self.vocabulary)
            try:
                asked, said = image_prompts.row_ids(*texts, self.prompts, vocabulary, ends=self.ends)
            except UserError as error:
                raise UserError(f"{question.where}: {error}") from error
            slots = [place for place, i in enumerate(asked) if i == self.prompts.input.token_id]
        used, words = len(asked) + len(said) - 1, len(asked) - len(slots)
        if used > self.length or not words or not said:
            raise UserError(
                f"{question.where}: {words} tokens of the question and {len(said)} of the answer beside {len(slots)} "
                f"positions of the image: expected at least one of each, and at most LENGTH = {self.length} together; "
                f"set LENGTH = {used}, or remove the line"
            )
        return slots, asked, said

    def _image(self, question: Question, rng: np.random.Generator | None) -> np.ndarray:
        try:
            found = self._decoded(question.image)
        except OSError as error:  # it may pass, and hosts must leave out the same images
            raise OSError(f"{question.where}: {question.image} cannot be read: {error}") from error
        if isinstance(found, str):
            hint = "; replace it, or set vision.questions.broken = 'skip'" if self.broken == "refuse" else ""
            raise BrokenImage(f"{question.where}: {found}{hint}")
        if rng is not None and self.mirror and rng.random() < 0.5:
            found = found[:, ::-1]
        if rng is not None and self.max_shift:
            most, size = self.max_shift, self.image_size
            top, left = rng.integers(0, 2 * most + 1, 2)
            found = np.pad(found, ((most, most), (most, most), (0, 0)), mode="edge")[
                top : top + size, left : left + size
            ]
        return found

    @functools.cached_property
    def _decoded(self) -> Any:
        size, prompts = self.image_size, self.prompts

        def read(content: bytes) -> np.ndarray:
            return images.decode(content, size=size) if prompts is None else prompts.prepared(content).pixels[0]

        return functools.lru_cache(max(1, _CACHE_BYTES // (3 * size**2)))(lambda path: _try_read(path, read))


def questions(
    *,
    train: str | Sequence[str] | None,
    validation: str | Sequence[str] | None = None,
    folder: str = "",
    image_input: ImageInput | None = None,
    image_size: int | None = None,
    image_tokens: int | None = None,
    length: int,
    num_streams: int,
    vocabulary: Vocabulary,
    kinds: Sequence[str] = (),
    weighted: bool = False,
    max_shift: int = 0,
    mirror: bool = False,
    broken: str = "refuse",
    ends: bool = True,
) -> ImageQuestions:
    """Returns a task of questions about images.

    Args:
      train: one or more patterns of .jsonl files. None: an error, which `problems` reports.
      validation: one or more patterns; None: the questions about 5% of the images, chosen by hash.
      folder: the folder to which patterns are relative; "": none.
      image_input: how a published model reads images and writes rows; None: the image comes first.
      image_size, image_tokens: None: those of `image_input`. With a selector, `image_tokens` is the number of patches
        that it chooses.
      length, num_streams, vocabulary, kinds, weighted, max_shift, mirror, broken, ends: see `ImageQuestions`.
    """
    prompts = None
    if image_input is not None:
        prompts = image_prompts.of_training(image_input, vocabulary, image_size=image_size, image_tokens=image_tokens)
        image_size, image_tokens = prompts.input.image_size, prompts.input.image_tokens
    sizes = {"image_size": image_size, "image_tokens": image_tokens}
    _check_numbers({**sizes, "length": length, "num_streams": num_streams, "max_shift": max_shift})
    if broken not in BROKEN:
        raise UserError(f"vision.questions.broken = {broken!r}: expected one of {', '.join(BROKEN)}")
    return ImageQuestions(
        train_files=_patterns(train, "train", folder),
        validation_files=_patterns(validation, "validation", folder),
        image_size=cast(int, image_size),
        image_tokens=cast(int, image_tokens),
        length=length,
        num_streams=num_streams,
        vocabulary=vocabulary,
        kinds=tuple(kinds),
        weighted=weighted,
        max_shift=max_shift,
        mirror=mirror,
        broken=broken,
        ends=ends,
        prompts=prompts,
    )


def _check_numbers(values: Mapping[str, int | None]) -> None:
    least = {"length": 2, "max_shift": 0}
    for name, value in values.items():
        if value is None:
            raise UserError(f"vision.questions.{name} is not set: bind it, or vision.questions.image_input")
        check_integer(value, where=f"vision.questions.{name}", least=least.get(name, 1))
    length, slots = cast(int, values["length"]), cast(int, values["image_tokens"])
    if length < slots + 2:
        raise UserError(
            f"vision.questions.length = {length} has no room for a question and an answer beside image_tokens = "
            f"{slots}: set LENGTH to {slots + 2} or more"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomQuestions(SampledTask):
    """A task of random images with random questions and answers, made by `random_questions`."""

    image_size: int
    image_tokens: int
    length: int
    num_streams: int
    vocab_size: int

    def spec(self, batch_size: int) -> BatchSpec:
        sizes = {"image_size": self.image_size, "image_tokens": self.image_tokens, "length": self.length}
        return batch_spec(batch_size, **sizes, has_kinds=False)

    def row(self, rng: np.random.Generator, *, is_training: bool) -> dict[str, np.ndarray]:
        del is_training
        ids = rng.integers(0, self.vocab_size, self.length - self.image_tokens + 1).tolist()
        asked, slots = len(ids) - 1 - len(ids) // 4, range(self.image_tokens)
        row = question_rows.laid_out(slots, [*([0] * len(slots)), *ids[:asked]], ids[asked:], length=self.length)
        return {**row, "images": rng.integers(0, 256, (self.image_size, self.image_size, 3), dtype=np.uint8)}

    def rehearsal(self) -> RandomQuestions:
        """Returns the same task with one stream."""
        return dataclasses.replace(self, num_streams=1)


def random_questions(
    *, image_size: int, image_tokens: int, length: int, num_streams: int, vocab_size: int
) -> RandomQuestions:
    """Returns a task of random images with questions.

    Args:
      length: positions per row, at least image_tokens + 2.
      num_streams: divides the batch size.

    Raises:
      UserError: `length` is too small.
    """
    if image_tokens + 2 > length:
        raise UserError(
            f"vision.random_questions: length = {length} has no room for a question and an answer after image_tokens = "
            f"{image_tokens}: expected at least {image_tokens + 2}"
        )
    sizes = {"image_size": image_size, "image_tokens": image_tokens, "length": length}
    return RandomQuestions(**sizes, num_streams=num_streams, vocab_size=vocab_size)


def batch_spec(
    batch_size: int, *, image_size: int, image_tokens: int, length: int, has_kinds: bool
) -> dict[str, Field]:
    """Returns the fields of a global batch of questions about images.

    Args:
      has_kinds: whether to add the field `kind`.
    """
    pixels = Field((batch_size, image_size, image_size, 3), np.uint8, ("batch", None, None, None))
    found = {
        "images": pixels,
        "slots": Field((batch_size, image_tokens), np.int32, ("batch", None)),
        "until": Field((batch_size, length), np.int32, ("batch", "length")),
        **streams.batch_spec(batch_size, length=length),
    }
    return {**found, "kind": Field((batch_size,), np.int32, ("batch",))} if has_kinds else found


_NO_IMAGE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def _try_read(path: str, read: Callable[[bytes], np.ndarray]) -> np.ndarray | str:
    """Returns an image, or why it is none."""
    try:
        return read(paths.resolve(path).read_bytes())
    except (*_NO_IMAGE, images.UnreadableImage) as error:
        return f"{path} cannot be read as an image ({error})"


@functools.cache
def _report_once(message: str) -> None:
    print(f"vision.questions: skipped {message}", file=sys.stderr, flush=True)


class _Stream:
    def __init__(self, task: ImageQuestions, split: str, seed: int | None, index: int, rows: int):
        every = task.questions(split)
        if seed is None and task.evaluated is not None:
            every = every[: task.evaluated]
        self._task, self._seed, self._index, self._rows = task, seed, index, rows
        # Weights are relative to all lines, so every stream draws from all.
        self._questions = every if task.weighted and seed is not None else every[index :: task.num_streams]
        self._intake = documents.intake_of(_Source(task.describe()))
        self._end = -(-len(every) // task.num_streams) if seed is None else None
        self._read = 0
        weights = np.cumsum([question.weight for question in self._questions])
        if seed is not None and not (len(weights) and (weights[-1] > 0 or not task.weighted)):
            count = units.counted(len(every), "question")
            if task.weighted:
                raise UserError(f"{task.describe()}: {count} for {split}, none with a weight above 0; add one")
            raise UserError(
                f"{task.describe()}: {count} for {split} and {units.counted(task.num_streams, 'stream')}, of which one "
                "has none; set NUM_STREAMS lower, or add questions"
            )
        self._weights = weights
        self._broken: set[int] = set()  # indices of questions whose images cannot be read

    def __next__(self) -> Mapping[str, np.ndarray]:
        if self._end is not None and self._read >= self._end:
            raise StopIteration
        rows = [self._next_row() for _ in range(self._rows)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def state(self) -> bytes:
        return json.dumps({"read": self._read}).encode()

    def restore(self, state: bytes) -> None:
        self._read = streams.read_position(state, read=int)["read"]

    def _next_row(self) -> Mapping[str, np.ndarray]:
        while True:
            number, self._read = self._read, self._read + 1
            place = self._place(number)
            rng = None if self._seed is None else np.random.default_rng((self._seed, self._index, number, 1))
            if place is None:
                return self._filler
            if place in self._broken:
                continue
            try:
                row = self._task.row(self._questions[place], rng)
            except BrokenImage as error:
                self._skip(place, error)
                if self._seed is None:
                    return self._filler
                continue
            self._intake.count(None)
            return row

    def _skip(self, place: int, error: BrokenImage) -> None:
        if self._task.broken == "refuse":
            raise error
        self._broken.add(place)
        _report_once(str(error))
        self._intake.count("skipped because their images cannot be read")
        left = (q for i, q in enumerate(self._questions) if i not in self._broken)
        if self._seed is not None and not any(q.weight or not self._task.weighted for q in left):
            raise UserError(f"{self._task.describe()}: no image of a stream can be read; the last: {error}")

    def _place(self, number: int) -> int | None:
        """Returns the index of the question that is `number` in the stream's order; None after an evaluation's end."""
        count = len(self._questions)
        if self._seed is None:
            return number if number < count else None
        if self._task.weighted:
            drawn = np.random.default_rng((self._seed, self._index, number)).random() * self._weights[-1]
            return int(np.searchsorted(self._weights, drawn, side="right"))
        epoch, place = divmod(number, count)
        return int(self._order(epoch)[place])

    @functools.lru_cache(maxsize=2)  # noqa: B019 (two epochs of one stream)
    def _order(self, epoch: int) -> np.ndarray:
        assert self._seed is not None
        return np.random.default_rng((self._seed, self._index, epoch)).permutation(len(self._questions))

    @functools.cached_property
    def _filler(self) -> Mapping[str, np.ndarray]:
        spec = self._task.spec(self._task.num_streams)
        row = {name: np.zeros(field.shape[1:], field.dtype) for name, field in spec.items()}
        row["slots"] = np.arange(self._task.image_tokens, dtype=np.int32)
        if self._task.kinds:
            row["kind"] = np.asarray(NO_KIND, np.int32)
        return row


@dataclasses.dataclass(frozen=True)
class _Source:
    name: str

    def describe(self) -> str:
        return self.name


def _patterns(value: str | Sequence[str] | None, name: str, folder: str) -> tuple[str, ...]:
    patterns = paths.patterns(value)
    for pattern in patterns:
        check_text(pattern, where=f"vision.questions.{name}")
    return tuple(f"{paths.literal(folder)}/{pattern}" for pattern in patterns) if folder else patterns
