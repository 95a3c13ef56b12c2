"""Names the share of a kernel's products that it computes, for predictions of its time.

Shapes do not tell this share: a kernel skips blocks that its mask hides, and rows that are empty. It is written into
JAX's names of operations, which compiled programs keep.
"""

import contextlib
import re

import jax

_PREFIX = "computed_"
_SCOPE = re.compile(rf"\b{_PREFIX}(\d\.\d+)")


def scope(share: float | None) -> contextlib.AbstractContextManager:
    """Returns a context in which kernels are traced that compute `share`, from 0 to 1, of their products.

    None: the kernels' shapes tell, as those of causal attention do.
    """
    return contextlib.nullcontext() if share is None else jax.named_scope(f"{_PREFIX}{share:.6f}")


def of(names: str) -> float | None:
    """Returns the share in JAX's name of an operation or stack of names, or None if there is none."""
    found = _SCOPE.search(names)
    return float(found[1]) if found else None
