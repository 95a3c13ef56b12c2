import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.training import compilation, hooks, trainer


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
    step = compilation.OnceCompiled(add)
    state, batch = make()
    for _ in range(4):
        state, _ = step(state, batch)
        jnp.ones(3) * 2.5  # Other compilations are none of its business.


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
    step = compilation.OnceCompiled(jitted.lower(state, batch).compile() if compiled else jitted, named_by=jitted)
    state, _ = step(state, batch)
    with pytest.raises(compilation.RecompilationError, match=named) as caught:
        step(*changed(state, batch))
    assert "state['w']" not in str(caught.value)


def test_a_weak_type_is_named():
    step = compilation.OnceCompiled(jax.jit(lambda learning_rate: learning_rate * 2))
    step(jnp.asarray(0.5, jnp.float32))
    with pytest.raises(
        compilation.RecompilationError, match=r"learning_rate: was float32\[\], .* is float32\[\], weak type"
    ):
        step(jnp.asarray(0.5))


def test_it_costs_little_for_many_leaves():
    calls = []
    step = compilation.OnceCompiled(lambda tree: calls.append(tree))
    tree = {f"leaf_{index}": jnp.ones(1) for index in range(500)}
    step(tree)
    began = time.perf_counter()
    for _ in range(1000):
        step(tree)
    assert (time.perf_counter() - began) / 1000 < 50e-6


PROCESS = """
import sys
import jax, jax.numpy as jnp
from core.training import compilation
compilation.use_cache({folder!r})
jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T)(jnp.ones((64, 64))).block_until_ready()
totals = compilation.totals()
assert totals.seconds > 0
print("COMPILED", totals.programs - totals.found, "FOUND", totals.found)
"""


def test_a_second_process_uses_the_compilation_cache(run_hosts, tmp_path):
    kept = tmp_path / "run" / "compiled"
    said = [run_hosts(PROCESS.format(folder=str(kept)), hosts=1)[0] for _ in range(2)]
    first, again = (output.split("COMPILED ")[1].split() for _, output in said)
    assert int(first[0]) >= 2, said
    assert first[2] == "0"
    assert again == ["0", "FOUND", first[0]], said
    assert any(kept.iterdir())


def test_a_folder_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="s3"):
        compilation.use_cache("s3://bucket/compiled")


def test_only_the_first_step_is_reported():
    said = []
    hook = hooks.Compiled(lambda step, totals: said.append((step, totals)))
    for step in (7, 8):
        hook.after_step(trainer.StepReport(step, {"loss": 1.0}, {}, 1.0, 0.0))
    assert [step for step, _ in said] == [7]


@pytest.fixture
def own_cache(monkeypatch):
    """A process that has not named a cache; the configuration of jax is restored."""
    names = [f"jax_compilation_cache_{name}" for name in ("dir", "max_size")]
    names += [f"jax_persistent_cache_min_{name}" for name in ("compile_time_secs", "entry_size_bytes")]
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(compilation, "_is_cached", False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation.compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("variables", "is_used"),
    [
        ({"XDG_CACHE_HOME": "{}/home"}, True),
        ({"XDG_CACHE_HOME": "{}/file"}, False),  # a folder cannot be made there
        ({"XDG_CACHE_HOME": "{}/home", "JAX_COMPILATION_CACHE_DIR": "{}/other"}, False),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_the_cache_of_a_user_is_bounded_and_gives_way(variables, is_used, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size
    compilation.use_cache_of_user()
    after = jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size
    assert after == ((str(tmp_path / "home/renga/programs"), 2**30) if is_used else before)
    assert (tmp_path / "home/renga/programs").is_dir() == is_used
