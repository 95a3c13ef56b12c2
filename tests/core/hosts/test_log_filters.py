"""Messages of libraries are hidden by their exact words only."""

import ast
import importlib.util
import logging
import pathlib
import sys
import types

import pytest

from core.hosts import log_filters
from tasks.text import seqio_live

NOISE = (
    b"[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
    b"normalizer.cc(51) LOG(INFO) precompiled_charsmap is empty. use identity normalization.",
    b"W1122 13:42:49.757123   11718 preemption_notifier.cc:90] SIGTERM caught at 2026-11-22T13:42:49.757122251+00:00",
    b"WARNING:absl:[process=0][thread=MainThread] Reached preemption sync point, step=6",
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"I0000 00:00:1795354792.158163    8790 port.cc:153] oneDNN custom operations are on. You may see slightly "
    b"different numerical results due to floating-point round-off errors from different computation orders.",
    b"I0000 00:00:1795354792.159165    8790 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will "
    b"not be used.",
    b"E0000 00:00:1795354792.728513    8790 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed "
    b"call to cuInit: UNKNOWN ERROR (303)",
    b"I0000 00:00:1795354785.410361    8790 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use "
    b"available CPU instructions in performance-critical operations.",
    b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate "
    b"compiler flags.",
)
TELLING = (
    b"[Gloo] Rank 7 is lost",
    b"normalizer.cc(51) LOG(ERROR) precompiled_charsmap is broken.",
    b"W1122 13:42:49.757123   11718 preemption_notifier.cc:90] Failed to get the time of death",
    b"WARNING:absl:[process=0][thread=MainThread] a checkpoint could not be read",
    b"E0000 00:00:1795354792.728513    8790 collective_fusion.cc:52] may produce incorrect results",
    b"I0000 00:00:1795354792.158163    8790 port.cc:153] something new",
)


@pytest.mark.parametrize("line", NOISE)
def test_known_noise_is_left_out(line):
    assert log_filters.without(b"before\n" + line + b"\nafter\n") == b"before\nafter\n"
    assert log_filters.without(line) == b""


@pytest.mark.parametrize("line", TELLING)
def test_other_messages_are_shown_whatever_their_level_and_source(line):
    assert log_filters.without(line + b"\n") == line + b"\n"


def test_every_kind_of_noise_has_an_example_and_a_reason():
    assert len(NOISE) == len(log_filters.LINES)
    assert all(reason for _, reason in log_filters.LINES)


def late_write(check="_check_closed"):
    """What Python reports where C++ calls into an event loop, which raises this."""
    source = f"def {check}(): raise RuntimeError('closed')\ndef call_soon_threadsafe(): {check}()"
    code = compile(source, "/lib/asyncio/base_events.py", "exec")
    exec(code, names := {})
    try:
        names["call_soon_threadsafe"]()
    except RuntimeError as error:
        trace = error.__traceback__.tb_next  # as C++ is the caller, this frame is not there
        return types.SimpleNamespace(exc_type=RuntimeError, exc_value=error, exc_traceback=trace)


def record(msg, *, failed=True):
    error = (ValueError, ValueError("no room"), None) if failed else None
    return logging.LogRecord("absl", logging.ERROR, "manager.py", 1, msg, (), error)


FAILED = "[process=%d][thread=%s][operation_id=%s] _SignalingThread.run() raised an exception: %s"


def test_while_saving_the_error_that_is_raised_is_not_also_printed_and_all_else_is(monkeypatch):
    passed_on, absl = [], logging.getLogger("absl")
    monkeypatch.setattr(sys, "unraisablehook", before := passed_on.append)
    closed, other = late_write(), late_write("_schedule")
    by_python = types.SimpleNamespace(exc_value=RuntimeError("Event loop is closed"), exc_traceback=None)
    with log_filters.while_saving():
        with log_filters.while_saving():  # as two runs in one process
            pass
        for unraisable in (closed, other, by_python):
            sys.unraisablehook(unraisable)
        assert not absl.filter(record(FAILED))
        assert absl.filter(record(FAILED, failed=False))
        assert absl.filter(record("Handler Commit operations are slow"))
    own = [one for one in passed_on if any(one is mine for mine in (closed, other, by_python))]
    assert own == [other, by_python]  # what other tests left may be collected meanwhile, too
    assert sys.unraisablehook == before
    assert absl.filter(record(FAILED))


def test_a_hook_that_was_put_over_ours_stays_and_gets_everything(monkeypatch):
    passed_on = []
    monkeypatch.setattr(sys, "unraisablehook", passed_on.append)
    with log_filters.while_saving():
        ours = sys.unraisablehook
        theirs = lambda unraisable: ours(unraisable)  # noqa: E731
        sys.unraisablehook = theirs
    assert sys.unraisablehook is theirs
    theirs(closed := late_write())
    assert passed_on == [closed]


def test_records_are_hidden_by_their_template_while_the_context_is_open(caplog):
    logger = logging.getLogger("absl")
    with log_filters.without_records("Using an uncached source of %s"):
        logger.warning("Using an uncached source of %s", "texts")
        logger.warning("Using an uncached source of texts, which is wrong")
    logger.warning("Using an uncached source of %s", "texts")
    assert caplog.messages == ["Using an uncached source of texts, which is wrong", "Using an uncached source of texts"]


def texts_in(module):
    """All texts that a library's module has as constants; the library is not imported, which would take seconds."""
    package, *parts = module.split(".")
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    source = pathlib.Path(folder, *parts).with_suffix(".py").read_text()
    return {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}


def test_the_libraries_have_these_templates():
    assert log_filters._FAILED_SAVE in texts_in("orbax.checkpoint.{}.futures.future".format("_src"))
    assert set(seqio_live._HARMLESS) <= texts_in("seqio.dataset_providers") | texts_in("seqio.utils")
