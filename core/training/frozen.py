"""Checks that precomputed hidden states were computed with the frozen parameters of a run."""

from typing import Protocol

from core.checkpoints import reading
from core.errors import UserError
from core.parameters import Specs
from core.types import Params, Task, can


class HasSpecs(Protocol):
    """Interface of a program that describes its parameters."""

    @property
    def param_specs(self) -> Specs:
        """A tree like the parameters, with a `ParamSpec` for each."""


class HasBase(Protocol):
    """Interface of a task whose batches were computed with the frozen parameters of a model."""

    base_checksum: int

    def describe(self) -> str:
        """Names the data, for an error message."""


def checksum(program: HasSpecs, params: Params) -> int | None:
    """Returns the checksum of frozen parameters that are not of kind "constant"; None if there are none.

    All hosts must call it.
    """
    specs = reading.by_name(program.param_specs)
    leaves = {
        name: leaf
        for name, leaf in reading.by_name(params).items()
        if not specs[name].trainable and specs[name].kind != "constant"
    }
    return reading.checksum(leaves) if leaves else None


def require_base(task: Task, found: int | None) -> None:
    """Raises UserError if a task's cached hidden states were computed with other frozen parameters.

    `found` is the `checksum` of the frozen parameters.
    """
    if can(task, HasBase) and found != task.base_checksum:
        ours = "none" if found is None else f"{found:08x}"
        raise UserError(
            f"the cached hidden states were computed with another base: {task.describe()}, whose parameters have the "
            f"checksum {task.base_checksum:08x}; the frozen parameters of this run have {ours}. Set INIT_FROM to that "
            "base, or compute the hidden states of this one (launch/run cache-hidden-states)"
        )
