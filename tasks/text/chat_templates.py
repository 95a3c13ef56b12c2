"""Renders chat templates with the variables, filters and tags of transformers' `apply_chat_template`.

A template is an untrusted program, and runs in jinja2's immutable sandbox. As a script, this module serves one template
to `template_process`, and therefore imports no other module of this project.
"""

import contextvars
import datetime
import enum
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}
Range = tuple[int, int]  # the first character, and the character after the last

OUT_OF_TIME = -signal.SIGXCPU  # the exit code of a process that exceeds its CPU time


class Limit(enum.StrEnum):
    """A limit that a template can exceed."""

    TIME = enum.auto()
    MEMORY = enum.auto()
    DEPTH = enum.auto()  # depth of nested calls and blocks


_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field, by priority

_blocks: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("blocks", default=None)
_marks: contextvars.ContextVar[list[tuple[int, str]]] = contextvars.ContextVar("marks")


class ChatTemplate:
    """A compiled chat template.

    Attributes:
      marks_answers: whether it has `{% generation %}` tags.
    """

    def __init__(self, source: str):
        environment = _environment()
        self._template = environment.from_string(source)
        self.marks_answers = bool(environment.marks)

    def render(self, messages: Sequence[Message], *, now: datetime.date, **variables: Any) -> str:
        """Returns the text of a conversation, formatted by the template.

        `now` is the date that `strftime_now` formats.
        """
        return "".join(self._blocks(messages, now, variables))

    def marked(self, messages: Sequence[Message], *, now: datetime.date, **variables: Any) -> tuple[str, list[Range]]:
        """Returns the text as `render`, and the ranges of characters in `{% generation %}` tags.

        Raises jinja2.TemplateError if such a tag is inside a macro, `set` or `filter`.
        """
        blocks: list[str] = []
        marks: list[tuple[int, str]] = []
        tokens = _blocks.set(blocks), _marks.set(marks)
        try:
            for block in self._blocks(messages, now, variables):
                blocks.append(block)
        finally:
            _blocks.reset(tokens[0])
            _marks.reset(tokens[1])
        text = "".join(blocks)
        for start, inside in marks:
            if not text.startswith(inside, start):
                import jinja2

                raise jinja2.TemplateError(
                    "{% generation %} is inside a macro, {% set %} or {% filter %}, where its place in the text is not "
                    "known; write it around the text itself"
                )
        return text, [(start, start + len(inside)) for start, inside in marks]

    def _blocks(self, messages: Sequence[Message], now: datetime.date, variables: Mapping[str, Any]) -> Any:
        return self._template.generate(
            **{"tools": None, "documents": None, **variables},
            messages=[_without_none(message) for message in messages],
            strftime_now=now.strftime,
        )


def _without_none(message: Message) -> dict[str, Any]:
    """Returns a message without None values, its reasoning also under the names that templates read."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (as in the base class)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            environment.marks.append(line)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            inside = caller()
            if (blocks := _blocks.get()) is not None:
                _marks.get().append((sum(map(len, blocks)), inside))
            return inside

    environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.marks = []
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "dict": _Dict(), "namespace": _namespace()}
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` of templates, without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


class _Dict:
    """Stands for `dict` in templates, without the attributes of the class `dict`."""

    def __call__(self, *values: Any, **items: Any) -> dict[Any, Any]:
        return dict(*values, **items)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


def _namespace() -> Any:
    """Returns the class that templates call as `namespace`; a name with a leading underscore is an error."""
    import jinja2

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: the name {name!r} begins with an underscore; rename it")

    class Namespace(jinja2.utils.Namespace):
        def __init__(*given: Any, **items: Any):
            self, *values = given  # allows an item called `self`
            attributes = dict(*values, **items)
            for name in attributes:
                check(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return Namespace


def serve() -> None:
    """Reads a template and its limits from stdin, then conversations, as lines of JSON.

    Writes a line [result, error, exceeded limit] for the template, and for each conversation.
    """
    source, cpu_seconds, memory_bytes = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_seconds, most))

    limit()
    try:
        template = ChatTemplate(source)
    except Exception as error:
        _answer(None, f"line {getattr(error, 'lineno', None) or 1}: {_said(error)}", _exceeded(error))
        return
    _answer(template.marks_answers)
    for line in sys.stdin:
        what, messages, now, variables = json.loads(line)
        limit()
        date = datetime.datetime.fromisoformat(now) if "T" in now else datetime.date.fromisoformat(now)
        try:
            found = (template.marked if what == "marked" else template.render)(messages, now=date, **variables)
        except Exception as error:
            _answer(None, _said(error), _exceeded(error))
        else:
            _answer(found)


def _said(error: Exception) -> str:
    import jinja2

    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or calls itself without end"
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


def _exceeded(error: Exception) -> Limit | None:
    if isinstance(error, MemoryError):
        return Limit.MEMORY
    return Limit.DEPTH if isinstance(error, RecursionError) else None


def _answer(found: Any, said: str = "", limit: Limit | None = None) -> None:
    sys.stdout.write(json.dumps([found, said, limit]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
