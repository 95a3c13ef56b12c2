"""Which documents for training `launch/run tokenize` leaves out."""

import dataclasses
from collections.abc import Callable
from typing import Any

from core.errors import UserError
from tasks.text import decontamination, near_duplicates
from tasks.text.decontamination import Excluded
from tasks.text.near_duplicates import Seen


@dataclasses.dataclass(frozen=True)
class Filters:
    """Leaves out text of evaluation sets and near duplicates; those of the validation split are kept.

    Attributes:
      exclude: patterns of files of evaluation sets (`decontamination.read`); what shares text with them is left out.
      words, characters: how much it shares; see `decontamination.Excluded`.
      near_duplicates: the similarity at which a document repeats an earlier one (`near_duplicates.Seen`); None keeps
        all.
      digest: digest of the texts to exclude, which every process must find; "": not compared.
    """

    exclude: tuple[str, ...] = ()
    words: int | None = None
    characters: int | None = None
    near_duplicates: float | None = None
    digest: str = ""

    def excluded(self, via: Callable[[str], str] = str) -> Excluded | None:
        """Reads the evaluation sets; None if there are none.

        Args:
          via: converts a text of an evaluation set as the documents were converted before they are compared.

        Raises:
          UserError: a file cannot be read, or the texts are not those of `digest`.
        """
        if not self.exclude:
            return None
        texts = decontamination.read(self.exclude)
        found = Excluded(texts, words=self.words, characters=self.characters, via=via)
        if self.digest not in ("", found.digest):
            raise UserError(f"--exclude {' '.join(self.exclude)}: the files are not those that the command began with")
        return found

    def seen(self) -> Seen | None:
        """Returns what finds near duplicates; None if they are kept."""
        return Seen(self.near_duplicates) if self.near_duplicates else None

    @property
    def leave_out(self) -> bool:
        """Returns whether a document may be left out."""
        return bool(self.exclude or self.near_duplicates)

    def described(self) -> dict[str, Any]:
        """Returns what a command that continues must have in common with the one that began; takes the digest."""
        return {
            "excluded": self.digest,
            "near_duplicates": self.near_duplicates and near_duplicates.settings(self.near_duplicates),
        }
