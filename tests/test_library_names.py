"""Every name that the product takes from JAX and the libraries around it exists in the installed version.

A version of a library in which one is gone, renamed, or gives a warning of its deprecation when it is looked up (as the
names of `jax` do) fails here with the name and the places that use it. A function that warns only when it is called is
not found.
Names that are private are allowed in core/jax_internals.py alone (tests/test_house.py).
"""

import ast
import collections
import functools
import importlib
import pathlib
import sys
import types
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = {"jax", "haiku", "optax", "orbax", "tensorstore", "etils", "gin"}
PRODUCT = [
    path
    for folder in ("core", "parallel", "models", "tasks", "launch", "renga")
    for path in ROOT.glob(f"{folder}/**/*.py")
]


def imported_as(nodes):
    """{name in a file: what of LIBRARIES it stands for}, of imports at the top and inside functions."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        if isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {name: of for name, of in found.items() if of.split(".")[0] in LIBRARIES}


def names_used(text):
    """Every dotted name of LIBRARIES in a file, as long as it is written."""
    nodes = list(ast.walk(ast.parse(text)))
    if not (aliases := imported_as(nodes)):
        return
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        attributes = []
        if id(node) in inner:
            continue
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in aliases:
            yield ".".join((aliases[node.id], *attributes))


def resolve(name):
    """Returns what a dotted name stands for: a module, or what is found in the innermost one.

    Raises:
      AttributeError: there is no such thing.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], module)
    raise AttributeError(f"no module named {parts[0]!r}")


def problem(name):
    """Returns what is wrong with a name: nothing (None), `gone` with the reason, or its lookup's warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            resolve(name)
        except AttributeError as error:
            return f"gone: {error}"
    deprecated = [str(w.message) for w in caught if issubclass(w.category, (DeprecationWarning, FutureWarning))]
    return next((said for said in deprecated if name.split(".")[-1] in said), None)


def test_names_are_found_in_a_text():
    text = """import jax.numpy as jnp
import optax.contrib
from jax._src import core as c
def f():
    from jax import lax
    return lax.scan, jnp.linalg.svd(x).T, optax.contrib.muon(), c, own.name, jnp
"""
    assert sorted(names_used(text)) == [
        "jax._src.core",
        "jax.lax.scan",
        "jax.numpy",
        "jax.numpy.linalg.svd",
        "optax.contrib.muon",
    ]


def test_a_name_that_is_gone_is_told_from_one_that_is_there():
    assert problem("jax.experimental.multihost_utils.sync_global_devices") is None
    assert "no attribute 'no_such'" in problem("jax.config.no_such")
    assert "module 'jax' has no attribute 'no_such'" in problem("jax.no_such.name")


def test_a_name_whose_lookup_warns_is_deprecated(monkeypatch):
    library = types.ModuleType("a_library")
    library.__getattr__ = lambda name: warnings.warn(
        f"a_library.{name} is deprecated", DeprecationWarning, stacklevel=2
    )
    library.kept = lambda: warnings.warn("a_library.kept is deprecated", DeprecationWarning, stacklevel=2)
    monkeypatch.setitem(sys.modules, "a_library", library)
    assert problem("a_library.old") == "a_library.old is deprecated"
    assert problem("a_library.kept") is None  # it would warn when it is called


def test_no_name_is_gone_or_warns_when_it_is_looked_up():
    used = collections.defaultdict(set)
    for path in PRODUCT:
        for name in names_used(path.read_text()):
            used[name].add(path.relative_to(ROOT).as_posix())
    assert {
        "jax._src.distributed.global_state.process_id",
        "orbax.checkpoint.experimental.v1.save_checkpointables_async",
    } <= set(used)
    found = {name: said for name in sorted(used) if (said := problem(name))}
    assert not found, "\n".join(f"{name} ({', '.join(sorted(used[name]))}): {said}" for name, said in found.items())
