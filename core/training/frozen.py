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
    """Interface of a task whose batches were computed with the frozen parameters of a model.

    Attributes:
      base_checksum: what `checksum` returned for these parameters.
    """

    base_checksum: int

    def describe(self) -> str:
        """Names the data, for an error message."""


def checksum(program: HasSpecs, params: Params) -> int | None:
    """Returns the sum of the fingerprints of the frozen parameters modulo 2^32, except those of kind "constant".

    Returns None if no other parameter is frozen. All hosts must call it.

    Args:
      program: the program, whose `param_specs` say which parameters are frozen.
      params: as the run stores them.
    """
    specs = reading.by_name(program.param_specs)
    leaves = {
        name: leaf
        for name, leaf in reading.by_name(params).items()
        if not specs[name].trainable and specs[name].kind != "constant"
    }
    return reading.checksum(leaves) if leaves else None


def require_base(task: Task, found: int | None) -> None:
    """Checks that the cached hidden states of a task were computed with these frozen parameters.

    Args:
      task: task of the run or of an evaluation; a task without cached hidden states is not checked.
      found: what `checksum` returns for the frozen parameters.

    Raises:
      UserError: they were computed with other parameters.
    """
    if can(task, HasBase) and found != task.base_checksum:
        ours = "none" if found is None else f"{found:08x}"
        raise UserError(
            f"the cached hidden states were computed with another base: {task.describe()}, whose parameters have the "
            f"checksum {task.base_checksum:08x}; the frozen parameters of this run have {ours}. Set INIT_FROM to that "
            "base, or compute the hidden states of this one (launch/run cache-hidden-states)"
        )
