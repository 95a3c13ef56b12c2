"""Finds the dtypes in which the layers of a stack use their parameters."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def computed(traced: Sequence[ClosedJaxpr], params: Any) -> Any:
    """Returns a tree of dtypes: the one to which every use casts a parameter, otherwise its own.

    `traced` has traces of layers, whose first inputs are the parameters.
    """
    leaves, structure = jax.tree.flatten(params)
    casts = [{_only_cast(one.jaxpr, one.jaxpr.invars[i]) for one in traced} for i in range(len(leaves))]
    dtypes = [(len(to) == 1 and to.pop()) or a.dtype for to, a in zip(casts, leaves, strict=True)]
    return jax.tree.unflatten(structure, dtypes)


def _only_cast(jaxpr: Jaxpr, var: Any) -> Any:
    """Returns None if a use of `var` does not cast it, or if casts differ."""
    readers = [equation for equation in jaxpr.eqns if any(v is var for v in equation.invars)]
    casts = {e.params["new_dtype"] if e.primitive.name == "convert_element_type" else None for e in readers}
    return casts.pop() if len(casts) == 1 else None
