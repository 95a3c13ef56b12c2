"""Reading on after a statement that does not parse, so that one missing bracket does not hide all other mistakes.

The one idea: a statement begins at the margin. A text that fails as a whole is cut there and each piece tried alone; of
a piece that fails, the names on both sides of `=` are kept, so that nothing else seems missing or unused for its sake.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Callable, Iterator

from launch.gin_config.sources import ParseFailure
from launch.gin_config.statements import Binding, Import, Macro, Reference, Statement, Unreadable

ERRORS = (SyntaxError, tokenize.TokenError, TypeError, ValueError)  # an unhashable key of a dictionary: TypeError

_IMPORT = re.compile(r"(?:from\s+([\w.]+)\s+)?import\s+([\w.]+(?:\s*,\s*[\w.]+)*)")
_ASSIGNMENT = re.compile(r"((?:\w+/)*)((?:\w+\.)*\w+)\s*=")
_BLOCK = re.compile(r"((?:\w+/)*)([\w.]+)\s*:")
_IN_BLOCK = re.compile(r"^\s+(\w+)\s*=", re.MULTILINE)
_MENTION = re.compile(r"([@%])((?:\w+/)*)([\w.]+)")
_EXPLANATIONS = {
    "Unable to parse value": (
        "there is no value that gin can read",
        "a value is a number, text in quotes, True, False, None, a list, tuple or dictionary, @module.name() or %NAME",
    ),
    "Expected newline": ("the statement goes on where it should end", "write one statement on a line"),
    "Couldn't parse statement": (
        "this is no statement",
        "a statement is module.constructor.parameter = value, or NAME = value",
    ),
}
_COMMENT_OR_STRING = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|#.*")


def recover(
    text: str, error: Exception, *, parse: Callable[[str], list[Statement]]
) -> tuple[list[Statement], list[ParseFailure]]:
    """The statements that parse one by one, remnants of the others, and a failure for each of those."""
    statements: list[Statement] = []
    failures: list[ParseFailure] = []
    for line, piece in _pieces(text):
        try:
            statements += parse("\n" * (line - 1) + piece)
        except ERRORS as piece_error:
            remnants = _remnants(line, piece)
            what, fix = _explain(piece_error, piece)
            failures.append(ParseFailure(_line(piece_error, line), what, fix=fix, lost=not remnants))
            statements += remnants
    if not failures:  # the pieces make sense and the whole does not
        what, fix = _explain(error, text)
        failures = [ParseFailure(_line(error, 1), what, fix=fix, lost=True)]
    return statements, failures


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Each statement with the number of its first line."""
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if not re.match(r"[\s#)\]}]", line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield start + 1, "".join(lines[start:end])


def _line(error: Exception, first: int) -> int:
    """Where it went wrong; an unclosed bracket is only noticed at the end, so there the statement's first line."""
    return getattr(error, "lineno", None) or first


def _remnants(line: int, piece: str) -> list[Statement]:
    imported = _IMPORT.match(piece)
    if imported:
        package, names = imported.groups()
        modules = [f"{package}.{name}" if package else name for name in re.split(r"\s*,\s*", names)]
        return [Import(line, module, is_from=bool(package)) for module in modules]
    value = Unreadable(tuple(_mentions(piece)))
    assigned, block = _ASSIGNMENT.match(piece), _BLOCK.match(piece)
    if assigned:
        scope, name = assigned.groups()
        selector, _, parameter = name.rpartition(".")
        return [Binding(line, scope.rstrip("/"), selector or parameter, parameter if selector else "", value)]
    if block:
        scope, selector = block.groups()
        return [Binding(line, scope.rstrip("/"), selector, parameter, value) for parameter in _IN_BLOCK.findall(piece)]
    return []


def _mentions(piece: str) -> Iterator[Reference | Macro]:
    for sign, scope, name in _MENTION.findall(_COMMENT_OR_STRING.sub("", piece)):
        yield Reference(scope.rstrip("/"), name, True) if sign == "@" else Macro(scope + name)


def _explain(error: Exception, piece: str) -> tuple[str, str]:
    """What is wrong, in words of the file rather than of its parser, and what to write."""
    message = str(error.args[0]) if error.args else str(error)
    token = re.search(r"Failed to parse token '(.*)'", message, re.DOTALL)
    if token and token[1].lower() in ("true", "false", "none"):
        return f"the value {token[1]} is not known", f"write {token[1].capitalize()}"
    if token:
        fix = "text goes in quotes, a constructor is written @module.name(), a macro %NAME"
        return f"the value {token[1]} is not known", fix
    imported = _IMPORT.match(piece)
    if imported and "," in imported[2]:
        return "gin imports one module in a statement", "write an import for each"
    if isinstance(error, tokenize.TokenError) or _stops_at_a_quote(error):
        return "a bracket or a string is not closed", "close it"
    for beginning, explanation in _EXPLANATIONS.items():
        if message.startswith(beginning):
            return explanation
    return f"gin cannot read this: {message[:1].lower()}{message[1:].rstrip('.')}", ""


def _stops_at_a_quote(error: Exception) -> bool:
    """How an unclosed string looks to Python 3.11's tokenizer; later ones say so."""
    text, column = getattr(error, "text", None) or "", getattr(error, "offset", None) or 0
    return text[column : column + 1] in ("'", '"')
