"""Reads an experiment file, the files that it includes, and the bindings of the command line.

gin's parser reads the statements; after a syntax error, reading continues with the next one. Unlike in gin, a file is
read only where it is first included, unless the command line includes it again: its bindings then apply there.
"""

import dataclasses
import difflib
import itertools
import re
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gin.config_parser import ImportStatement, IncludeStatement

from gin import config_parser
from launch.config.statements import Binding, ConfigProblem, Macro, Reference, nearest
from launch.environment import PACKAGE, WORKSPACE, may_be_file

DYNAMIC_REGISTRATION = "__gin__.dynamic_registration"
Statement: TypeAlias = Binding | ImportStatement | IncludeStatement

ERRORS = (SyntaxError, tokenize.TokenError, TypeError, ValueError)  # TypeError: an unhashable key of a dictionary
_MOST_PIECES = 100  # lines at the start of which a statement may be open that begins before them
_FEW_ERRORS = 3  # a text with more is not gin, unless it is a .gin file of which most parses
_OTHER_SIGN = re.compile(r"(?P<name>[\w./]+) *(?P<sign>:=?|==) *(?P<value>[^\s=].*)")  # as YAML and others write
_CALL = re.compile(r"@(?P<name>[\w./]+)\((?P<arguments>[^)]+)\)")
_IMPORTS = re.compile(r"(?:from\s+[\w.]+\s+)?import\s+[\w.]+\s*,")
_EXPLANATIONS = {
    "Unable to parse value": (
        "gin cannot parse the value",
        "a value is a number, text in quotes, True, False, None, a list, tuple or dictionary, @module.name() or %NAME",
    ),
    "Expected newline": ("there is text after the end of the statement", "write one statement on a line"),
    "Couldn't parse statement": (
        "this is not a statement",
        "a statement is module.constructor.parameter = value, or NAME = value",
    ),
}


class Source(NamedTuple):
    """The imports of a file or of a command-line binding.

    `ancestors`: the files that include it, the outermost first.
    """

    imports: Sequence[ImportStatement]
    ancestors: tuple[str, ...]


class Reader:
    """Reads sources in order, and collects their bindings and problems.

    Attributes:
      sources: what was read, by its name in messages, in reading order.
      bindings: all bindings, in the order in which they apply.
      problems: mistakes found while reading.
      unclear: words of statements that could not be read; they may be names.
      complete: False if imports, includes or left-hand sides may be missing.
    """

    def __init__(self, *, experiment_includes: bool = True):
        """Starts without sources; `experiment_includes`: whether the first one may include files."""
        self._experiment_includes = experiment_includes
        self._orders = itertools.count()
        self._statements: dict[str, list[Statement]] = {}
        self.sources: dict[str, Source] = {}
        self.bindings: list[Binding] = []
        self.problems: list[ConfigProblem] = []
        self.unclear: set[str] = set()
        self.complete = True

    @property
    def experiment(self) -> str:
        """The name of the source that was read first."""
        return next(iter(self.sources))

    def file(self, path: Path, *, ancestors: tuple[str, ...] = ()) -> None:
        """Reads a file, unless it was read before; failures become problems."""
        name = display(path)
        if name in self.sources:
            if ancestors and self.experiment not in (name, ancestors[0]):
                self._apply(name, folder=path.parent, ancestors=ancestors)
        else:
            try:
                text = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                self.problems.append(unreadable(name, error))
                self.complete, text = False, ""
            self.text(text, name=name, folder=path.parent, ancestors=ancestors)

    def text(self, text: str, *, name: str, folder: Path | None, ancestors: tuple[str, ...] = ()) -> None:
        """Reads statements, and the files that they include.

        Args:
          text: the statements.
          name: name of the source, in messages.
          folder: the folder of the source, where included files are searched for first; None: it is no file.
          ancestors: the files that include the source, the outermost first.
        """
        self._statements[name] = self._importable(self._parsed(text, file=name), file=name)
        self._apply(name, folder=folder, ancestors=ancestors)

    def _apply(self, name: str, *, folder: Path | None, ancestors: tuple[str, ...]) -> None:
        """Puts the bindings of a source, and of the files that it includes, behind all others."""
        statements = self._statements[name]
        self.sources[name] = Source([s for s in statements if isinstance(s, ImportStatement)], ancestors)
        self.bindings = [binding for binding in self.bindings if binding.file != name]
        for statement in statements:
            if isinstance(statement, IncludeStatement):
                self._include(statement, folder, reading=(*ancestors, name))
            elif isinstance(statement, Binding):
                self.bindings.append(dataclasses.replace(statement, file=name, order=next(self._orders)))

    def _importable(self, statements: list[Statement], *, file: str) -> list[Statement]:
        found = []
        for each in statements:
            if (
                isinstance(each, ImportStatement)
                and not (each.is_from or each.alias)
                and each.module != _installed_name(each.module)
            ):
                self.problems.append(_bound_elsewhere(each, file=file))
                self.unclear.add(each.bound_name())
            else:
                found.append(each)
        return found

    def _parsed(self, text: str, *, file: str) -> list[Statement]:
        try:
            return parse(text)
        except ERRORS:
            found, problems, lines = [], [], re.findall(r".*\n|.+$", text)
        starts = [i for i, line in enumerate(lines) if i == 0 or not re.match(r"[\s#)\]}]", line)]
        ends = [*starts[1:], len(lines)]
        read = 0  # lines
        for number, start in enumerate(starts):
            if start < read:
                continue
            try:
                statements, read = _parsed_piece(lines, start, ends[number:])
                found += statements
            except ERRORS as error:
                piece = "".join(lines[start : ends[number]])
                self.unclear |= set(re.findall(r"[\w.]+", piece))
                self.complete &= bool(re.match(r"[\w./]+\s*=", piece) or _OTHER_SIGN.match(piece))
                line = min(getattr(error, "lineno", None) or start + 1, len(lines))
                what, fix = _explanation(error, piece, line=lines[line - 1].strip())
                problems.append(ConfigProblem(file, line, what, actual=lines[line - 1].strip(), fix=fix))
        if len(problems) > (max(_FEW_ERRORS, len(found)) if file.endswith(".gin") else _FEW_ERRORS):
            self.complete, found, problems = False, [], [_not_gin(problems, statements=len(found))]
        self.problems += problems
        return found

    def _include(self, statement: IncludeStatement, folder: Path | None, *, reading: tuple[str, ...]) -> None:
        written, line = statement.filename, statement.location.line_num
        if reading[-1] == self.experiment and not self._experiment_includes:
            what = f"this configuration of a run includes '{written}'; what a run saves includes no file"
            self.problems.append(ConfigProblem(reading[-1], line, what, fix="remove the include"))
            return
        folders = (*([folder] if folder else []), WORKSPACE, Path.cwd())
        path = find(written, folders=folders)
        if path is None:
            guess = closest(written, folders=folders)
            self.problems.append(missing_file(written, guess, file=reading[-1], line=line))
            is_slip = guess and difflib.SequenceMatcher(None, written, str(guess)[-len(written) :]).ratio() > 0.8
            path = guess if is_slip else None
        if path is None:
            self.complete = False
        elif display(path) in reading:
            what = f"the include of {display(path)} is circular"
            self.problems.append(ConfigProblem(reading[-1], line, what, fix="remove the include"))
        else:
            self.file(path, ancestors=reading)


def _parsed_piece(lines: Sequence[str], start: int, ends: Sequence[int]) -> tuple[list[Statement], int]:
    """Parses the lines from `start` to the first of `ends`, or to a later one if a bracket or a string is open there.

    Returns the statements and the end. Raises what `parse` raises for the lines to the first end.
    """
    first = None
    for end in ends[:_MOST_PIECES]:
        try:
            return parse("\n" * start + "".join(lines[start:end])), end
        except tokenize.TokenError as error:
            first = first or error
        except ERRORS as error:
            raise (first or error) from None
    assert first is not None
    raise first


def find(path: str, *, folders: Iterable[Path]) -> Path | None:
    """Returns the first file with this path in the folders, or None."""
    return next((folder / path for folder in folders if may_be_file(folder / path)), None)


def closest(path: str, *, folders: Iterable[Path]) -> Path | None:
    """Returns the gin file with the most similar path; None if no name is similar."""
    near = dict.fromkeys(place for folder in folders for place in (folder, (folder / path).parent))
    files = [*sorted((WORKSPACE / "gin").rglob("*.gin")), *(file for f in near for file in sorted(f.glob("*.gin")))]
    alike = [file for file in files if nearest(Path(path).stem, [file.stem])]
    return max(alike, key=lambda file: difflib.SequenceMatcher(None, path, display(file)).ratio(), default=None)


def missing_file(path: str, guess: Path | None, *, file: str, line: int = 0) -> ConfigProblem:
    """Returns the problem that reports a missing file, or a folder in place of one.

    Args:
      path: the file, as the user wrote it.
      guess: an existing file to suggest; None: no suggestion.
      file: the source that names it; the file itself if a command does.
      line: the line in `file`; 0 if a command names it.
    """
    if any((folder / path).is_dir() for folder in (WORKSPACE, Path.cwd())):
        fix = f"name a file in it, such as {path.rstrip('/')}/first.gin"
        return ConfigProblem(file, line, f"'{path}' is a folder", expected="a .gin file", fix=fix)
    what = f"there is no file '{path}'"
    if guess:
        return ConfigProblem(file, line, what, expected=f"did you mean '{display(guess)}'?")
    fix = "give the path from the top of the workspace, or from the folder of the file that includes it"
    return ConfigProblem(file, line, what, fix=fix)


def unreadable(name: str, error: Exception) -> ConfigProblem:
    """Returns the problem that reports a file that cannot be read."""
    return ConfigProblem(name, 0, "the file cannot be read", actual=str(error), fix="a gin file is UTF-8 text")


def _not_gin(problems: Sequence[ConfigProblem], *, statements: int) -> ConfigProblem:
    first, pieces = problems[0], len(problems) + statements
    what = f"this is not gin text: {len(problems)} of its {pieces} statements cannot be read, this one first"
    example = "an example of an experiment is gin/quickstart.gin"
    return dataclasses.replace(first, what=what, fix="; ".join(filter(None, (first.fix, example))))


def display(path: Path) -> str:
    """Returns a path, relative to the workspace or the working directory if it is inside.

    A file of the working directory whose relative path the workspace has too keeps its whole path.
    """
    path = path.resolve()
    if path.is_relative_to(WORKSPACE):
        return path.relative_to(WORKSPACE).as_posix()
    if path.is_relative_to(here := Path.cwd()) and not (WORKSPACE / path.relative_to(here)).exists():
        return path.relative_to(here).as_posix()
    return path.as_posix()


class _Delegate(config_parser.ParserDelegate):
    """Keeps references unresolved, so that `launch.config.names` can report unknown names together."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, selector = config_parser.parse_scoped_selector(scoped_configurable_name)
        return Reference(scope, selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def parse(text: str) -> list[Statement]:
    """Parses a text into bindings, imports and includes.

    Raises:
      SyntaxError, tokenize.TokenError, TypeError, ValueError: the text is not valid gin.
    """
    parsed = config_parser.ConfigParser(text, _Delegate())
    try:
        found = [s for s in parsed if not isinstance(s, config_parser.BlockDeclaration)]
    except RecursionError as error:
        raise SyntaxError("brackets are nested too deeply") from error
    found = [_as_installed(s) for s in found if getattr(s, "module", "") != DYNAMIC_REGISTRATION]
    return [Binding(s[-1].line_num, *s[:-1]) if isinstance(s, config_parser.BindingStatement) else s for s in found]


def imported(module: str, symbol: str, *, at: ImportStatement | None = None) -> ImportStatement:
    """Returns an import of `module`, in its workspace name, as `symbol`, located at `at`."""
    alias = None if module.rpartition(".")[2] == symbol else symbol
    location = at.location if at else config_parser.Location(None, 0, None, "")
    return ImportStatement(_installed_name(module), "." in module, alias, location)


def _as_installed(statement: Any) -> Any:
    """Renames an import of our modules: `core.step` of the workspace is `renga.core.step` in the wheel."""
    if not isinstance(statement, ImportStatement) or not (statement.is_from or statement.alias):
        return statement
    return statement._replace(module=_installed_name(statement.module))


def _installed_name(module: str) -> str:
    name = module.removeprefix("renga.")
    file = WORKSPACE.joinpath(*name.split("."))
    is_in_package = (WORKSPACE / name.partition(".")[0] / "__init__.py").is_file()
    is_ours = is_in_package and (file.with_suffix(".py").is_file() or (file / "__init__.py").is_file())
    return PACKAGE + name if is_ours else module


def _bound_elsewhere(statement: ImportStatement, *, file: str) -> ConfigProblem:
    name = statement.module.removeprefix("renga.")
    package, _, last = name.rpartition(".")
    both = f"from {package} import {last}, and {last}.NAME for {statement.module}.NAME" if package else ""
    return ConfigProblem(
        file,
        statement.location.line_num,
        f"{statement.module} is {_installed_name(statement.module)} in this installation",
        actual=statement.format(),
        fix=f"write {both or f'import {name} as {name}'}",
    )


def _explanation(error: Exception, piece: str, *, line: str) -> tuple[str, str]:
    message = str(error.args[0]) if error.args else str(error)
    if token := re.search(r"Failed to parse token '(.*)'", message, re.DOTALL):
        fix = "text goes in quotes, a constructor is written @module.name(), a macro %NAME"
        is_constant = token[1].lower() in ("true", "false", "none")
        return f"the value {token[1]} is not known", f"write {token[1].capitalize()}" if is_constant else fix
    if written := _OTHER_SIGN.match(line):
        what = f"gin writes = between a name and its value, not {written['sign']}"
        return what, f"{written['name']} = {written['value']}"
    if called := _CALL.search(line):
        what = "a constructor is written without arguments"
        return what, f"@{called['name']}(), and on a line of its own: {called['name']}.{called['arguments']}"
    if _IMPORTS.match(piece):
        return "a gin import statement can import one module only", "write one import statement for each"
    # Python 3.11's tokenizer stops at an unclosed string; later versions raise TokenError.
    text, column = getattr(error, "text", None) or "", getattr(error, "offset", None) or 0
    if isinstance(error, tokenize.TokenError) or text[column : column + 1] in ("'", '"'):
        return "a bracket or a string is not closed", "close it"
    other = f"gin cannot read this: {message[:1].lower()}{message[1:].rstrip('.')}", ""
    return next((said for start, said in _EXPLANATIONS.items() if message.startswith(start)), other)
