"""Reading an experiment file, what it includes and the bindings of the command line, in the order in which they apply.

The one idea: a file is read once, where it is first included, so that two files may include the same one without the
second inclusion undoing what was set between them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from launch.environment import WORKSPACE
from launch.gin_config.statements import (
    DYNAMIC_REGISTRATION,
    Binding,
    ConfigProblem,
    Import,
    Include,
    Reference,
    Source,
    Statement,
    leaves,
    nearest,
)


@dataclasses.dataclass(frozen=True)
class ParseFailure:
    """A statement that gin's grammar does not allow; `lost` when not even its left-hand side could be understood."""

    line: int
    what: str
    fix: str = ""
    lost: bool = False


Parse = Callable[[str], tuple[list[Statement], list[ParseFailure]]]


class Reader:
    """Reads sources one after the other.

    Attributes:
      sources: by the name under which messages know them, in the order in which reading began.
      bindings: all of them, in the order in which they apply.
      problems: files that are not there, statements that do not parse.
      complete: no file and no statement is missing from what was read.
    """

    def __init__(self, parse: Parse):
        self.sources: dict[str, Source] = {}
        self.bindings: list[Binding] = []
        self.problems: list[ConfigProblem] = []
        self.complete = True
        self._parse = parse

    def file(self, path: Path, *, ancestors: tuple[str, ...] = ()) -> str:
        """Reads a file that exists, unless it was read before; its name."""
        name = display(path)
        if name in self.sources:
            return name
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self._say(name, 0, "the file cannot be read", actual=str(error), fix="a gin file is UTF-8 text")
            self.complete, text = False, ""
        self.text(text, name=name, folder=path.parent, ancestors=ancestors)
        return name

    def text(self, text: str, *, name: str, folder: Path, ancestors: tuple[str, ...] = ()) -> None:
        """Reads statements; paths that they include are looked for next to `folder` as well."""
        statements, failures = self._parse(text)
        lines = text.splitlines() or [""]
        for failure in failures:
            actual = lines[min(failure.line, len(lines)) - 1].strip()
            self._say(name, failure.line, failure.what, actual=actual, fix=failure.fix)
            self.complete &= not failure.lost
        self.sources[name] = source = Source(name, text, ancestors, statements)
        if not source.on_command_line:
            self.problems += _without_dynamic_registration(source)
        for statement in statements:
            if isinstance(statement, Include):
                self._include(statement, source, folder)
            elif isinstance(statement, Binding):
                self.add(dataclasses.replace(statement, file=name))

    def add(self, binding: Binding) -> None:
        """Appends a binding: it wins over those before it."""
        self.bindings.append(dataclasses.replace(binding, order=len(self.bindings)))

    def _include(self, statement: Include, source: Source, folder: Path) -> None:
        folders = (WORKSPACE, Path.cwd(), folder)
        path = find(statement.path, folders=folders)
        if path is None:
            guess = closest(statement.path, folders=folders)
            self._say(source.name, statement.line, **missing_file(statement.path, guess))
            path = guess if guess and _is_a_slip(statement.path, guess) else None
            self.complete &= path is not None
        if path is not None and display(path) in (source.name, *source.ancestors):
            what = f"the include of {display(path)} comes back to a file that is being read"
            self._say(source.name, statement.line, what, fix="remove the include")
        elif path is not None:
            self.file(path, ancestors=(*source.ancestors, source.name))

    def _say(self, file: str, line: int, what: str, *, actual: str = "", expected: str = "", fix: str = "") -> None:
        self.problems.append(ConfigProblem(file, line, what, actual=actual, expected=expected, fix=fix))


def find(path: str, *, folders: Iterable[Path]) -> Path | None:
    """The first file of that path under the folders; an absolute path is itself."""
    return next((folder / path for folder in folders if (folder / path).is_file()), None)


def closest(path: str, *, folders: Sequence[Path]) -> Path | None:
    """The gin file that was probably meant: one with a similar name, in a similar place."""
    candidates = _gin_files(path, folders=folders)
    alike = [file for file in candidates if nearest(Path(path).stem, [file.stem])]
    return max(alike, key=lambda file: difflib.SequenceMatcher(None, path, display(file)).ratio(), default=None)


def missing_file(path: str, guess: Path | None) -> dict[str, str]:
    """The parts of a problem that says so."""
    if any((folder / path).is_dir() for folder in (WORKSPACE, Path.cwd())):
        return {
            "what": f"'{path}' is a folder",
            "expected": "a .gin file",
            "fix": f"name a file in it, such as {path.rstrip('/')}/first.gin",
        }
    fix = "give the path from the top of the workspace, or from the folder of the file that includes it"
    expected = f"did you mean '{display(guess)}'?" if guess else ""
    return {"what": f"there is no file '{path}'", "expected": expected, "fix": "" if guess else fix}


def display(path: Path) -> str:
    """A path from the top of the workspace, else from the working directory, else in full: equal on all hosts."""
    path = path.resolve()
    for folder in (WORKSPACE, Path.cwd()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.as_posix()


def _is_a_slip(path: str, guess: Path) -> bool:
    """Whether only the name of the file is misspelt, and hardly."""
    alike = difflib.SequenceMatcher(None, Path(path).stem, guess.stem).ratio() > 0.8
    return alike and guess.as_posix().endswith(Path(path).with_name(guess.name).as_posix())


def _gin_files(path: str, *, folders: Iterable[Path]) -> Iterator[Path]:
    yield from sorted((WORKSPACE / "gin").rglob("*.gin"))
    for folder in folders:
        for near in dict.fromkeys((folder, (folder / path).parent)):
            yield from sorted(near.glob("*.gin"))


def _without_dynamic_registration(source: Source) -> Iterator[ConfigProblem]:
    """gin finds constructors through imports only where this is switched on, in each file, before all else."""
    needs = [statement for statement in source.statements if _names_something(statement)]
    first = source.statements[:1]
    on = [s for s in source.statements if isinstance(s, Import) and s.module == DYNAMIC_REGISTRATION]
    if (needs or on) and first != on[:1]:
        statement = on[0] if on else needs[0]
        what = "dynamic registration must be the first statement of the file"
        fix = "begin the file with: from __gin__ import dynamic_registration"
        yield ConfigProblem(source.name, statement.line, what, fix=fix)


def _names_something(statement: Statement) -> bool:
    if isinstance(statement, Binding):
        return not statement.is_macro or any(isinstance(leaf, Reference) for leaf in leaves(statement.value))
    return isinstance(statement, Import)
