"""Processes that run seqio pipelines."""

import time

from tasks.text import seqio_pipeline


def test_a_process_that_still_works_is_ended():
    processes = seqio_pipeline.Processes()
    working = processes.submit(0, time.sleep, 300)
    begin = time.monotonic()
    processes.close()
    assert time.monotonic() - begin < 60
    assert working.cancelled() or working.exception(timeout=60) is not None
    assert seqio_pipeline.answer(processes.submit(0, abs, -3)) == 3  # another process
    processes.close()
