"""Renders a chat template in a separate process with limited time and memory."""

import contextlib
import datetime
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.text import chat_templates
from tasks.text.chat_templates import Limit, Message, Range

CPU_SECONDS = 10  # CPU seconds per conversation; usual templates take less than a millisecond
MEMORY_BYTES = 2**31


class TemplateError(Exception):
    """Raised if a template cannot be compiled, or cannot format a conversation.

    Attributes:
      limit: the limit that was exceeded; None: none.
    """

    def __init__(self, message: str, *, limit: Limit | None = None):
        self.limit = limit
        super().__init__(message)


class TemplateProcess:
    """A compiled chat template in its own process, which several threads may use.

    Attributes:
      marks_answers: whether it has `{% generation %}` tags.
    """

    def __init__(self, source: str):
        self._source = source
        self._lock = threading.Lock()
        self.marks_answers: bool = self._start()

    def render(self, messages: Sequence[Message], *, now: datetime.date, **variables: Any) -> str:
        """Formats a conversation like `ChatTemplate.render`."""
        return self._asked("render", messages, now, variables)

    def marked(self, messages: Sequence[Message], *, now: datetime.date, **variables: Any) -> tuple[str, list[Range]]:
        """Formats a conversation like `ChatTemplate.marked`."""
        text, ranges = self._asked("marked", messages, now, variables)
        return text, [(start, stop) for start, stop in ranges]

    def _asked(self, what: str, messages: Sequence[Message], now: datetime.date, variables: Mapping[str, Any]) -> Any:
        try:
            asked = json.dumps([what, messages, now.isoformat(), variables])
        except (TypeError, ValueError) as error:
            raise TemplateError(f"its messages and variables are not JSON: {error}") from error
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            return self._answer(asked)

    def _start(self) -> bool:
        command = [sys.executable, "-P", chat_templates.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, self._process)
        return self._answer(json.dumps([self._source, CPU_SECONDS, MEMORY_BYTES]))

    def _answer(self, asked: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # its end is noticed below
            self._process.stdin.write(asked.encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            code = _end(self._process)
            if code == chat_templates.OUT_OF_TIME:
                said = f"it took more than {CPU_SECONDS} s of computing; a usual template takes a few milliseconds"
                raise TemplateError(said, limit=Limit.TIME)
            raise TemplateError(f"its process ended with {code}")
        found, said, limit = json.loads(line)
        if said:
            raise TemplateError(said, limit=Limit(limit) if limit else None)
        return found


def _end(process: "subprocess.Popen[bytes]") -> int:
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # ends a process that waits for a conversation
    process.stdout.close()
    return process.wait()
