"""Reads an experiment file, the files that it includes and the bindings of the command line, in their order.

Unlike gin, a file is read once, where it is first included: two files may include the same one, and the second
inclusion does not undo what was set between them. An include is also looked for next to the file that has it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.config.parsing import ImportStatement, IncludeStatement, Statement, parse
from launch.config.statements import Binding, ConfigProblem, Reference, is_flag, leaves, nearest
from launch.environment import WORKSPACE

DYNAMIC_REGISTRATION = "__gin__.dynamic_registration"


class Source(NamedTuple):
    """One file, or one binding of the command line, as read.

    Attributes:
      imports: its import statements except dynamic registration.
      ancestors: the files whose includes led here.
    """

    imports: Sequence[ImportStatement] = ()
    ancestors: tuple[str, ...] = ()


class Reader:
    """Reads sources in turn.

    Attributes:
      sources: by the name that messages use, in the order in which reading began.
      bindings: all of them, in the order in which they apply.
      problems: missing files, and statements that do not parse.
      complete: no file and no statement is missing from what was read.
    """

    def __init__(self):
        self.sources: dict[str, Source] = {}
        self.bindings: list[Binding] = []
        self.problems: list[ConfigProblem] = []
        self.complete = True

    def file(self, path: Path, *, ancestors: tuple[str, ...] = ()) -> str:
        """Reads a file that exists, unless it was read before; returns its name."""
        name = display(path)
        if name in self.sources:
            return name
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(unreadable(name, error))
            self.complete, text = False, ""
        self.text(text, name=name, folder=path.parent, ancestors=ancestors)
        return name

    def text(self, text: str, *, name: str, folder: Path, ancestors: tuple[str, ...] = ()) -> None:
        """Reads statements; paths that they include are looked for in `folder` as well."""
        statements, problems, complete = parse(text, file=name)
        self.problems += [*problems, *_without_dynamic_registration(statements, name)]
        self.complete &= complete
        imports = [s for s in statements if isinstance(s, ImportStatement) and s.module != DYNAMIC_REGISTRATION]
        self.sources[name] = Source(imports, ancestors)
        for statement in statements:
            if isinstance(statement, IncludeStatement):
                self._include(statement, name, folder)
            elif isinstance(statement, Binding):
                self.bindings.append(dataclasses.replace(statement, file=name, order=len(self.bindings)))

    def _include(self, statement: IncludeStatement, file: str, folder: Path) -> None:
        written, line = statement.filename, statement.location.line_num
        folders = (WORKSPACE, Path.cwd(), folder)
        path = find(written, folders=folders)
        if path is None:
            guess = closest(written, folders=folders)
            self.problems.append(ConfigProblem(file, line, **missing_file(written, guess)))
            path = guess if guess and _is_a_slip(written, guess) else None
            self.complete &= path is not None
        reading = (*self.sources[file].ancestors, file)
        if path is not None and display(path) in reading:
            what = f"the include of {display(path)} comes back to a file that is being read"
            self.problems.append(ConfigProblem(file, line, what, fix="remove the include"))
        elif path is not None:
            self.file(path, ancestors=reading)


def find(path: str, *, folders: Iterable[Path]) -> Path | None:
    """Returns the first file of that path under the folders; an absolute path is itself."""
    return next((folder / path for folder in folders if (folder / path).is_file()), None)


def closest(path: str, *, folders: Sequence[Path]) -> Path | None:
    """Returns the gin file that was probably meant: one with a similar name, in a similar place."""
    near = dict.fromkeys(place for folder in folders for place in (folder, (folder / path).parent))
    files = [*sorted((WORKSPACE / "gin").rglob("*.gin")), *(file for f in near for file in sorted(f.glob("*.gin")))]
    alike = [file for file in files if nearest(Path(path).stem, [file.stem])]
    return max(alike, key=lambda file: difflib.SequenceMatcher(None, path, display(file)).ratio(), default=None)


def missing_file(path: str, guess: Path | None) -> dict[str, str]:
    """Returns the parts of a problem that reports a missing file."""
    if any((folder / path).is_dir() for folder in (WORKSPACE, Path.cwd())):
        example = f"{path.rstrip('/')}/first.gin"
        fix = f"name a file in it, such as {example}"
        return {"what": f"'{path}' is a folder", "expected": "a .gin file", "fix": fix}
    fix = "give the path from the top of the workspace, or from the folder of the file that includes it"
    expected = f"did you mean '{display(guess)}'?" if guess else ""
    return {"what": f"there is no file '{path}'", "expected": expected, "fix": "" if guess else fix}


def unreadable(name: str, error: Exception) -> ConfigProblem:
    """Returns the problem that reports a file that cannot be read."""
    return ConfigProblem(name, 0, "the file cannot be read", actual=str(error), fix="a gin file is UTF-8 text")


def display(path: Path) -> str:
    """Returns a path relative to the workspace, else to the working directory, else in full: equal on all hosts."""
    path = path.resolve()
    for folder in (WORKSPACE, Path.cwd()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.as_posix()


def _is_a_slip(path: str, guess: Path) -> bool:
    """Returns whether only the name of the file is misspelt, by little."""
    alike = difflib.SequenceMatcher(None, Path(path).stem, guess.stem).ratio() > 0.8
    return alike and guess.as_posix().endswith(Path(path).with_name(guess.name).as_posix())


def _without_dynamic_registration(statements: Sequence[Statement], file: str) -> Iterator[ConfigProblem]:
    """gin finds constructors through imports only where this is the first statement of each file."""
    on = [s for s in statements if isinstance(s, ImportStatement) and s.module == DYNAMIC_REGISTRATION]
    needing = on or [statement for statement in statements if _names_something(statement)]
    if not is_flag(file) and needing and statements[:1] != on[:1]:
        line = needing[0].line if isinstance(needing[0], Binding) else needing[0].location.line_num
        what = "dynamic registration must be the first statement of the file"
        fix = "begin the file with: from __gin__ import dynamic_registration"
        yield ConfigProblem(file, line, what, fix=fix)


def _names_something(statement: Statement) -> bool:
    if isinstance(statement, Binding):
        return not statement.is_macro or any(isinstance(leaf, Reference) for leaf in leaves(statement.value))
    return isinstance(statement, ImportStatement)
