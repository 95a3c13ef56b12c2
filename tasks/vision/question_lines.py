"""Reads lines of questions about images, in the format described in `tasks.vision.image_questions`."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from core.errors import UserError, check_integer
from core.files import paths
from tasks.text import documents, text_formats
from tasks.text.documents import File


class Question(NamedTuple):
    """A question about an image.

    Attributes:
      where: `file:line`, for messages.
      image: path of the image.
      kind: the kind of question; "": none.
      weight: how often it is drawn in training, relative to others.
      grid: cells along a side of the image; 0 if the line does not say where its question points.
      cells: numbers of the cells that the question is about.
      name: the image's path as its line has it, seen from the folder of all files; the same on every machine.
    """

    where: str
    image: str
    question: str
    answer: str
    kind: str = ""
    weight: float = 1.0
    grid: int = 0
    cells: tuple[int, ...] = ()
    name: str = ""


def read_question(path: str, number: int, line: bytes, *, kinds: Sequence[str] = (), name: str = "") -> Question | None:
    """Returns the question of one line; None if it holds only white space.

    Args:
      path, number: the file and the line number; relative image paths start at the file's folder.
      kinds: the kinds that a question may have; (): kinds are not read.
      name: the file's name (`File.name`), with which `Question.name` begins.

    Raises:
      UserError: the line is no JSON object, or a value is missing or wrong.
    """
    record, where = documents.json_line(path, number, line), f"{path}:{number}"
    if record is None and not line.strip():
        return None
    if not isinstance(record, dict):
        raise UserError(f"{where}: {str(record)[:40]!r}: expected an object with image, question and answer")
    for key in ("image", "question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise UserError(f"{where}: {key} is {str(record.get(key))[:40]!r}, expected text")
        documents.encoded(record[key], where=where)
    kind, weight = record.get("kind", ""), record.get("weight", 1.0)
    if kinds and kind not in kinds:
        raise UserError(f"{where}: kind is {kind!r}, expected one of {', '.join(kinds)}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise UserError(f"{where}: weight is {weight!r}, expected a number of at least 0")
    grid, cells = _read_cells(record, where)
    image = named = record["image"]
    if not image.startswith("/") and not paths.is_remote(image):
        named = posixpath.normpath(posixpath.join(posixpath.dirname(name), image))
        folder = str(paths.resolve(path).parent)
        bucket, inside = folder.split("/", 3)[:3], folder.split("/", 3)[3:]  # gs:, an empty part, the bucket
        image = (
            "/".join([*bucket, posixpath.normpath(posixpath.join(*inside, image))])
            if paths.is_remote(folder)
            else f"{folder}/{image}"
        )
    text = (record["question"], record["answer"], kind if kinds else "")
    return Question(where, image, *text, float(weight), grid, cells, named)


def _read_cells(record: Mapping[str, Any], where: str) -> tuple[int, tuple[int, ...]]:
    """Returns `grid` and `cells` of a line; 0 and () if it has neither."""
    if "grid" not in record and "cells" not in record:
        return 0, ()
    grid: Any = record.get("grid")
    cells = record.get("cells")
    check_integer(grid, where=f"{where}: grid", least=1)
    most = grid**2 - 1
    if not isinstance(cells, list) or not cells or not all(type(c) is int and 0 <= c <= most for c in cells):
        raise UserError(
            f"{where}: cells is {str(cells)[:40]}, expected a list of numbers from 0 to {most}, for the {grid} x "
            f"{grid} cells of the image, row by row"
        )
    return grid, tuple(cells)


def read_questions(files: Sequence[File], *, kinds: Sequence[str]) -> Iterator[Question]:
    """Yields the questions of files."""
    for file in files:
        with text_formats.opened(file.path) as stream:
            for number, line in enumerate(_lines(stream, file.path), 1):
                if found := read_question(file.path, number, line, kinds=kinds, name=file.name):
                    yield found


def _lines(stream: Iterator[bytes], path: str) -> Iterator[bytes]:
    while True:
        with text_formats.reading(path):
            line = next(stream, None)
        if line is None:
            return
        yield line
