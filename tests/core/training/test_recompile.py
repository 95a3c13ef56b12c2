import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.training import recompile


def layout(*spec):
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec(*spec))


@jax.jit
def add(state, batch):
    return {"w": state["w"] + batch["x"].sum().astype(jnp.float32)}, batch["x"].mean()


def make(x=None, w=None):
    w = jnp.ones(8, jnp.float32) if w is None else w
    x = jnp.ones((4, 2), jnp.int32) if x is None else x
    return {"w": jax.device_put(w, layout())}, {
        "x": x if isinstance(x, np.ndarray) else jax.device_put(x, layout("data"))
    }


@pytest.mark.covers("D14")
def test_equal_inputs_compile_once():
    step = recompile.OnceCompiled(add)
    state, batch = make()
    for _ in range(4):
        state, _ = step(state, batch)
        jnp.ones(3) * 2.5  # Other compilations are none of its business.
    assert step.recompilations == 0


CHANGED = [
    (lambda s, b: (s, {"x": jax.device_put(jnp.ones((4, 3), jnp.int32), layout("data"))}),
     r"batch\['x'\]: was int32\[4, 2\].* is int32\[4, 3\]"),
    (lambda s, b: (s, {"x": b["x"].astype(jnp.int16)}), r"batch\['x'\]: was int32.* is int16"),
    (lambda s, b: (s, {"x": jax.device_put(b["x"], layout(None, None))}),
     r"batch\['x'\]: was .*P\('data',\) on mesh .*, is .*P\(None, None\) on mesh"),
    (lambda s, b: (s | {"extra": s["w"]}, b), r"state\['extra'\]: is new, float32\[8\]"),
    (lambda s, b: (s, {"x": np.ones((4, 2), np.int32)}), r"batch\['x'\]: was int32\[4, 2\].* is ndarray int32"),
]  # fmt: skip


@pytest.mark.covers("D14")
@pytest.mark.parametrize(
    ("changed", "named", "compiled"),  # several hosts compile before the first step; that program takes a NumPy array
    [(*case, False) for case in CHANGED] + [(*case, True) for case in CHANGED[:-1]],
)
def test_the_input_that_changed_is_named(changed, named, compiled):
    jitted = jax.jit(add.__wrapped__, donate_argnums=0)
    state, batch = make()
    step = recompile.OnceCompiled(jitted.lower(state, batch).compile() if compiled else jitted, named_by=jitted)
    state, _ = step(state, batch)
    with pytest.raises(recompile.RecompilationError, match=named) as caught:
        step(*changed(state, batch))
    assert "state['w']" not in str(caught.value)


def test_a_weak_type_is_named():
    step = recompile.OnceCompiled(jax.jit(lambda learning_rate: learning_rate * 2))
    step(jnp.asarray(0.5, jnp.float32))
    with pytest.raises(
        recompile.RecompilationError, match=r"learning_rate: was float32\[\], .* is float32\[\], weak type"
    ):
        step(jnp.asarray(0.5))


def test_a_warning_lets_the_run_go_on():
    step = recompile.OnceCompiled(add, on_recompile="warn")
    step(*make())
    with pytest.warns(UserWarning, match=r"batch\['x'\]"):
        step(*make(x=jnp.ones((8, 2), jnp.int32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*make())
    assert step.recompilations == 1
    with pytest.raises(AssertionError, match="ignore"):
        recompile.OnceCompiled(add, on_recompile="ignore")


def test_it_costs_little_for_many_leaves():
    calls = []
    step = recompile.OnceCompiled(lambda tree: calls.append(tree))
    tree = {f"leaf_{index}": jnp.ones(1) for index in range(500)}
    step(tree)
    began = time.perf_counter()
    for _ in range(1000):
        step(tree)
    assert (time.perf_counter() - began) / 1000 < 50e-6
