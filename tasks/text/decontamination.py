"""Finds documents that share text with evaluation sets.

There are two tests, of which either is enough: n successive words in common (Brown et al. 2020, "Language Models are
Few-Shot Learners", appendix C, with n = 13); and, for code, a common substring of a given number of characters. Words
are compared without case and punctuation, characters without differences in white space.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from core.errors import UserError
from core.files import paths
from tasks.text import text_formats

_WORD = re.compile(r"\w+")
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 2**64)
LEAST_WORDS, LEAST_CHARACTERS = 4, 16  # shorter runs and substrings are in most documents


def read(patterns: Sequence[str]) -> list[str]:
    """Returns the texts of evaluation sets: .txt files, and the strings in .jsonl files.

    Raises UserError if a pattern matches no file.
    """
    texts: list[str] = []
    for pattern in patterns:
        files = sorted(paths.matching(pattern))
        if not files:
            raise UserError(f"no file matches {pattern!r}")
        for file in files:
            texts += _texts(file)
    return texts


def _texts(file: str) -> list[str]:
    kind = text_formats.kind(file)
    if kind not in (".txt", ".jsonl"):
        raise UserError(f"{file}: expected .txt or .jsonl, both also {', '.join(text_formats.COMPRESSIONS)}")
    with text_formats.reading(file), text_formats.opened(file) as stream:
        content = stream.read()
    where = file
    try:
        if kind == ".txt":
            return [content.decode()]
        found: list[str] = []
        for number, line in enumerate(content.splitlines(), start=1):
            where = f"{file}, line {number}"
            found += _strings(json.loads(line)) if line.strip() else ()
        return found
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {error}") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


class Excluded:
    """The texts of evaluation sets, for `shares_text`.

    Attributes:
      words: number of successive words that count as shared text, at least 4; None: not compared.
      characters: length of a substring that counts as shared text, at least 16; None: not compared.
      digest: a hash of the texts, and of both lengths.
    """

    def __init__(
        self, texts: Iterable[str], *, words: int | None, characters: int | None, via: Callable[[str], str] = str
    ) -> None:
        """Indexes the texts, each converted by `via`. Raises UserError if nothing is excluded."""
        if words is None and characters is None:
            raise UserError("decontamination compares neither words nor characters: give a number of one of them")
        for name, value, least in (("words", words, LEAST_WORDS), ("characters", characters, LEAST_CHARACTERS)):
            if value is not None and value < least:
                raise UserError(f"decontamination by {value} {name}: expected at least {least}")
        self.words, self.characters = words, characters
        self._runs: set[tuple[str, ...]] = set()
        self._windows: set[str] = set()
        digest = hashlib.sha256(repr((words, characters)).encode())
        for text in texts:
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
            text = via(text)
            self._runs.update(_runs(text, words) if words else ())
            if characters:
                spaced = _spaced(text)
                self._windows.update(spaced[at : at + characters] for at in range(len(spaced) - characters + 1))
        self.digest = digest.hexdigest()
        if not self._runs and not self._windows:
            raise UserError(
                f"no excluded text has {words or 'any'} words or {characters or 'any'} characters: nothing is excluded"
            )
        self._hashes = np.unique([_hashes(window, len(window))[0] for window in self._windows])

    def shares_text(self, text: str) -> bool:
        """Returns whether a text shares words or characters with an excluded one."""
        if self.words and not self._runs.isdisjoint(_runs(text, self.words)):
            return True
        if not self._windows:
            return False
        spaced, length = _spaced(text), self.characters
        assert length is not None
        found = _hashes(spaced, length)
        nearest = np.searchsorted(self._hashes, found).clip(max=len(self._hashes) - 1)
        candidates = np.flatnonzero(self._hashes[nearest] == found)
        return any(spaced[at : at + length] in self._windows for at in candidates)


def _runs(text: str, length: int) -> Iterator[tuple[str, ...]]:
    words: Sequence[str] = _WORD.findall(text.lower())
    return zip(*(words[start:] for start in range(length)), strict=False)


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _hashes(text: str, length: int) -> np.ndarray:
    """Returns a uint64 hash of every substring of `length` characters: a polynomial of its characters modulo 2^64."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    if len(codes) < length:
        return np.empty(0, np.uint64)
    powers = np.full(len(codes), _BASE, np.uint64).cumprod(dtype=np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), (codes * powers).cumsum(dtype=np.uint64)])
    shifts = np.full(len(codes), _INVERSE, np.uint64).cumprod(dtype=np.uint64)
    return (sums[length:] - sums[:-length]) * shifts[: len(codes) - length + 1]
