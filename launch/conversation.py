"""A conversation with a model at the terminal, or over standard input.

For each answer, the whole history is formatted and prefilled again. The number of slots of the KV cache is a power of
two, to compile few programs.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from core import units
from core.errors import UserError
from launch.live_text import LiveText
from launch.loaded_model import LoadedModel
from parallel.generation import generating

_SLOTS = 1024  # slots of the first KV cache
_EXIT, _NEW = "/exit", "/new"


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, model: LoadedModel, *, max_tokens: int, **options: Any):
        """Begins a conversation with an empty history.

        Args:
          model: a model with a chat template.
          max_tokens: most tokens of an answer.
          **options: `sampling` and `seed` of `LoadedModel.batches`.
        """
        self._model, self._max_tokens, self._options = model, max_tokens, options
        self._messages: list[Mapping[str, str]] = []

    def answer(self, message: str) -> None:
        """Prints the answer to a message while it is generated; Ctrl-C ends it early.

        Raises:
          UserError: the message cannot be answered; the history is then unchanged.
        """
        messages = [*self._messages, {"role": "user", "content": message}]
        ids = self._model.chat_ids(messages)
        tokens = self._most_tokens(len(ids))
        slots = _SLOTS
        while slots < len(ids) + generating.CHUNK + tokens:
            slots *= 2
        text, options = LiveText(self._model, ids), {"max_tokens": tokens, "slots": slots, **self._options}
        with _interruptible() as is_stopped:

            def add(new: list[int | None]) -> bool:
                text.add(new)
                return is_stopped()

            [found] = self._model.continued([ids], on_tokens=add, **options)
            text.end(found.text)
            if not found.ended:
                why = "stopped" if is_stopped() else f"cut after {units.counted(len(found.ids), 'token')}"
                print(f"[{why}]", file=sys.stderr, flush=True)
        self._messages = [*messages, {"role": "assistant", "content": found.text}]

    def forget(self) -> None:
        """Clears the history."""
        self._messages = []

    def _most_tokens(self, length: int) -> int:
        most = self._model.generator.max_positions
        left = self._max_tokens if most is None else min(self._max_tokens, most - length)
        if left < 1:
            raise UserError(
                f"the conversation needs {units.counted(length, 'position')} with this message, and the model has "
                f"{most}: {_NEW} begins a new one"
            )
        return left


def run(conversation: Conversation) -> None:
    """Answers messages until `/exit` or the end of standard input; `/new` clears the history."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"Ctrl-C stops an answer; {_NEW} begins a new conversation; {_EXIT} ends.", file=sys.stderr)
    for message in _typed() if is_terminal else map(str.strip, sys.stdin):
        if message == _EXIT:
            return
        if message == _NEW:
            conversation.forget()
        elif message:
            try:
                conversation.answer(message)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives `input` editing and a history)
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            print(f"\n({_EXIT} ends)", file=sys.stderr, flush=True)
        except EOFError:
            print()
            return


@contextlib.contextmanager
def _interruptible() -> Iterator[Any]:
    """Yields a function that says whether Ctrl-C was pressed; a second Ctrl-C has its former effect."""
    noted = []
    before = signal.getsignal(signal.SIGINT)

    def note(*_: Any) -> None:
        noted.append(True)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
