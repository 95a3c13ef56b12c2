"""Runs commands of ours as a user would, each in a process of its own."""

import os
import subprocess
import sys

import pytest

from launch import environment

ROOT = environment.WORKSPACE


@pytest.fixture(scope="session")
def kept_programs(tmp_path_factory):
    """Returns a folder of compiled programs, which all processes of the tests share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return str(folder)


@pytest.fixture(scope="session")
def launch_command(kept_programs):
    """`launch_command("train", …, slice_name="v4-16") -> (argv, environment)`; one process plays the whole slice."""

    def build(*arguments, slice_name=None):
        env = {
            **os.environ,
            "COLUMNS": "1000",  # an error is one line
            "JAX_COMPILATION_CACHE_DIR": kept_programs,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        env |= {"RENGA_SIMULATE": slice_name} if slice_name else {}
        return [sys.executable, "-m", "launch", *arguments], env

    return build


@pytest.fixture(scope="session")
def launch(launch_command):
    """Runs such a command to its end; gives what it printed, and its errors where it is to fail.

    `optimized`: with the machine code that users run, for trainings that take longer than their compilation.
    """

    def run(*arguments, slice_name=None, code=0, timeout=300, optimized=False):
        command, env = launch_command(*arguments, slice_name=slice_name)
        if optimized:
            env.pop("XLA_FLAGS", None)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + (done.stderr if code else "")

    return run


_programs = {}


@pytest.fixture
def laid_out_once(monkeypatch):
    """Equal programs are made once: to check one, its model is traced, which takes a second."""
    from core import identity
    from parallel.partitioner import Partitioner

    program = Partitioner.program

    def once(self, *arguments, **options):
        told = self.strategy, self.slice.name, arguments, options
        key = tuple(map(repr, self.mesh.devices.flat)), identity.text(told)
        if key not in _programs:
            _programs[key] = program(self, *arguments, **options)
        return _programs[key]

    monkeypatch.setattr(Partitioner, "program", once)


@pytest.fixture
def no_cache_of_the_user(monkeypatch, tmp_path):
    """Commands that run in the process of the test keep no compiled programs for later ones."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
