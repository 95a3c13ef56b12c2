"""Describes the fields of a batch: shape, dtype and logical axes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from core.errors import UserError


@dataclasses.dataclass(frozen=True, init=False)
class Field:
    """Describes one array of a batch, such as `Field((32, 128), np.int32, ("batch", "length"))`.

    Attributes:
      shape: shape in the global batch.
      axes: logical axis of each dimension, `batch` first; None: no strategy shards it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike, axes: Sequence[str | None]):
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", np.dtype(dtype))
        object.__setattr__(self, "axes", tuple(axes))
        if len(self.axes) != len(self.shape):
            raise UserError(f"{self}: {len(self.axes)} axes for {len(self.shape)} dimensions; expected one for each")
        if self.axes[:1] != ("batch",):
            raise UserError(
                f"{self}: the first axis of every field of a batch must be 'batch', its rows. Repeat what all rows "
                "share for each row, or make it inside the model"
            )

    def __str__(self) -> str:
        return f"Field({self.shape}, {self.dtype}, {self.axes})"

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class KnowsShare(Protocol):
    """A stream of batches that can tell how much of a finite dataset was read."""

    def share(self) -> float | None:
        """Returns the approximate fraction of the data read, 0 to 1; None if it is unknown."""


BatchSpec = Mapping[str, Field]  # of a global batch
ROW_IDS = "row_ids"  # added to every batch by `core.random_bits`


def batch_size(batch: Mapping[str, Any]) -> int:
    """Returns the number of rows of a batch, or of its spec."""
    return next(iter(batch.values())).shape[0]


def row_length(spec: BatchSpec) -> int:
    """Returns the largest dimension with the axis `length`; 1 if no field has that axis."""
    check_spec(spec)
    dimensions = (pair for field in spec.values() for pair in zip(field.shape, field.axes, strict=True))
    return max((size for size, axis in dimensions if axis == "length"), default=1)


def has_tokens(spec: BatchSpec) -> bool:
    """Returns whether a field has the axis `length`."""
    return any("length" in field.axes for field in spec.values())


def has_ids(spec: BatchSpec) -> bool:
    """Returns whether a field has the axis `length` and an integer dtype of more than one byte."""
    wide = [
        field for field in spec.values() if np.dtype(field.dtype).kind in "iu" and np.dtype(field.dtype).itemsize > 1
    ]
    return any("length" in field.axes for field in wide)


def check_spec(spec: BatchSpec) -> None:
    """Raises UserError unless the values are `Field`s with equal numbers of rows; `row_ids` is reserved."""
    others = [f"{k!r} is of type {type(field).__name__}" for k, field in spec.items() if not isinstance(field, Field)]
    if others:
        raise UserError(
            f"spec of a batch: {', '.join(others)}; expected core.batches.Field(shape, dtype, axes), with the logical "
            "axis of each dimension, such as ('batch', 'length')"
        )
    if ROW_IDS in spec:
        raise UserError(
            f"spec of a batch: the name {ROW_IDS!r} is reserved for the rows of the global batch; rename it"
        )
    if len({field.shape[0] for field in spec.values()}) > 1:
        rows = ", ".join(f"{name!r} has {field.shape[0]}" for name, field in spec.items())
        raise UserError(f"spec of a batch: its fields differ in their number of rows ({rows}); expected the batch size")


def batch_shapes(spec: BatchSpec, *, rows: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch with `rows` rows; None: those of `spec`."""
    return {
        name: jax.ShapeDtypeStruct((rows or field.shape[0], *field.shape[1:]), field.dtype)
        for name, field in spec.items()
    }


_CONTENT = " content="


def fingerprint_of(listing: str, content: str) -> str:
    """Joins a hash of the data's names, sizes and settings with one of its content, `KIND:HASH`."""
    return f"{listing}{_CONTENT}{content}"


def listing_of(fingerprint: str) -> str:
    """Returns a fingerprint without the hash of the content."""
    return fingerprint.partition(_CONTENT)[0]


def is_same_data(saved: str, now: str) -> bool:
    """Returns whether two fingerprints may be of the same data.

    Content hashes of different kinds are not compared.
    """
    (before, _, content_before), (after, _, content_after) = (text.partition(_CONTENT) for text in (saved, now))
    kinds = [content.partition(":")[0] for content in (content_before, content_after)]
    return before == after and (content_before == content_after or kinds[0] != kinds[1])
