"""`tests/run.sh lab accelerator_packages DIR`: a folder for PYTHONPATH, for a machine with JAX and without a network.

It has what a run imports besides JAX and what comes with it, in the versions of this environment. JAX, its CUDA plugin,
numpy and scipy are those of the other machine.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from core.errors import UserError

HELP = "make a folder of packages for `lab accelerator` on a machine that has JAX and no network"
EXAMPLE = """tests/run.sh lab accelerator_packages packages
  tests/run.sh lab accelerator_packages packages --python-version 3.12 --only dm-haiku gin-config jmp tensorboardx"""
ROOTS = (
    *("dm-haiku", "gin-config", "optax", "orbax-checkpoint", "tensorstore", "etils", "fsspec", "packaging", "rich"),
    *("safetensors", "tensorboardx", "tokenizers", "jinja2"),
)
# With JAX; or for other parts of a package than runs import.
LEFT_OUT = frozenset(
    {"jax", "jaxlib", "libtpu", "numpy", "scipy", "ml-dtypes", "opt-einsum", "flax", "huggingface-hub"}
)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds DIR, the version of Python, and the packages."""
    parser.add_argument("folder", metavar="DIR", type=Path)
    own = ".".join(map(str, sys.version_info[:2]))
    parser.add_argument("--python-version", metavar="3.N", default=own, help=f"of the other machine (default: {own})")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="those that the other machine lacks")


def run(args: argparse.Namespace) -> int:
    """Installs wheels into the folder with pip; returns its exit code."""
    if not re.fullmatch(r"3\.\d+", args.python_version):
        raise UserError(f"--python-version {args.python_version}: expected a version such as 3.12")
    known = needed(ROOTS, python_version=args.python_version)
    if unknown := [name for name in args.only if canonicalize_name(name) not in known]:
        raise UserError(f"--only {unknown[0]}: expected some of {', '.join(sorted(known))}")
    chosen = {canonicalize_name(name) for name in args.only} or set(known)
    pins = [f"{name}=={known[name]}" for name in sorted(chosen)]
    where = ["--target", str(args.folder), "--python-version", args.python_version, "--implementation", "cp"]
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--no-compile", "--upgrade", "--quiet"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        *options,
        *where,
        *platforms,
        *pins,
    ]
    if code := subprocess.run(command, check=False).returncode:
        return code
    size = sum(file.stat().st_size for file in args.folder.rglob("*") if file.is_file())
    print(f"{args.folder}: {len(pins)} packages, {size / 2**20:.0f} MiB: {', '.join(pins)}")
    return 0


def needed(roots: Iterable[str], *, python_version: str) -> Mapping[str, str]:
    """Returns the packages that these need, with the versions that are installed here, without `LEFT_OUT`."""
    found: dict[str, str] = {}
    left = [Requirement(name) for name in roots]
    seen = set()
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if (key := (name, frozenset(wanted.extras))) in seen or name in LEFT_OUT:
            continue
        seen.add(key)
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an optional one
            continue
        for text in metadata.requires(name) or ():
            one = Requirement(text)
            marker = one.marker
            surroundings = [{"python_version": python_version, "extra": extra} for extra in ("", *wanted.extras)]
            if marker is None or any(marker.evaluate(each) for each in surroundings):
                left.append(one)
    return found
