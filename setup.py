"""Builds the wheel: the packages of this workspace, and its gin files, below the one package `renga`.

`core`, `parallel`, `models`, `tasks` and `launch` are names that other distributions use, too. In the wheel they are
`renga.core` and so on, and `renga_names` rewrites their import statements. WORKSPACE.md has the reasons. An editable
installation adds the workspace itself to Python's path, so its modules have the names that they have there.
"""

import ast
import pathlib
import sys
import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = pathlib.Path(__file__).resolve().parent
OURS = ("core", "parallel", "models", "tasks", "launch")
DATA = {
    "renga": ["py.typed"],
    "renga.gin": ["**/*.gin"],
    "renga.launch": ["plan/compiled/*.json", "predictions.json"],
    "renga.parallel": ["planning/published.json"],
}


def renga_names(source: str, *, file: str) -> str:
    """Returns a module's source with `renga.` before the names of our packages in its import statements alone.

    Raises:
      SetupError: a statement binds the name of a package, whose uses would have to be renamed too.
    """
    found = []  # line, column in bytes of UTF-8, what the statement has there
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module):
            found.append((node.lineno, node.col_offset, "from ", node.module))
        for alias in node.names if isinstance(node, ast.Import) else ():
            if _is_ours(alias.name) and not alias.asname:
                raise SetupError(f"{file}:{alias.lineno}: import {alias.name}: write `from … import …`, or `… as NAME`")
            if _is_ours(alias.name):
                found.append((alias.lineno, alias.col_offset, "", alias.name))
    lines = source.splitlines(keepends=True)
    for line, column, before, name in sorted(found, reverse=True):  # from right to left, so that columns stay true
        text = lines[line - 1].encode()
        head, rest = text[:column], text[column:].decode()
        assert rest.startswith(before + name), rest
        lines[line - 1] = head.decode() + before + "renga." + rest.removeprefix(before)
    return "".join(lines)


def _is_ours(module: str | None) -> bool:
    return str(module).partition(".")[0] in OURS


class BuildUnderRenga(build_py):
    """Copies the modules with their imports rewritten, the tested versions, and the revision."""

    def run(self) -> None:
        """Builds the tree of the wheel."""
        super().run()
        if self.editable_mode:
            return
        folder = pathlib.Path(self.build_lib) / "renga"
        (folder / "requirements.txt").write_bytes((ROOT / "requirements.txt").read_bytes())
        sys.path.insert(0, str(ROOT))
        from core import versions

        (folder / versions.REVISION_FILE).write_text(versions.git_revision(ROOT) + "\n")

    def build_module(self, module, module_file, package):
        """Copies one module."""
        written, copied = super().build_module(module, module_file, package)
        path = pathlib.Path(written)
        path.write_text(renga_names(path.read_text(encoding="utf-8"), file=str(module_file)), encoding="utf-8")
        return written, copied


def packages() -> dict[str, str]:
    """Returns the folders of the packages, by their names in the wheel."""
    files = sorted(file for name in OURS for file in (ROOT / name).rglob("__init__.py"))
    folders = [file.parent.relative_to(ROOT) for file in files]
    return {"renga": "renga", "renga.gin": "gin"} | {f"renga.{'.'.join(f.parts)}": f.as_posix() for f in folders}


if __name__ == "__main__":
    # A build/ in the workspace would keep modules that are gone.
    with tempfile.TemporaryDirectory(prefix="renga-build-") as scratch:
        editable = "editable_wheel" in sys.argv
        setup(
            packages=[*OURS, "renga"] if editable else list(packages()),
            package_dir={"": "."} if editable else packages(),
            package_data={} if editable else DATA,
            cmdclass={"build_py": BuildUnderRenga},
            options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}},
        )
