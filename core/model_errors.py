"""Names the model, the place in its code and the batch when tracing a model raises an exception."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.batches import BatchSpec
from core.errors import UserError

_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


@contextlib.contextmanager
def named(model: Any, spec: BatchSpec) -> Iterator[None]:
    """Context in which a model is traced for batches of `spec`.

    Raises:
      UserError: replaces any exception that is not one; says where it was raised and which fields a batch has.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a model is anybody's code
        said = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        fields = ", ".join(f"{name} {s.dtype}{list(s.shape)}" for name, s in spec.items())
        raise UserError(
            f"model {type(model).__name__} cannot be traced: {said} ({_place(error)}). "
            f"A batch of this task has {fields}"
        ) from error


def _place(error: Exception) -> str:
    """Returns the innermost frame outside of libraries: `my_model.py:33, in _sums`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES) and not f.filename.startswith("<")]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
