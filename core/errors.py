"""`UserError`, for errors that a user can correct, and checks that raise it."""

import contextlib
import dataclasses
import difflib
import math
import numbers
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


class UserError(ValueError):
    """An error that the user can correct; commands print its message without a traceback."""


class UnreachableError(UserError):
    """A service cannot be reached; starting again can help."""


class Problem(str):
    """A finding about a user's input: a sentence, with its facts as attributes.

    The sentence is `{setting}: {found}, expected {expected}; {fix}`, without empty parts.

    Attributes:
      file: the file, folder or pattern that it is about, as the user wrote it.
      line: number of the line, from 1; 0 if unknown.
    """

    found: str
    setting: str
    file: str
    line: int
    expected: str
    fix: str

    def __new__(
        cls, found: str, *, setting: str = "", file: str = "", line: int = 0, expected: str = "", fix: str = ""
    ) -> Self:
        said = _sentence(found, setting, expected)
        made = super().__new__(cls, f"{said}; {fix}" if fix else said)
        vars(made).update(found=found, setting=setting, file=file, line=line, expected=expected, fix=fix)
        return made

    @property
    def without_fix(self) -> str:
        """The sentence without `fix`."""
        return _sentence(self.found, self.setting, self.expected)

    def with_setting(self, setting: str) -> Self:
        """Returns the problem with another name of the setting."""
        return type(self)(**{**vars(self), "setting": setting})


def _sentence(found: str, setting: str, expected: str) -> str:
    return (f"{setting}: {found}" if setting else found) + (f", expected {expected}" if expected else "")


@contextlib.contextmanager
def named_model(model: Any, spec: Mapping[str, Any]) -> Iterator[None]:
    """Context for tracing a model, whose exceptions become UserErrors."""
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
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES) and not f.filename.startswith("<")]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"


def check_integer(value: Any, *, where: str, least: int) -> None:
    """Raises UserError unless `value` is an integer (no bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise UserError(f"{where} = {value!r}: expected an integer of at least {least}")


def check_number(
    value: Any, *, where: str, least: float = -math.inf, most: float = math.inf, is_positive: bool = False
) -> None:
    """Raises UserError unless `value` is a finite number (no bool) within the given range.

    Args:
      where: name of the value, for the message.
      least, most: both included.
      is_positive: whether the value must be above 0.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and least <= value <= most and (value > 0 or not is_positive):
        return
    bound = " above 0" if is_positive else f" of at least {least:g}" if math.isfinite(least) else ""
    expected = f"a number from {least:g} to {most:g}" if math.isfinite(most) else f"a finite number{bound}"
    raise UserError(f"{where} = {value!r}: expected {expected}")


def check_fields(changes: Iterable[str], *kinds: type, where: str) -> None:
    """Raises UserError unless every name of `changes` is a field of one of these dataclasses."""
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    if unknown := sorted(set(changes) - known):
        nearest = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        owners = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(
            f"{where} has no {', '.join(unknown)}: expected fields of {owners}"
            f"{', such as ' + nearest[0] if nearest else ''}"
        )


def check_text(value: Any, *, where: str) -> None:
    """Raises UserError unless `value` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} is {value!r}, expected a non-empty string")
