"""Converts a dataset of questions about images to files that `tasks.vision` reads.

  example -> OUT/images/3f/3f2a….jpeg, and a line of OUT/train.jsonl or OUT/validation.jsonl

Images are stored in their original encoding; arrays become PNG.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from core import extras, units
from core.errors import UserError
from tasks import whole_folder
from tasks.text import documents, tfds_source
from tasks.text.hub_source import HuggingFace
from tasks.vision import images

FILES = ("train.jsonl", "validation.jsonl")
Report = Callable[[int], None]  # called with the number of examples read


class Counts(NamedTuple):
    """The numbers of questions and images written for a split.

    Attributes:
      questions, images: their numbers; an image in both splits is counted in the first.
      skipped: number of examples that were left out.
    """

    questions: int
    images: int
    skipped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """A dataset of questions about images, and the names of its fields.

    Attributes:
      data: `hub:OWNER/NAME`, `hub:OWNER/NAME:CONFIGURATION`, or `tfds:NAME`.
      split, validation: names of its splits; validation "": `tasks.vision` holds out questions by their images.
      image, question, answer, kind: names of fields; of several answers the most frequent is used. kind "": no kind.
      skip_bad: whether unusable examples are left out; otherwise the first one is an error.
      data_dir: the folder of prepared datasets; None: TensorFlow Datasets' own.
    """

    data: str
    split: str = "train"
    validation: str = ""
    image: str = "image"
    question: str = "question"
    answer: str = "answer"
    kind: str = ""
    skip_bad: bool = False
    data_dir: str | None = None

    def write(self, directory: str, *, report: Report) -> dict[str, Counts]:
        """Writes the files, which appear together in `directory`, local or gs://, at the end; returns counts.

        Raises UserError if `split` is empty or equals `validation`, or `data_dir` does not fit.
        """
        if not self.split or self.split == self.validation:
            raise UserError(
                f"--split {self.split!r} and --validation {self.validation!r}: expected two different splits, or "
                "--split alone"
            )
        if self.data_dir is not None and not self.data.startswith("tfds:"):
            raise UserError(f"--data-dir is for tfds: datasets, and --data is {self.data}: leave it out")
        found = {}
        with whole_folder.appearing(directory, last=FILES[0]) as folder:
            writer = _Writer(self, folder, report)
            for file, split in zip(FILES, (self.split, self.validation), strict=True):
                if split:
                    found[split] = writer.write(file, split)
        return found

    def examples(self, split: str) -> Iterator[Mapping[str, Any]]:
        """Yields the examples of a split. Raises UserError if `data` is malformed."""
        kind, _, name = self.data.partition(":")
        if kind == "hub" and name:
            return iter(self._of_hub(name, split))
        if kind == "tfds" and name:
            return iter(tfds_source.examples(name, split, data_dir=self.data_dir))
        raise UserError(f"--data {self.data}: expected hub:OWNER/NAME or tfds:NAME")

    def _of_hub(self, name: str, split: str) -> Any:
        extras.require("datasets", extra="huggingface", what=f"--data {self.data}")
        source = HuggingFace(name, split, split, field="", streaming=True)
        found = source.dataset(split)
        import datasets

        if isinstance((found.features or {}).get(self.image), datasets.Image):
            found = found.cast_column(self.image, datasets.Image(decode=False))  # keeps the original encoding
        return found


class _Bad(UserError):
    """Raised for an example that cannot be used."""


class _Writer:
    def __init__(self, source: QuestionSet, folder: pathlib.Path, report: Report) -> None:
        self._source, self._folder, self._report = source, folder, report
        self._images: set[str] = set()
        self._read = 0

    def write(self, file: str, split: str) -> Counts:
        questions, before, skipped = 0, len(self._images), 0
        with (self._folder / file).open("w", encoding="utf-8") as stream:
            for number, example in enumerate(self._source.examples(split), 1):
                self._read += 1
                self._report(self._read)
                try:
                    line = self._line(example, where=f"example {number} of {split}")
                except _Bad as error:
                    if not self._source.skip_bad:
                        told = f"{self._source.data}, {error}; --skip-bad leaves such examples out"
                        raise UserError(told) from error
                    skipped += 1
                    continue
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                questions += 1
        if not questions:
            told = f"{units.counted(skipped, 'example')} skipped, and none left" if skipped else "no examples"
            raise UserError(f"{self._source.data}, {split}: {told}")
        return Counts(questions, len(self._images) - before, skipped)

    def _line(self, example: Mapping[str, Any], *, where: str) -> dict[str, str]:
        source = self._source
        names = {"image": source.image, "question": source.question, "answer": source.answer, "kind": source.kind}
        names = {flag: name for flag, name in names.items() if name}
        for flag, name in names.items():
            if name not in example:
                raise UserError(f"{source.data} has no field {name!r}, only {sorted(example)}: name it with --{flag}")
        texts = {flag: _text(example[name], f"{where}: {name}") for flag, name in names.items() if flag != "image"}
        return {"image": self._image(example[source.image], f"{where}: {source.image}"), **texts}

    def _image(self, value: Any, where: str) -> str:
        """Stores an image; returns its path relative to the folder."""
        try:
            content, ending = images.as_file(value)
        except images.UnreadableImage as error:
            raise _Bad(f"{where} cannot be read as an image ({error})") from error
        digest = hashlib.sha256(content).hexdigest()
        name = f"images/{digest[:2]}/{digest}.{ending}"
        if name not in self._images:
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._images.add(name)
        return name


def _text(value: Any, where: str) -> str:
    """Returns a text; of several, the most frequent, or the first of equally frequent ones."""
    several = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
    texts: list[Any] = [each.get("answer") if isinstance(each, Mapping) else each for each in several]
    try:
        texts = [text.decode() if isinstance(text, bytes) else text for text in texts]
        if not all(isinstance(text, str) for text in texts) or not (said := [t.strip() for t in texts if t.strip()]):
            raise _Bad(f"{where} is {str(value)[:40]!r}, expected text, or a list of texts")
        for text in said:
            documents.encoded(text, where=where)
    except UnicodeDecodeError as error:
        raise _Bad(f"{where} is {str(value)[:40]!r}, which is not UTF-8") from error
    except _Bad:
        raise
    except UserError as error:
        raise _Bad(str(error)) from error
    return collections.Counter(said).most_common(1)[0][0]
