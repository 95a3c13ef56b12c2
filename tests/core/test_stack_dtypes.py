"""The dtypes that layers compute with."""

import jax
import jax.numpy as jnp
import pytest

from core import stack_dtypes


@pytest.mark.parametrize(
    ("layer", "dtypes"),
    [
        (lambda w, x: x * w["a"].astype(jnp.bfloat16) + w["b"], ("bfloat16", "float32")),
        (lambda w, x: w["a"].astype(jnp.bfloat16) + w["a"][0].astype(jnp.bfloat16) + x, ("float32", "float32")),
        (lambda w, x: x + w["a"].astype(jnp.float16) + w["b"].astype(jnp.float16), ("float16", "float16")),
    ],
    ids=["one is cast", "a part is read before a cast", "both are cast"],
)
def test_a_parameter_has_the_dtype_to_which_all_its_uses_cast_it(layer, dtypes):
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    traced = [jax.make_jaxpr(layer)(params, jnp.ones(3, jnp.bfloat16))]
    found = stack_dtypes.computed(traced, params)
    assert tuple(jnp.dtype(found[name]).name for name in ("a", "b")) == dtypes


def test_kinds_that_cast_to_different_dtypes_keep_the_dtype_of_the_parameter():
    kinds = [lambda w, to=to: w.astype(to) for to in (jnp.bfloat16, jnp.float16)]
    traced = [jax.make_jaxpr(kind)(jnp.ones(3)) for kind in kinds]
    assert stack_dtypes.computed(traced, jnp.ones(3)) == jnp.float32
    assert stack_dtypes.computed(traced[:1], jnp.ones(3)) == jnp.bfloat16
