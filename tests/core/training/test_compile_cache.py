"""Compiled programs are kept: a process that starts again compiles nothing, and says so."""

import pytest

from core.training import compile_cache, hooks, trainer

PROCESS = """
import sys
import jax, jax.numpy as jnp
from core.training import compile_cache
compile_cache.use({folder!r})
jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T)(jnp.ones((64, 64))).block_until_ready()
totals = compile_cache.totals()
assert totals.seconds > 0
print("COMPILED", totals.programs - totals.found, "FOUND", totals.found)
"""


def test_what_one_process_compiled_the_next_does_not(run_hosts, tmp_path):
    kept = tmp_path / "run" / "compiled"
    said = [run_hosts(PROCESS.format(folder=str(kept)), hosts=1)[0] for _ in range(2)]
    first, again = (output.split("COMPILED ")[1].split() for _, output in said)
    assert int(first[0]) >= 2, said
    assert first[2] == "0"
    assert again == ["0", "FOUND", first[0]], said
    assert any(kept.iterdir())


def test_a_folder_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="s3"):
        compile_cache.use("s3://bucket/compiled")


def test_the_first_step_alone_is_spoken_of():
    said = []
    hook = hooks.Compiled(lambda step, totals: said.append((step, totals)))
    for step in (7, 8):
        hook.after_step(trainer.StepReport(step, {"loss": 1.0}, {}, 1.0, 0.0))
    assert [step for step, _ in said] == [7]
