"""Versions are those of the installed packages."""

import importlib.metadata

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
