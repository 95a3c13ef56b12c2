"""Imports the user's model for `launch/run agreement --model MODULE:FUNCTION`."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core import versions
from core.errors import UserError
from core.types import HasVocabulary, Model, Task, can, missing
from launch.config import names


def load(text: str) -> tuple[Model, Task | None]:
    """Calls a function of a module in the working directory or on Python's path.

    `text`: MODULE:FUNCTION. The function takes no arguments, and returns a model and a task, or only a model of tokens.

    Raises:
      UserError: there is no such function, or it fails or returns something else.
    """
    where = f"--model {text}"
    build = _function(text, where=where)
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError) as error:  # module of built-in classes and functions
        raise UserError(f"{where}: {error}; expected a function, written in Python, that takes no arguments") from error
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if required:
        raise UserError(f"{where}: needs {', '.join(required)}; expected a function that takes no arguments")
    try:
        built = build()
    except Exception as error:  # anybody's code
        raise UserError(f"{where} failed: {names.where_it_failed(error)}") from error
    model, task = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    _require(model, Model, "model", where=where)
    if task is not None:
        _require(task, Task, "task", where=where)
    elif not can(model, HasVocabulary):
        raise UserError(
            f"{where} returns {type(model).__name__} without a task, and it has no vocab_size to make random tokens "
            "for: return the model and a task, such as a tasks.sampled.SampledTask"
        )
    return model, task


def modules(text: str, model: Model, task: Task | None) -> dict[str, str]:
    """Returns digests of the user's modules that define the function, its model and its task.

    Modules that these import may be left out.
    """
    named = {text.partition(":")[0], *(type(part).__module__ for part in (model, task) if part is not None)}
    return versions.of_modules(named)


def _function(text: str, *, where: str) -> Callable[[], Any]:
    module_name, _, name = text.partition(":")
    names.make_importable([Path.cwd()])
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # anybody's code
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            place = f"in {Path.cwd()} or on PYTHONPATH"
            raise UserError(f"{where}: there is no module {error.name} {place}; expected MODULE:FUNCTION") from error
        raise UserError(f"{where}: importing {module_name} failed: {names.where_it_failed(error)}") from error
    build = getattr(module, name, None)
    if not callable(build):
        own = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module_name]
        listed = f"it has {', '.join(own)}" if own else "it has no functions"
        file = (
            getattr(module, "__file__", None) or f"the module {module_name}"
        )  # built-in modules and namespace packages have no file
        raise UserError(f"{where}: {file} has no function {name!r}; {listed}")
    return build


def _require(part: Any, protocol: type, what: str, *, where: str) -> None:
    name = (
        f"the class {part.__name__}, not an object of it"
        if inspect.isclass(part)
        else f"a value of type {type(part).__name__}"
    )
    lacks = ", ".join(missing(part, protocol))
    if lacks or inspect.isclass(part):
        reason = f", which lacks {lacks}" if lacks else ""
        raise UserError(
            f"{where} returns as its {what} {name}{reason}: expected a model, or a model and a task; see "
            f"{protocol.__name__} in core/types.py"
        )
