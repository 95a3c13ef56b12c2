"""Prints the text of an answer while it is generated."""

from collections.abc import Sequence

from launch import terminal
from launch.loaded_model import LoadedModel


class LiveText:
    """Prints the text of one row as it grows."""

    def __init__(self, model: LoadedModel, prompt: Sequence[int]):
        self._model, self._prompt = model, prompt
        self._ids: list[int] = []
        self._printed = ""

    def add(self, ids: list[int | None]) -> None:
        """Prints what the first row's new id adds; an incomplete character waits.

        `ids`: the new id of each row; None: the row has ended.
        """
        if ids[0] is None:
            return
        self._ids.append(ids[0])
        text = self._model.decoded(self._ids, after=self._prompt)
        if text.endswith("\ufffd") or not text.startswith(self._printed):
            return
        print(terminal.printable(text[len(self._printed) :]), end="", flush=True)
        self._printed = text

    def end(self, text: str) -> None:
        """Prints the rest of `text`, or all of it if something else was printed before."""
        goes_on = text.startswith(self._printed)
        print(terminal.printable(text[len(self._printed) :] if goes_on else f"\n{text}"), flush=True)
