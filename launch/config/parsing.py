"""Parses gin text with gin's own parser, and goes on after a statement that does not parse.

A text that fails as a whole is split where lines begin at the margin and parsed piece by piece. Of a piece that fails,
the names on both sides of `=` are kept, so that nothing else seems missing or unused because of it.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from gin.config_parser import ImportStatement, IncludeStatement

from gin import config_parser
from launch.config.statements import Binding, ConfigProblem, Macro, Reference, Unreadable

Statement = Binding | ImportStatement | IncludeStatement

_ERRORS = (SyntaxError, tokenize.TokenError, TypeError, ValueError)  # an unhashable key of a dictionary: TypeError
_IMPORT = re.compile(r"(?:from\s+([\w.]+)\s+)?import\s+([\w.]+(?:\s*,\s*[\w.]+)*)")
_ASSIGNMENT = re.compile(r"((?:\w+/)*(?:\w+\.)*\w+)\s*=")
_BLOCK = re.compile(r"((?:\w+/)*[\w.]+)\s*:")
_IN_BLOCK = re.compile(r"^\s+(\w+)\s*=", re.MULTILINE)
_MENTION = re.compile(r"([@%])((?:\w+/)*[\w.]+)")
_COMMENT_OR_STRING = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|#.*")
_EXPLANATIONS = {
    "Unable to parse value": (
        "there is no value that gin can read",
        "a value is a number, text in quotes, True, False, None, a list, tuple or dictionary, @module.name() or %NAME",
    ),
    "Expected newline": ("the statement goes on where it should end", "write one statement on a line"),
    "Couldn't parse statement": (
        "this is not a statement",
        "a statement is module.constructor.parameter = value, or NAME = value",
    ),
}


class _Delegate(config_parser.ParserDelegate):
    """Keeps names as names; `launch.config.names` resolves them later, all mistakes at once."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return Reference(*config_parser.parse_scoped_selector(scoped_configurable_name), evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class Parsed(NamedTuple):
    """The result of parsing a text, with its mistakes.

    Attributes:
      problems: statements that gin's grammar does not allow.
      complete: of each of those, the left-hand side could be read.
    """

    statements: list[Statement]
    problems: list[ConfigProblem]
    complete: bool


def parse(text: str, *, file: str = "") -> Parsed:
    """Returns the statements of a text, and of those that do not parse a problem and what can be recovered."""
    try:
        return Parsed(_statements(text), [], True)
    except _ERRORS as error:
        whole = error
    statements, problems, complete = [], [], True
    for line, piece in _pieces(text):
        try:
            statements += _statements("\n" * (line - 1) + piece)
        except _ERRORS as error:
            remnants = _remnants(line, piece)
            statements += remnants
            problems.append(_problem(error, piece, text=text, file=file, line=line))
            complete &= bool(remnants)
    if not problems:  # each piece parses, and the whole does not
        return Parsed(statements, [_problem(whole, text, text=text, file=file, line=1)], False)
    return Parsed(statements, problems, complete)


def _statements(text: str) -> list[Statement]:
    """The statements of a text that parses; the header of a block adds nothing to its bindings."""
    parsed = config_parser.ConfigParser(text, _Delegate())
    found = [s for s in parsed if not isinstance(s, config_parser.BlockDeclaration)]
    return [Binding(s[-1].line_num, *s[:-1]) if isinstance(s, config_parser.BindingStatement) else s for s in found]


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Each statement with the number of its first line."""
    lines = text.splitlines(keepends=True)
    starts = sorted({0, *(i for i, line in enumerate(lines) if not re.match(r"[\s#)\]}]", line))})
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield start + 1, "".join(lines[start:end])


def _remnants(line: int, piece: str) -> list[Statement]:
    if imported := _IMPORT.match(piece):
        package, names = imported.groups()
        modules = [f"{package}.{name}" if package else name for name in re.split(r"\s*,\s*", names)]
        location = config_parser.Location(None, line, None, piece)
        return [ImportStatement(module, bool(package), None, location) for module in modules]
    mentions = _MENTION.findall(_COMMENT_OR_STRING.sub("", piece))
    delegate = _Delegate()
    value = Unreadable(
        tuple(delegate.macro(n) if sign == "%" else delegate.configurable_reference(n, True) for sign, n in mentions)
    )
    if assigned := _ASSIGNMENT.match(piece):
        return [Binding(line, *config_parser.parse_binding_key(assigned[1]), value)]
    if block := _BLOCK.match(piece):
        key = config_parser.parse_scoped_selector(block[1])
        return [Binding(line, *key, parameter, value) for parameter in _IN_BLOCK.findall(piece)]
    return []


def _problem(error: Exception, piece: str, *, text: str, file: str, line: int) -> ConfigProblem:
    """The problem at its line; an unclosed bracket is noticed only at the end, so there the statement's first line."""
    what, fix = _explanation(error, piece)
    line, lines = getattr(error, "lineno", None) or line, text.splitlines()
    return ConfigProblem(file, line, what, actual=lines[min(line, len(lines)) - 1].strip(), fix=fix)


def _explanation(error: Exception, piece: str) -> tuple[str, str]:
    """Describes a syntax error in terms of the file, not of its parser, and what to write instead."""
    message = str(error.args[0]) if error.args else str(error)
    if token := re.search(r"Failed to parse token '(.*)'", message, re.DOTALL):
        fix = "text goes in quotes, a constructor is written @module.name(), a macro %NAME"
        is_constant = token[1].lower() in ("true", "false", "none")
        return f"the value {token[1]} is not known", f"write {token[1].capitalize()}" if is_constant else fix
    imported = _IMPORT.match(piece)
    if imported and "," in imported[2]:
        return "gin imports one module in a statement", "write an import for each"
    if isinstance(error, tokenize.TokenError) or _stops_at_a_quote(error):
        return "a bracket or a string is not closed", "close it"
    other = f"gin cannot read this: {message[:1].lower()}{message[1:].rstrip('.')}", ""
    return next((said for start, said in _EXPLANATIONS.items() if message.startswith(start)), other)


def _stops_at_a_quote(error: Exception) -> bool:
    """Returns whether Python 3.11's tokenizer stopped at an unclosed string; later ones say so."""
    text, column = getattr(error, "text", None) or "", getattr(error, "offset", None) or 0
    return text[column : column + 1] in ("'", '"')
