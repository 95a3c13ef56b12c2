"""Imports TensorFlow and seqio lazily and quietly, and builds the tf.data operation that reads a document."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from core import library_noise
from core.errors import UserError
from tasks import documents
from tasks.corpus import Corpus


@functools.cache
def modules() -> tuple[Any, Any]:
    """Imports TensorFlow and seqio without their start-up messages; takes about 5 s the first time."""
    with _without_noise():
        import tensorflow as tf

        tf.zeros([])  # the first operation searches for devices and logs those it does not find
        import seqio
    return tf, seqio


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Captures stderr inside the block, then writes it without known start-up messages."""
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
    """Excludes a function from AutoGraph, which slows every trace and which only seqio's packing needs."""
    tf, _ = modules()
    return tf.autograph.experimental.do_not_convert(function)


def reader(corpus: Corpus, read: Callable[..., bytes]) -> Callable[..., Any]:
    """Returns a TensorFlow operation that reads documents with `read` and validates them with the corpus's `Intake`.

    An exception inside TensorFlow would be logged with its traceback once per stream. An invalid document is therefore
    recorded at the intake and replaced by "?", which is never trained on: whoever takes an element from the dataset
    must call `Intake.raise_refused` before using it.
    """
    tf, _ = modules()
    intake = documents.intake_of(corpus)

    def noted(*inputs: bytes) -> bytes:
        try:
            return intake.take(read, *inputs)
        except UserError as error:
            intake.refuse(error)
            return b"?"

    def operation(*inputs: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(noted, inputs, tf.string, stateful=False), [])

    return operation
