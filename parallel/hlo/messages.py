"""What the compiler writes to stderr, kept: it says there what it could not do well, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Environment in which libtpu says on stderr what it warns of; it reads it once, when it is loaded.
AUDIBLE_WARNINGS = {"TPU_STDERR_LOG_LEVEL": "1"}


class Messages:
    """Text that is there once `compiler_messages` has ended."""

    text = ""


@contextlib.contextmanager
def compiler_messages(*, pass_on: bool = True) -> Iterator[Messages]:
    """Keeps what C++ writes to file descriptor 2 meanwhile; at the end passes on all but the compiler's warnings.

    Args:
      pass_on: False keeps all of it to itself.
    """
    messages = Messages()
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            messages.text = kept.read().decode(errors="replace")
            if pass_on:
                os.write(2, re.sub(r"(?m)^[WI]\d{4} .*\n?", "", messages.text).encode())
