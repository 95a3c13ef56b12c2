"""Messages of libraries that mean nothing to whoever trains: they stay in the logs and are left off the screen.

Each is recognized by its own words. Nothing is set aside by its level or its source, so that a message that is new, or
one that says something else, is seen. Standard library only: `launch.pods.stamped` imports this.
"""

from __future__ import annotations

import re

_ABSL = rb"[IWE]\d{4} [\d:.]+ +\d+ "  # level, date, time, thread; then file:line]

# What a line says, and why nobody misses it.
LINES: tuple[tuple[bytes, str], ...] = (
    (
        rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+",
        "a line for each rank and communicator of CPU devices, all as expected",
    ),
    (
        rb"normalizer\.cc\(\d+\) LOG\(INFO\) precompiled_charsmap is empty\. use identity normalization\.",
        "our SentencePiece vocabularies have identity normalization on purpose",
    ),
    (
        _ABSL + rb"preemption_notifier\.cc:\d+\] SIGTERM caught at [^\r\n]*",
        "the run itself says that it is preempted, and what it saved",
    ),
    (
        rb"WARNING:absl:\[process=\d+\]\[thread=\w+\] Reached preemption sync point, step=\d+",
        "Orbax's own word for the same",
    ),
    (
        rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
        "of lines that TensorFlow writes while it is imported",
    ),
    (
        _ABSL + rb"port\.cc:\d+\] oneDNN custom operations are on\.[^\r\n]*",
        "TensorFlow reads data here and computes nothing",
    ),
    (
        _ABSL + rb"cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, GPU will not be used\.",
        "TensorFlow needs no GPU here",
    ),
    (
        _ABSL + rb"cuda_platform\.cc:\d+\] failed call to cuInit: [^\r\n]*",
        "TensorFlow needs no GPU here",
    ),
    (
        _ABSL
        + rb"cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized to use available CPU instructions in "
        rb"performance-critical operations\.",
        "TensorFlow computes nothing here",
    ),
    (
        rb"To enable the following instructions: [^\r\n]*, rebuild TensorFlow with the appropriate compiler flags\.",
        "the second half of the same",
    ),
)
_ANY = re.compile(rb"(?:" + rb"|".join(line for line, _ in LINES) + rb")(?:\r?\n|$)")


def without(text: bytes) -> bytes:
    """Returns the text without these lines, also where one stands behind the beginning of another line."""
    return _ANY.sub(b"", text)
