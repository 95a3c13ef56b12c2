"""Finds the preprocessor of a seqio task that fails: errors of tf.data do not say to which one an operation belongs."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tasks.text.tfds_source import tensorflow

_MOST = 5_000  # examples are made again, at about 0.5 ms of CPU time for each preprocessor


def failing_preprocessor(task: Any, dataset_of: Callable[[Any], Any], number: int) -> str:
    """Runs a pipeline that failed again, with Python between its preprocessors.

    Args:
      task: the seqio Task.
      dataset_of: returns the dataset of such a task.
      number: the example that failed, from 0.

    Returns:
      Function, module and line, such as `parse (my_tasks:12)`, if it reads its examples and fails; "" if there is none,
      as where the source fails, the preprocessor is not a function, or many examples precede the one that failed.
    """
    if number >= _MOST:
        return ""
    failed: set[int] = set()
    watched: list[Any] = []
    for at, function in enumerate(task.preprocessors):
        after_watched = at > 0 and watched[-1] is not task.preprocessors[at - 1]
        watched.append(_watched(function, functools.partial(failed.add, at), after_watched=after_watched))
    with contextlib.suppress(Exception):  # the caller has seen it
        for _ in dataset_of(task.replace(preprocessors=watched)).take(number + 1):
            pass
    return _named(task.preprocessors[max(failed)]) if failed else ""  # an earlier one may have failed in reading ahead


def _watched(function: Any, note: Callable[[], None], *, after_watched: bool) -> Any:
    """Returns a preprocessor that notes its failure, with the same signature; what is no function stays as it is."""
    if isinstance(function, functools.partial):
        inner = _watched(function.func, note, after_watched=after_watched)
        return function if inner is function.func else functools.partial(inner, *function.args, **function.keywords)
    if not inspect.isfunction(function):
        return function

    @functools.wraps(function)
    def watched(dataset: Any, *arguments: Any, **options: Any) -> Any:
        read = dataset if after_watched else _until_failure(dataset, lambda: None)  # no failure of others is noted
        try:
            made = function(read, *arguments, **options)
        except Exception:
            note()
            raise
        return _until_failure(made, note)

    return watched


def _until_failure(dataset: Any, note: Callable[[], None]) -> Any:
    """Returns a dataset of the examples before an exception, which is noted; so what reads it does not fail."""

    def examples() -> Iterator[Any]:
        try:
            yield from dataset
        except Exception:
            note()

    return tensorflow().data.Dataset.from_generator(examples, output_signature=dataset.element_spec)


def _named(function: Any) -> str:
    """Returns the name, module and line of the innermost function of partial functions and decorators."""
    while inner := getattr(function, "func" if isinstance(function, functools.partial) else "__wrapped__", None):
        function = inner
    name = getattr(function, "__qualname__", type(function).__qualname__)
    line = f":{function.__code__.co_firstlineno}" if inspect.isfunction(function) else ""
    return f"{name} ({function.__module__}{line})"
