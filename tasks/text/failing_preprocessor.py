"""Finds the failing preprocessor of a seqio task, which errors of tf.data do not name."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tasks.text.tfds_source import tensorflow

_MOST = 5_000  # examples to make again, at about 0.5 ms of CPU time per preprocessor


def failing_preprocessor(task: Any, dataset_of: Callable[[Any], Any], number: int) -> str:
    """Returns the preprocessor that fails, such as `parse (my_tasks:12)`; "" if none is found.

    It runs the pipeline again, with Python code between the preprocessors. `number` is the example that failed, from 0.
    """
    if number >= _MOST:
        return ""
    failed: set[int] = set()
    watched: list[Any] = []
    for at, function in enumerate(task.preprocessors):
        after_watched = at > 0 and watched[-1] is not task.preprocessors[at - 1]
        watched.append(_watched(function, functools.partial(failed.add, at), after_watched=after_watched))
    with contextlib.suppress(Exception):  # the caller has already seen the exception
        for _ in dataset_of(task.replace(preprocessors=watched)).take(number + 1):
            pass
    return _named(task.preprocessors[max(failed)]) if failed else ""  # max: earlier ones may fail in reading ahead


def _watched(function: Any, note: Callable[[], None], *, after_watched: bool) -> Any:
    """Returns a preprocessor that calls `note` if it fails; one that is not a Python function is unchanged."""
    if isinstance(function, functools.partial):
        inner = _watched(function.func, note, after_watched=after_watched)
        return function if inner is function.func else functools.partial(inner, *function.args, **function.keywords)
    if not inspect.isfunction(function):
        return function

    @functools.wraps(function)
    def watched(dataset: Any, *arguments: Any, **options: Any) -> Any:
        read = dataset if after_watched else _until_failure(dataset, lambda: None)  # failures of others are not noted
        try:
            made = function(read, *arguments, **options)
        except Exception:
            note()
            raise
        return _until_failure(made, note)

    return watched


def _until_failure(dataset: Any, note: Callable[[], None]) -> Any:
    """Returns a dataset of the same examples that calls `note` and ends where `dataset` raises an exception."""

    def examples() -> Iterator[Any]:
        try:
            yield from dataset
        except Exception:
            note()

    return tensorflow().data.Dataset.from_generator(examples, output_signature=dataset.element_spec)


def _named(function: Any) -> str:
    while inner := getattr(function, "func" if isinstance(function, functools.partial) else "__wrapped__", None):
        function = inner
    name = getattr(function, "__qualname__", type(function).__qualname__)
    line = f":{function.__code__.co_firstlineno}" if inspect.isfunction(function) else ""
    return f"{name} ({function.__module__}{line})"
