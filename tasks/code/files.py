"""A task of source code files in some languages.

Each package belongs to one split, because copies of a file are mostly in the same package. A file's package is the
first folder in its path below the common folder of all files or, without such a folder, its own name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from core import units
from core.batches import fingerprint_of
from core.errors import Problem, UserError, check_text
from core.files import paths
from core.types import can
from tasks.code import chunks
from tasks.text import content_hash, decontamination, documents, text_formats, vocabularies
from tasks.text.document_streams import with_end
from tasks.text.documents import File
from tasks.text.ids import ReadsFile, Vocabulary

LANGUAGES: Mapping[str, tuple[str, ...]] = {
    "python": (".py",),
    "javascript": (".js", ".mjs", ".cjs"),
    "typescript": (".ts", ".tsx"),
    "java": (".java",),
    "go": (".go",),
    "c": (".c", ".h"),
    "c++": (".cc", ".cpp", ".hpp", ".hh"),
    "rust": (".rs",),
    "shell": (".sh", ".bash"),
}
_LARGEST_BYTES = 2**20  # larger files are data or generated code


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeFiles(chunks.ChunkTask):
    """A task of files of source code; see `code_files`."""

    files: tuple[str, ...]
    languages: tuple[str, ...]
    vocabulary: Vocabulary
    held_out_percent: int
    exclude: tuple[str, ...]
    exclude_words: int | None
    exclude_characters: int | None
    least_tokens: int

    def prepare(self, run_dir: str, *, is_host_zero: bool) -> None:
        self.vocabulary.prepare(run_dir, is_host_zero=is_host_zero, sample=self._sample)

    def rows(self, split: str) -> chunks.TokenRows:
        if split not in self._rows:
            where = f"code_files: the {split} split of {units.counted(len(self._listed), 'file')}"
            options = {"length": self.length, "bos_id": self.vocabulary.bos_id, "least_tokens": self.least_tokens}
            self._rows[split] = chunks.TokenRows(self._documents(split), where=where, **options)
        return self._rows[split]

    def problems(self) -> list[str]:
        if found := self.vocabulary.problems():
            return found
        if not any(map(paths.is_remote, self.files)) and not self._listed:
            endings = ", ".join(self._endings)
            none = f"no file of {', '.join(self.languages)} ({endings}) matches"
            return [Problem(f"{none} {one!r}", setting="code_files.files", file=one) for one in self.files]
        if any(map(paths.is_remote, self.files)):
            return []
        counts = Counter(self._split_of(file) for file in self._listed)
        return [
            f"code_files: no package of {units.counted(len(self._listed), 'file')} belongs to the {split} split; give "
            "more packages, or another held_out_percent"
            for split in chunks.SPLITS
            if not counts[split]
        ]

    def named_files(self) -> Sequence[str]:
        return (*self.files, *self.exclude, *([self.vocabulary.path] if can(self.vocabulary, ReadsFile) else []))

    def describe(self) -> str:
        source = ", ".join(self.files) if self.files else "Python's standard library"
        parts = [f"code_files: {', '.join(self.languages)} of {source}"]
        for split, rows in self._rows.items():
            parts.append(f"{split} {units.counted(len(rows.names), 'file')}, {units.counted(len(rows), 'row')}")
        if self._unreadable:
            parts.append(f"{units.counted(len(self._unreadable), 'file')} left out, not UTF-8")
        if self.exclude:
            left_out = f", {self._left_out['train']:,} left out" if "train" in self._rows else ""
            parts.append(f"without text of {', '.join(self.exclude)}{left_out}")
        return f"{'; '.join(parts)}; {self.vocabulary.describe()}; length {self.length}"

    def fingerprint(self) -> str:
        """Returns a hash of the files and of settings that decide which rows a split has."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        listing = [(file.name, file.size_bytes) for file in self._listed]
        excluded = self._excluded.digest if self._excluded else ""
        settings = (self.held_out_percent, self.least_tokens, excluded, self.vocabulary.hash)
        listed = hashlib.sha256(repr((listing, settings)).encode()).hexdigest()
        return fingerprint_of(listed, content_hash.of_files(self._listed))

    @property
    def _endings(self) -> tuple[str, ...]:
        return tuple(ending for language in self.languages for ending in LANGUAGES[language])

    @functools.cached_property
    def _listed(self) -> tuple[File, ...]:
        if not self.files:
            return documents.python_files(sysconfig.get_paths()["stdlib"])
        found = documents.list_files(self.files)
        return tuple(f for f in found if f.name.endswith(self._endings) and 0 < f.size_bytes <= _LARGEST_BYTES)

    @functools.cached_property
    def _rows(self) -> dict[str, chunks.TokenRows]:
        return {}

    @functools.cached_property
    def _left_out(self) -> Counter[str]:
        return Counter()

    @functools.cached_property
    def _unreadable(self) -> set[str]:
        return set()

    @functools.cached_property
    def _excluded(self) -> decontamination.Excluded | None:
        if not self.exclude:
            return None
        words, characters = self.exclude_words, self.exclude_characters
        return decontamination.Excluded(decontamination.read(self.exclude), words=words, characters=characters)

    def _split_of(self, file: File) -> str:
        path = pathlib.PurePosixPath(file.name)
        package = path.parts[0] if len(path.parts) > 1 else path.stem
        place = int.from_bytes(hashlib.sha256(package.encode()).digest()[:4]) % 100
        return (
            "test" if place < self.held_out_percent else "validation" if place < 2 * self.held_out_percent else "train"
        )

    def _documents(self, split: str) -> dict[str, np.ndarray]:
        found, seen = {}, set()
        for file in self._listed:
            text = self._text(file) if self._split_of(file) == split else ""
            digest = hashlib.sha256(text.encode()).digest()
            if not text or digest in seen:  # only one of several copies is kept
                continue
            seen.add(digest)
            if split == "train" and self._excluded and self._excluded.shares_text(text):
                self._left_out[split] += 1
                continue
            found[file.name] = self._encoded(text, file)
        return found

    def _encoded(self, text: str, file: File) -> np.ndarray:
        return with_end(self.vocabulary.encode(text), self.vocabulary, where=lambda: file.path)

    def _text(self, file: File) -> str:
        """Returns the text of a file; "" if it is blank or not UTF-8."""
        with text_formats.opened(file.path) as stream, text_formats.reading(file.path):
            content = stream.read()
        try:
            return content.decode() if content.strip() else ""
        except UnicodeDecodeError:
            self._unreadable.add(file.path)
            return ""

    def _sample(self):
        return (text for file in self._listed if self._split_of(file) == "train" and (text := self._text(file)))


def code_files(
    *,
    files: str | Sequence[str] | None = None,
    languages: str | Sequence[str] = "python",
    length: int,
    num_streams: int,
    vocabulary: Vocabulary | None = None,
    held_out: str = "validation",
    held_out_percent: int = 10,
    exclude: str | Sequence[str] = (),
    exclude_words: int | None = None,
    exclude_characters: int | None = 40,
    least_tokens: int = 16,
) -> CodeFiles:
    """Returns a task of source code, whose rows are pieces of one file each.

    Args:
      files: one or more patterns (`/code/**/*.js`, gs://); None: Python's standard library without its tests.
      languages: some of `LANGUAGES`; files with other endings, or over 1 MiB, are left out. Not used without `files`.
      length, num_streams, held_out: as in `tasks.code.chunks.ChunkTask`.
      vocabulary: None: bytes.
      held_out_percent: percentage of the packages in each of "validation" and "test", 1 to 49.
      exclude: files of evaluation sets; training files that share text with them are left out.
      exclude_words, exclude_characters: as in `tasks.text.decontamination.Excluded`.
      least_tokens: shorter pieces of files are left out.

    Raises:
      UserError: a pattern or language is wrong, or a number is out of range.
    """
    patterns = (files,) if isinstance(files, str) else tuple(files or ())
    excluded = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for pattern in (*patterns, *excluded):
        check_text(pattern, where="code_files.exclude" if pattern in excluded else "code_files.files")
    chosen = (languages,) if isinstance(languages, str) else tuple(languages)
    unknown = [name for name in chosen if name not in LANGUAGES]
    if unknown or not chosen:
        raise UserError(f"code_files.languages = {languages!r}: expected some of {', '.join(LANGUAGES)}")
    if not 1 <= held_out_percent < 50:
        raise UserError(f"code_files.held_out_percent = {held_out_percent}: expected from 1 to 49")
    if not 1 <= least_tokens <= length:
        raise UserError(f"code_files.least_tokens = {least_tokens}: expected from 1 to the length, {length}")
    return CodeFiles(
        length=length,
        num_streams=num_streams,
        held_out=held_out,
        files=patterns,
        languages=chosen,
        vocabulary=vocabularies.bytes() if vocabulary is None else vocabulary,
        held_out_percent=held_out_percent,
        exclude=excluded,
        exclude_words=exclude_words,
        exclude_characters=exclude_characters,
        least_tokens=least_tokens,
    )
