"""Finds the preprocessor of a seqio task that fails: errors of tf.data do not say to which one an operation belongs."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tasks.text.tfds_source import tensorflow


def failing_preprocessor(task: Any, dataset_of: Callable[[Any], Any]) -> str:
    """Runs a pipeline again that failed, with Python between its preprocessors.

    Args:
      task: the seqio Task.
      dataset_of: returns the dataset of such a task.

    Returns:
      Function, module and line, such as `parse (my_tasks:12)`, if it reads its examples and fails; "" if there is none,
      as where the source fails, or the preprocessor is not a function.
    """
    failed: set[int] = set()
    watched = [_watched(function, number, failed) for number, function in enumerate(task.preprocessors)]
    with contextlib.suppress(Exception):  # the caller has seen it
        for _ in dataset_of(task.replace(preprocessors=watched)):
            pass
    return _named(task.preprocessors[max(failed)]) if failed else ""  # an earlier one may have failed in reading ahead


def _watched(function: Any, number: int, failed: set[int]) -> Any:
    """Returns a preprocessor that notes its failure, with the same signature; what is no function stays as it is."""
    if isinstance(function, functools.partial):
        return functools.partial(_watched(function.func, number, failed), *function.args, **function.keywords)
    if not inspect.isfunction(function):
        return function

    @functools.wraps(function)
    def watched(dataset: Any, *arguments: Any, **options: Any) -> Any:
        read = _until_failure(dataset, lambda: None)
        try:
            made = function(read, *arguments, **options)
        except Exception:
            failed.add(number)
            raise
        return _until_failure(made, lambda: failed.add(number))

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
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return f"{function.__qualname__} ({function.__module__}:{function.__code__.co_firstlineno})"
