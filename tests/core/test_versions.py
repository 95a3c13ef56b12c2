"""Versions of the installed packages and of a workspace."""

import importlib
import importlib.metadata
import subprocess

import jax
import pytest

from core import versions


def test_versions_are_those_of_the_installed_packages():
    found = versions.installed(versions.TRAINING)
    assert tuple(found) == versions.TRAINING
    assert found["jax"] == jax.__version__
    assert versions.installed(versions.COMPILER).items() <= found.items()


def test_a_missing_package_is_named():
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="no-such-package"):
        versions.installed(["no-such-package"])


def test_the_revision_is_git_s_or_the_shipped_one(tmp_path):
    assert versions.git_revision(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "x").touch()
    subprocess.run([*git, "add", "x"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    assert len(versions.git_revision(tmp_path)) == 40
    (tmp_path / "x").write_text("edited")
    assert versions.git_revision(tmp_path).endswith("-dirty")
    (tmp_path / versions.REVISION_FILE).write_text("abc\n")
    assert versions.git_revision(tmp_path) == "abc"


def test_only_the_user_s_own_modules_have_a_digest(tmp_path, monkeypatch):
    file = tmp_path / "mine_alone.py"
    file.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    ours = [importlib.import_module(name).__name__ for name in ("renga.trainer", "launch.phases", "core.files.paths")]
    mine = importlib.import_module("mine_alone").__name__
    assert list(versions.of_modules([*ours, "jax", "json", mine])) == [mine]
