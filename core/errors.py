"""`UserError`, for errors that a user can cause and correct, and checks that raise it."""

import contextlib
import math
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


class UserError(ValueError):
    """An error of the user's input; its message says what is wrong, where, what was expected and how to correct it.

    Commands print only the message and end with exit code 2. Any other exception, including a ValueError of a library
    or of the user's own code, is printed with its traceback.
    """


class UnreachableError(UserError):
    """A service cannot be reached when it is first used.

    Starting again can help, so commands end with another exit code than for other `UserError`s.
    """


class Problem(str):
    """A finding about a user's input: a sentence for a person, with its facts as attributes for code.

    The sentence is `{setting}: {found}, expected {expected}; {fix}`, without the parts that are empty.

    Attributes:
      found: what is wrong.
      setting: the setting that it is about.
      file: the file, folder or pattern that it is about, as the user wrote it; `found` names it.
      line: number of the line, from 1; 0 if unknown.
      expected: what would be right.
      fix: how to correct it.
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
        """Makes the sentence from the facts."""
        said = _sentence(found, setting, expected)
        made = super().__new__(cls, f"{said}; {fix}" if fix else said)
        vars(made).update(found=found, setting=setting, file=file, line=line, expected=expected, fix=fix)
        return made

    @property
    def without_fix(self) -> str:
        """The sentence without `fix`."""
        return _sentence(self.found, self.setting, self.expected)

    def with_setting(self, setting: str) -> Self:
        """Returns the problem with another name of the setting, such as that of a flag."""
        return type(self)(**{**vars(self), "setting": setting})


def _sentence(found: str, setting: str, expected: str) -> str:
    return (f"{setting}: {found}" if setting else found) + (f", expected {expected}" if expected else "")


@contextlib.contextmanager
def named_model(model: Any, spec: Mapping[str, Any]) -> Iterator[None]:
    """Context for tracing a model with batches of `spec`; converts its exceptions to UserError.

    Args:
      model: the model; errors give its type.
      spec: fields of a batch, each with `shape` and `dtype`.

    Raises:
      UserError: the model raised an exception; says where, and which fields a batch has.
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


def check_integer(value: Any, *, where: str, least: int) -> None:
    """Raises UserError unless `value` is an integer (no bool) of at least `least`; the message calls it `where`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{where} = {value!r}: expected an integer of at least {least}")


def check_number(
    value: Any, *, where: str, least: float = -math.inf, most: float = math.inf, is_positive: bool = False
) -> None:
    """Raises UserError unless `value` is a finite number (not a bool) within the given range.

    Args:
      value: what a user gave.
      where: its name, for the message.
      least, most: the range, both included.
      is_positive: whether 0 is out of range.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and least <= value <= most and (value > 0 or not is_positive):
        return
    bound = " above 0" if is_positive else f" of at least {least:g}" if math.isfinite(least) else ""
    expected = f"a number from {least:g} to {most:g}" if math.isfinite(most) else f"a finite number{bound}"
    raise UserError(f"{where} = {value!r}: expected {expected}")


def check_text(value: Any, *, where: str) -> None:
    """Raises UserError unless `value` is a non-empty string; the message calls it `where`."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} is {value!r}, expected a non-empty string")
