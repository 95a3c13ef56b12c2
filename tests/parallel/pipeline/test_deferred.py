"""Which operations of a backward pass the gradients of weights repeat, and which values wait for them."""

import jax
import jax.numpy as jnp

from parallel.pipeline import deferred


def repeated(function, *inputs, given):
    """The operations that compute a function again from its first `given` inputs; None if its result has to wait."""
    jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
    maker = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
    first = set(range(len(jaxpr.eqns)))
    return deferred._repeatable(jaxpr, maker, jaxpr.outvars[0], first, known=set(jaxpr.invars[:given]))


def test_cheap_operations_are_repeated_and_costly_ones_wait():
    def chain(x, y):
        for _ in range(2000):
            x = jnp.sin(x)
        return x

    x = jnp.ones((2, 2))
    assert repeated(chain, x, x, given=1) == set(range(2000))
    assert repeated(lambda x, y: jnp.sin(x) + y, x, x, given=1) is None  # the second part does not have y
    assert repeated(lambda x, y: jnp.sin(x) + y, x, x, given=2) == {0, 1}
    assert repeated(lambda x, y: jnp.sin(x @ x), x, x, given=2) is None
