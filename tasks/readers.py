"""Reading with tf.data: the libraries, imported late and without noise, and the operation that reads a document."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from core import library_noise
from tasks import documents
from tasks.corpus import Corpus


@functools.cache
def modules() -> tuple[Any, Any]:
    """TensorFlow and seqio, imported without their start-up messages: 5 s the first time."""
    with _without_noise():
        import tensorflow as tf

        tf.zeros([])  # the first operation looks for devices, and speaks of those it does not find
        import seqio
    return tf, seqio


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Holds back what is written to the terminal meanwhile, then writes it without known noise."""
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(terminal, 2)
                held.seek(0)
                os.write(2, library_noise.without(held.read()))
    finally:
        os.close(terminal)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without AutoGraph, which costs time at every trace and which only seqio's own packing needs."""
    tf, _ = modules()
    return tf.autograph.experimental.do_not_convert(function)


def reader(corpus: Corpus, read: Callable[..., bytes]) -> Callable[..., Any]:
    """An operation that reads a document by `read(…)` through the corpus's intake (`documents.Intake`).

    An exception inside TensorFlow would be logged with its traceback, once for each stream. A document that is refused
    is therefore noted at the intake, and passed on as a question mark, which is never trained on: whoever asks the
    dataset for an element then calls `Intake.raise_refused`.
    """
    tf, _ = modules()
    intake = documents.intake_of(corpus)

    def noted(*inputs: bytes) -> bytes:
        try:
            return intake.take(read, *inputs)
        except ValueError as error:
            intake.refuse(error)
            return b"?"

    def operation(*inputs: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(noted, inputs, tf.string, stateful=False), [])

    return operation
