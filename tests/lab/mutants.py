"""`tests/run.sh lab mutants`: makes small mistakes in a copy, and shows those that the tests do not notice.

A mistake (a mutant) is one changed operator, constant, argument, statement or returned value. Each runs with the
quick tests that mirror its module: `tests/a/test_b.py` for `a/b.py`, otherwise the tests in `tests/a/`, or above, that
import it. Nothing is changed in the working tree. Where Linux lets it, mutants cannot reach other processes.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from core.errors import UserError
from launch import flags
from launch.environment import WORKSPACE
from tests.lab.without import PRODUCT, imported, module_of

HELP = "make small mistakes in a copy of a folder, and show those that its tests do not notice"
EXAMPLE = """tests/run.sh lab mutants core --sample 40
  tests/run.sh lab mutants core/batches.py:120"""

LIBRARIES = "haiku, jax, optax"  # imported once, before mutants
PER_MODULE = 4  # of a sample, so that a module's unchanged tests run once for several mutants
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_MESSAGES = re.compile(r"^(_?log|_?logger|logging|warnings)\.|^(parser|group|subparsers)\.add_|\.info$|\.warning$")
_TEXTS = ("help", "metavar", "epilog", "description", "usage")  # arguments that a person alone reads
_SERVER = """
import json, os, resource, runpy, signal, sys, time
runpy.run_path("tests/conftest.py")  # the environment, before jax reads it
import LIBRARIES, pytest
resource.setrlimit(resource.RLIMIT_DATA, (12 << 30, 12 << 30))  # a changed size must not fill the machine
print("ready", flush=True)
for line in sys.stdin:
    job, began = json.loads(line), time.monotonic()
    if not (child := os.fork()):
        os.setsid()
        os.dup2(os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        if job["mutant"]:  # its bytecode must not be taken for that of another
            os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
        code = 3
        try:
            code = int(pytest.main(["-n", "0", "-x", "-m", "not slow", *job["tests"]]))
        finally:
            os._exit(code)
    code = None
    while code is None:
        time.sleep(0.05)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        elif time.monotonic() - began > job["limit"]:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = "late"
    print(json.dumps(code), flush=True)
"""


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
      file: of the module, relative to the workspace.
      line: where it begins.
      begin: first byte of the source that changes.
      end: offset of the first byte after the replaced text.
      before: the source of these bytes.
      after: the replacement.
    """

    file: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `lab mutants`."""
    parser.add_argument("folder", metavar="FOLDER", help="folder, file, or FILE:LINE of the workspace")
    parser.add_argument("--without", metavar="FOLDER", nargs="*", default=[], help="folders or files to leave out")
    parser.add_argument("--sample", metavar="N", type=flags.at_least(1), help="mutants to draw (default: all)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="chooses the sample (default: 0)")
    parser.add_argument(
        "--limit", metavar="SECONDS", type=float, default=60, help="of one mutant on a quiet machine (default: 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0: a mutant that no test notices may behave as before, which a person must judge."""
    name, _, line = args.folder.rstrip("/").partition(":")
    files = subprocess.run(["git", "ls-files"], cwd=WORKSPACE, stdout=subprocess.PIPE, text=True, check=True)
    tracked = [n for n in files.stdout.split("\n") if (WORKSPACE / n).is_file()]
    modules = [n for n in tracked if n.split("/")[0] in PRODUCT and n.endswith(".py") and within(n, name)]
    modules = [n for n in modules if not any(within(n, other.rstrip("/")) for other in args.without)]
    if not modules or (line and not line.isdecimal()):
        raise UserError(f"FOLDER is {args.folder}: expected a folder, file or FILE:LINE of {', '.join(PRODUCT)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left of the copy
    tests = {n: (WORKSPACE / n).read_text() for n in tracked if n.startswith("tests/") and "/test_" in n}
    caught, survivors = 0, 0
    with tempfile.TemporaryDirectory() as folder, Copy(Path(folder), tracked, args.limit) as copy:
        chosen = drawn(modules, args.seed, None if line else args.sample)
        for file, mutants in chosen:
            if args.sample and caught + survivors >= args.sample:
                break
            mirror = mirroring(file, tests)
            if reason := copy.unfit(mirror):
                print(f"{file}: left out: {reason}", flush=True)
                continue
            for mutant in [m for m in mutants if not line or m.line == int(line)]:
                if args.sample and caught + survivors >= args.sample:
                    break
                noticed = copy.notices(mutant, mirror)
                caught, survivors = caught + noticed, survivors + (not noticed)
                print(f"{'caught  ' if noticed else 'SURVIVED'} {mutant}", flush=True)
    print(f"{args.folder}, seed {args.seed}: {caught} of {caught + survivors} mutants were caught")
    return 0


def within(file: str, folder: str) -> bool:
    """Returns whether a file is `folder` or is in it."""
    return file == folder or file.startswith(f"{folder}/")


def drawn(modules: Sequence[str], seed: int, sample: int | None) -> Iterator[tuple[str, Sequence[Mutant]]]:
    """Yields modules and their mutants: all in order, or for a sample in random order, at most PER_MODULE of each."""
    chance = random.Random(seed)
    for file in modules if sample is None else chance.sample(modules, len(modules)):
        mutants = list(mutants_of(file, (WORKSPACE / file).read_text()))
        few = chance.sample(mutants, min(PER_MODULE, len(mutants)))
        if mutants:
            yield file, mutants if sample is None else sorted(few, key=lambda m: m.begin)


def mirroring(file: str, tests: dict[str, str]) -> list[str]:
    """Returns the tests of a module: of its name, otherwise those in the mirroring folder, or above, that import it."""
    *folders, name = f"tests/{file}".split("/")
    if (own := "/".join([*folders, f"test_{name}"])) in tests:
        return [own]
    users = [n for n, text in tests.items() if module_of(file) in set(imported(text))]
    while len(folders) > 1:
        if found := [n for n in users if n.split("/")[:-1] == folders]:
            return found
        folders.pop()
    return []


class Copy:
    """A copy of the workspace, and a process in it that has imported the libraries and forks to run tests."""

    def __init__(self, folder: Path, tracked: Sequence[str], limit: float) -> None:
        self._folder, self._limit = folder / "workspace", limit
        self._output = folder / "output"
        (folder / "tmp").mkdir()
        for name in tracked:
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(WORKSPACE / name, self._folder / name)
        for command in (["init", "-q"], ["add", "."]):  # some tests ask git
            subprocess.run(["git", *command], cwd=self._folder, check=True)
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # signals stay among its own processes
        if not shutil.which(apart[0]) or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
            apart = []
        self._server = subprocess.Popen(
            [*apart, sys.executable, "-c", _SERVER.replace("LIBRARIES", LIBRARIES)],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder), "JAX_PLATFORMS": "cpu", "TMPDIR": f"{folder}/tmp"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Copy":
        assert self._server.stdout
        if self._server.stdout.readline() != "ready\n":
            raise UserError("the process that runs tests did not start; its error is above")
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()
        time.sleep(0.1)  # until what it had started is gone, too, and the folder can be deleted

    def unfit(self, tests: Sequence[str]) -> str | None:
        """Returns why mutants cannot be judged by these tests, if so."""
        if not tests:
            return "no test mirrors it"
        code = self._tested(tests, mutant=False, limit=self._limit / 2)
        if code == "late":
            return f"its tests take more than {self._limit / 2:g} s"
        if code == 5:  # pytest's
            return "its tests are slow ones"
        return f"its tests fail without a mutant:\n{self._output.read_text()[-2000:]}" if code else None

    def notices(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        """Returns whether tests fail, or do not end, with a mutant."""
        path = self._folder / mutant.file
        source, times = path.read_bytes(), path.stat()
        path.write_bytes(source[: mutant.begin] + mutant.after.encode() + source[mutant.end :])
        try:
            return self._tested(tests, mutant=True, limit=self._limit) != 0
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its bytecode is that of this time

    def _tested(self, tests: Sequence[str], *, mutant: bool, limit: float) -> int | str:
        assert self._server.stdin
        assert self._server.stdout
        limit *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # of a machine that does nothing else
        job = {"tests": tests, "mutant": mutant, "limit": limit, "output": str(self._output)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yields the mutants of a module, without docstrings, messages, help texts and type annotations."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, after in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[begin:end].decode()
        yield Mutant(file, node.lineno, begin, end, before, after if isinstance(node, ast.stmt) else f"({after})")


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _MESSAGES.search(ast.unparse(node.func))):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Raise):  # its arguments are a message
        yield node, "pass"
        return
    if isinstance(node, ast.expr):
        yield from ((node, ast.unparse(other)) for other in _other_expressions(node))
    elif isinstance(node, ast.stmt):
        yield from ((node, other) for other in _other_statements(node))
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "ctx", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(child, ast.keyword) and child.arg in _TEXTS):
                yield from _changes(child)


def _other_statements(node: ast.stmt) -> Iterator[str]:
    """Yields what may stand in place of a statement."""
    if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) not in ("None", "False"):
        yield "return None"
    match node:
        case ast.Expr(value=ast.Call(func=called)) if not _MESSAGES.search(ast.unparse(called)):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "pass"


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Yields what may stand in place of an expression, apart from changes inside its parts."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield ast.Compare(node.left, [_COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in _OPERATIONS and not (_text(node.left) or _text(node.right)):
            yield ast.BinOp(node.left, _OPERATIONS[type(operator)](), node.right)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=float()):
            yield ast.Constant(node.value * 2 if node.value else 1.0)
        case ast.Name(id=name) if name in _OPPOSITES:
            yield ast.Name(_OPPOSITES[name])
        case ast.Call():
            args, keywords = node.args, node.keywords
            symmetric = ast.unparse(node.func) in _OPPOSITES
            if len(args) > 1 and not symmetric and not any(isinstance(a, ast.Starred) for a in args[:2]):
                yield ast.Call(node.func, [args[1], args[0], *args[2:]], keywords)
            for word in keywords:
                if word.arg not in (None, *_TEXTS):
                    yield ast.Call(node.func, args, [k for k in keywords if k is not word])


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
