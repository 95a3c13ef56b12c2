"""Selects the training documents that `launch/run tokenize` leaves out."""

import dataclasses
from collections.abc import Callable
from typing import Any

from core.errors import UserError
from tasks.text import decontamination, near_duplicates
from tasks.text.decontamination import Excluded
from tasks.text.near_duplicates import Seen


@dataclasses.dataclass(frozen=True)
class Filters:
    """Leaves out training documents that share text with evaluation sets, and near duplicates.

    Attributes:
      exclude: patterns of files of evaluation sets; (): none.
      words, characters: how much shared text counts, as in `decontamination.Excluded`.
      near_duplicates: the least similarity, from 0.5 to 0.95, of near duplicates; None: all are kept.
      digest: the digest of the texts to exclude; "": not compared.
    """

    exclude: tuple[str, ...] = ()
    words: int | None = None
    characters: int | None = None
    near_duplicates: float | None = None
    digest: str = ""

    def excluded(self, via: Callable[[str], str] = str) -> Excluded | None:
        """Reads the evaluation sets, each text converted by `via`; None if `exclude` is empty.

        Raises UserError if files are missing or changed.
        """
        if not self.exclude:
            return None
        texts = decontamination.read(self.exclude)
        found = Excluded(texts, words=self.words, characters=self.characters, via=via)
        if self.digest not in ("", found.digest):
            raise UserError(f"--exclude {' '.join(self.exclude)}: the files are not those that the command began with")
        return found

    def seen(self) -> Seen | None:
        """Returns an empty `Seen`, which finds near duplicates; None if they are kept."""
        return Seen(self.near_duplicates) if self.near_duplicates else None

    @property
    def leave_out(self) -> bool:
        """Whether documents can be left out."""
        return bool(self.exclude or self.near_duplicates)

    def described(self) -> dict[str, Any]:
        """Returns the settings that must be the same when a command continues a cache."""
        return {
            "excluded": self.digest,
            "near_duplicates": self.near_duplicates and near_duplicates.settings(self.near_duplicates),
        }
