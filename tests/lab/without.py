"""`tests/run.sh lab without`: deletes optional parts in a copy of the workspace, and checks that the rest works.

A part goes with its gin files and with the tests that import it, name its files or are marked `part`. Then every other
module must import, and every other test must be collected; with --quick the quick tests must pass, too.
"""

import argparse
import ast
import fnmatch
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from launch.environment import WORKSPACE

HELP = "delete optional parts in a copy, and check that everything else imports and its tests are collected"
EXAMPLE = """tests/run.sh lab without
  tests/run.sh lab without --together --quick"""

PRODUCT = ("core", "parallel", "models", "tasks", "launch", "renga")
_CHOICES = tuple(f"launch/experiments/{name}.py" for name in ("asked", "pictures", "relevance"))  # of patches
_IMAGES = ("launch/images/*", "gin/generation/images.gin")
PARTS: Mapping[str, Sequence[str]] = {  # patterns of the files of each; a file of two parts needs both
    "s5": (
        "models/mixers/s5.py",
        "models/mixers/preset_valkyrie_long.py",
        "gin/models/valkyrie_long.gin",
        "gin/long/*.gin",
        "gin/long/text/[hv]*.gin",
    ),
    "ttt": (
        "models/ttt/*",
        "launch/cli/cache_hidden_states.py",
        "launch/experiments/gate*.py",
        "gin/models/quickstart_ttt.gin",
        "gin/long/positions/*ttt.gin",
        "gin/ponder/*",
    ),
    "trm": ("models/trm/*", "gin/optimizers/trm.gin", "gin/models/trm*.gin", "gin/trm/*"),
    "puzzles": ("tasks/puzzles/*", "launch/cli/build_puzzles.py", "gin/tasks/[ams]*.gin", "gin/trm/*"),
    "code": ("tasks/code/*", "launch/cli/cache_hidden_states.py", "launch/experiments/humaneval.py", "gin/ponder/*"),
    "vision_models": ("models/vision/*", *_CHOICES, *_IMAGES, "gin/arrcoc/*", "gin/finetune_images.gin"),
    "vision_tasks": (
        "tasks/vision/*",
        *_IMAGES,
        "launch/cli/build_questions.py",
        *_CHOICES,
        "gin/arrcoc/*",
        "gin/finetune_images.gin",
    ),
}
_IMPORTS = """
import importlib, sys
failed = 0
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except Exception as error:
        failed += 1
        print(f"  {module}: {type(error).__name__}: {error}")
sys.exit(bool(failed))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `lab without`."""
    parser.add_argument(
        "parts",
        metavar="PART",
        nargs="*",
        choices=("all", *PARTS),
        default="all",
        help=f"of {', '.join(PARTS)} (default: all)",
    )
    parser.add_argument(
        "--together", action="store_true", help="delete the parts at the same time: what is left is the kernel"
    )
    parser.add_argument("--quick", action="store_true", help="also run the quick tests that remain")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a part is needed by what remains."""
    files = subprocess.run(["git", "ls-files"], cwd=WORKSPACE, stdout=subprocess.PIPE, text=True, check=True)
    tracked = [name for name in files.stdout.split("\n") if (WORKSPACE / name).is_file()]
    parts = tuple(PARTS) if "all" in args.parts else tuple(args.parts)
    groups = [parts] if args.together else [(part,) for part in parts]
    return max([_without(group, tracked, quick=args.quick) for group in groups])


def _without(parts: Sequence[str], tracked: Sequence[str], *, quick: bool) -> int:
    own = {name for part in parts for name in files_of(part, tracked)}
    tests = set(tests_of(own, {name: (WORKSPACE / name).read_text() for name in tracked if is_test(name)}))
    left = [name for name in tracked if name not in own | tests]
    gone = sorted(name for name in tests if Path(name).name.startswith("test_"))
    print(f"{', '.join(parts)}: without {len(own)} files, and {len(gone)} files of tests: {' '.join(gone)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in left:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(WORKSPACE / name, target)
        for command in (["init", "-q"], ["add", "."]):  # some tests ask git
            subprocess.run(["git", *command], cwd=folder, check=True)
        modules = [module_of(n) for n in left if n.endswith(".py") and n.split("/")[0] in PRODUCT]
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        steps = {
            "every other module imports": ["-c", _IMPORTS, *(m for m in modules if not m.endswith("__main__"))],
            "every other test is collected": [*pytest, "-n", "0", "--collect-only"],
        }
        if quick:
            steps["every other quick test passes"] = [*pytest, "-n", "3", "--dist", "loadfile", "-m", "not slow"]
        return max([_step(what, arguments, folder, parts) for what, arguments in steps.items()])


def _step(what: str, arguments: Sequence[str], folder: str, parts: Sequence[str]) -> int:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": folder,
            "JAX_PLATFORMS": "cpu",
            "WITHOUT_PARTS": " ".join(parts),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('QUICK_XLA_FLAGS', '')}".strip(),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    lines = f"{ended.stderr if ended.returncode else ''}{ended.stdout}".rstrip().splitlines()
    print("\n".join([f"  {what}: {'no' if ended.returncode else 'yes'}", *lines[-30 if ended.returncode else -1 :]]))
    return int(ended.returncode != 0)


def files_of(part: str, names: Iterable[str]) -> list[str]:
    """Returns the files of a part, without its tests; none if it was deleted."""
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in PARTS[part])]


def is_test(name: str) -> bool:
    """Returns whether a file is a module of the tests, other than this one, which names all parts."""
    return name.startswith("tests/") and name.endswith(".py") and name != "tests/lab/without.py"


def module_of(name: str) -> str:
    """Returns `a.b` of `a/b.py` and of `a/b/__init__.py`."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def imported(source: str) -> frozenset[str]:
    """Returns the modules that a source imports anywhere; `from a import b` as `a` and as `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def named_in_gin(text: str) -> Iterator[str]:
    """Yields the files that a gin file includes, and the modules that it imports, as file names without their end."""
    yield from re.findall(r"(?m)^\s*include '([^']+)'", text)
    for module, name in re.findall(r"(?m)^(?:from (\S+) )?import (\S+)", text):
        yield f"{module}.{name}".removeprefix(".").replace(".", "/")


def tests_of(own: Collection[str], tests: Mapping[str, str]) -> list[str]:
    """Returns the tests that import a module of `own`, name a gin file or a preset of it, or import such a test."""
    modules = {module_of(name) for name in own if name.endswith(".py")}
    presets = [
        Path(n).stem.removeprefix("preset_").replace("_", "-") for n in own if Path(n).stem.startswith("preset_")
    ]
    words = [*(n for n in own if n.endswith(".gin")), *modules, *presets]
    names = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b")
    found = {name for name, text in tests.items() if names.search(text) or modules & imported(text)}
    while more := {
        name
        for name, text in tests.items()
        if name not in found and ({module_of(other) for other in found} & imported(text) or _asks(name, found, tests))
    }:
        found |= more
    return sorted(found)


def _asks(name: str, gone: Collection[str], tests: Mapping[str, str]) -> bool:
    """Returns whether a test asks for a fixture of a conftest.py that is gone."""
    above = [tests[file] for folder in Path(name).parents if (file := f"{folder}/conftest.py") in gone]
    fixtures = re.findall(r"@pytest\.fixture.*\ndef (\w+)", "\n".join(above))
    asked = {word for arguments in re.findall(r"def test_\w+\((.*?)\):", tests[name]) for word in arguments.split(", ")}
    return bool(asked & {*fixtures})
