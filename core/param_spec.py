"""The description of a parameter: axes, kind, matrix dimensions, trainability and stored dtype.

A model states these where it creates a parameter (`core.logical.param`). Optimizers, layouts and reports read them and
never match parameter names, so they work for any model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from core import units
from core.errors import UserError

KINDS: Mapping[str, str] = {
    "matrix": "maps inputs to outputs",
    "embedding": "one vector for each entry of a vocabulary or each position, or the transposed output matrix",
    "norm": "scale or offset of a normalisation",
    "bias": "a vector or number that is added or multiplied",
    "table": "one vector for each of many items, of which a step uses a few rows",
    "constant": "not trained",
}


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Describes one parameter. Not a pytree, so that it is a leaf.

    Attributes:
      axes: logical axis of each dimension, of a stacked parameter including the layers.
      kind: one of `KINDS`. By default it follows from the axes: "constant" if not trainable; "norm" and "table" with
        the axes `norm` and `puzzles`; otherwise "bias" with at most one dimension, "embedding" with the axis `vocab`,
        and "matrix".
      in_dims: number of input dimensions (rows) of a matrix, after the stacked ones; the others are outputs. A
        query weight [embed, heads, head_dim] has 1, an output weight [heads, head_dim, embed] has 2.
      stacked: how many leading dimensions count independent parameters, such as layers or experts. Optimizers treat
        each of them as a parameter of its own.
      trainable: whether the parameter is trained; otherwise it has no gradient and no optimizer state.
      dtype: dtype of the stored parameter.

    Raises:
      UserError: an unknown kind, or dimensions that do not fit the kind.
    """

    axes: tuple[str | None, ...]
    kind: str = ""
    in_dims: int = 1
    stacked: int = 0
    trainable: bool = True
    dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "kind", self.kind or self._default_kind())
        if self.kind not in KINDS:
            raise UserError(f"kind = {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.kind == "constant" and self.trainable:
            raise UserError("kind = 'constant', but trainable = True: give trainable=False alone")
        dims = len(self.axes) - self.stacked
        if not 0 <= self.stacked <= len(self.axes):
            raise UserError(f"stacked = {self.stacked}: expected from 0 to {len(self.axes)}, the number of dimensions")
        if self.kind == "matrix" and not 1 <= self.in_dims < dims:
            fix = f"in_dims from 1 to {dims - 1}" if dims > 1 else "another kind: a matrix has at least two dimensions"
            raise UserError(
                f"kind = 'matrix' with {units.counted(dims, 'dimension')} besides stacked = {self.stacked}, in_dims = "
                f"{self.in_dims}: expected {fix}"
            )

    def _default_kind(self) -> str:
        own = self.axes[self.stacked :]
        if not self.trainable:
            return "constant"
        if "norm" in own:
            return "norm"
        if "puzzles" in own:
            return "table"
        if len(own) <= 1:
            return "bias"
        return "embedding" if "vocab" in own else "matrix"

    def in_stack(self, *layers: str) -> ParamSpec:
        """Returns the spec of the stacked parameter, which has leading dimensions for the layers of a stack."""
        return dataclasses.replace(self, axes=(*layers, *self.axes), stacked=self.stacked + len(layers))

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the rows and columns of a matrix with this shape [inputs ..., outputs ...], one layer of a stack."""
        return math.prod(shape[: self.in_dims]), math.prod(shape[self.in_dims :])


Specs = Mapping[str, Mapping[str, ParamSpec]]  # of all parameters of a model
