"""Ctrl-C in a process that trains: the first one saves a checkpoint and ends the run, the second ends it at once.

Python does not run a signal handler while XLA compiles in the main thread. Here a thread reads the signal from a socket
(`signal.set_wakeup_fd`):

    first Ctrl-C, steps to save      asks the training loop to save and end
    first Ctrl-C, after the last     lets the run end by itself, which saves
    first Ctrl-C, nothing to save    raises KeyboardInterrupt in the main thread; if that takes long, ends the process
    second Ctrl-C                    ends the process
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from core.hosts import activity, exit_codes

_UNWINDING_SECONDS = 2.0  # for the main thread to close files and give back the run directory

_trained: int | None = None  # the last step that was dispatched
_saved: int | None = None  # the last step whose checkpoint is complete
_is_ending = False


def trained(step: int) -> None:
    """Notes that a step was dispatched."""
    global _trained, _saved, _is_ending
    _trained, _is_ending = step, False
    if _saved == step:  # trained again, after the run went back to an earlier step
        _saved = None


def saved(step: int) -> None:
    """Notes that the checkpoint of a step is complete."""
    global _saved
    _saved = step


def ending() -> None:
    """Notes that the last step of the run is done."""
    global _is_ending
    _is_ending = True


def _has_unsaved_steps() -> bool:
    return _trained is not None and _trained != _saved


class Interrupts:
    """Context in which Ctrl-C is answered as above; does nothing if the process ignores SIGINT."""

    def __init__(
        self, save: Callable[[], None] | None, *, end: Callable[[int, str], None], name: Callable[[], str] = lambda: ""
    ):
        """Takes the functions that the answers to Ctrl-C call.

        Args:
          save: asks the training loop to save a checkpoint and end; None: nothing is to be saved.
          end: ends the process at once, with an exit code and a reason.
          name: returns this host's name for messages, or an empty text.
        """
        self._save, self._end, self._name = save, end, name
        self._raises = threading.Event()
        self._before: Any = None
        self._is_on = False

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script runs this process in the background
            return self
        self._is_on = True
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._thread = threading.Thread(target=self._answer, name="Ctrl-C", daemon=True)
        self._thread.start()
        signal.set_wakeup_fd(self._write.fileno())
        self._before = signal.signal(signal.SIGINT, self._in_main_thread)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_on:
            return
        signal.signal(signal.SIGINT, self._before)
        signal.set_wakeup_fd(-1)
        self._write.close()
        self._thread.join()
        self._read.close()

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._raises.wait(0.2):  # until the thread has decided
            raise KeyboardInterrupt

    def _answer(self) -> None:
        if not self._came(None):
            return
        if self._save is None or not _has_unsaved_steps():
            self._say("Interrupted. The run ends now: there is no new step to save.")
            self._raises.set()
            if self._came(_UNWINDING_SECONDS) is not False:
                self._end(exit_codes.INTERRUPTED, "stopped by Ctrl-C")
            return
        at, again = f"Interrupted at step {activity.place().step:,}.", "Ctrl-C again ends it at once, without saving."
        if _is_ending:
            self._say(f"{at} It is the last one: the run ends after its evaluation and its checkpoint. {again}")
        else:
            self._say(f"{at} The run saves a checkpoint after the current step, then ends. {again}")
            self._save()
        if self._came(None):
            lost = "Steps since the last checkpoint are lost" if _has_unsaved_steps() else "All steps are saved"
            self._say(f"Interrupted again. The run ends now. {lost}.")
            self._end(exit_codes.INTERRUPTED, "stopped by a second Ctrl-C")

    def _came(self, seconds: float | None) -> bool | None:
        """Returns True at SIGINT, False at the end of the context, None after `seconds` without either."""
        self._read.settimeout(seconds)
        while True:
            try:
                numbers = self._read.recv(64)
            except TimeoutError:
                return None
            if not numbers:
                return False
            if signal.SIGINT in numbers:  # other signals are written, too
                return True

    def _say(self, text: str) -> None:
        name = self._name()
        with contextlib.suppress(OSError):  # the reader of the output has gone
            print("\n" * sys.stdout.isatty() + (f"{name}: " if name else "") + text, flush=True)
