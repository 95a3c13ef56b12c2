"""Noise of libraries is told by its own words, and by nothing else."""

import pytest

from core import library_noise

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
    assert library_noise.without(b"before\n" + line + b"\nafter\n") == b"before\nafter\n"
    assert library_noise.without(line) == b""


@pytest.mark.parametrize("line", TELLING)
def test_what_says_something_else_stays_whatever_its_level_and_source(line):
    assert library_noise.without(line + b"\n") == line + b"\n"


def test_every_kind_of_noise_has_an_example_and_a_reason():
    assert len(NOISE) == len(library_noise.LINES)
    assert all(reason for _, reason in library_noise.LINES)
