"""The memory of GPUs: what JAX may allocate, and what others hold. A script stands for nvidia-smi; no GPU is here."""

import importlib.metadata
import os
import stat
import types

import jax
import pytest

from core import jax_internals, slices
from core.errors import UserError
from launch.config import loader
from launch.hosts import machine
from launch.hosts.cluster import Host
from launch.runs import progress, smoke

SMI = """#!/bin/sh
case "$*" in
  *--query-gpu=name*) echo "NVIDIA H100 80GB HBM3, 470.82.01" ;;
  *--query-gpu=*) echo "0, GPU-a, {used}, 81559"; echo "1, GPU-b, 4, 81559" ;;
  *--query-compute-apps=*) echo "GPU-a, 4711, python" ;;
esac
echo "$*" >> {log}
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """`nvidia_smi(used)` puts a script before PATH; returns the file in which it notes its arguments."""
    gpus = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", *gpus):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `prepare_gpus` sets two of them

    def provide(used):
        script = tmp_path / "nvidia-smi"
        script.write_text(SMI.format(used=used, log=tmp_path / "log"))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "log"

    return provide


@pytest.mark.covers("R12")
def test_a_gpu_that_another_job_uses_is_refused(nvidia_smi, monkeypatch):
    log = nvidia_smi(74000)
    with pytest.raises(
        UserError, match=r"GPU 0: 74000 of 81559 MiB in use by process 4711 \(python\)\n.*allocates 92%"
    ):
        machine.prepare_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UserError):
        machine.prepare_gpus()
    assert log.read_text().splitlines()[-1].startswith("-i 1 --query-compute-apps")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")  # several are to share it
    machine.prepare_gpus()


def test_a_free_gpu_or_a_machine_without_nvidia_smi_gets_the_usual_share(nvidia_smi, monkeypatch):
    nvidia_smi(600)
    machine.prepare_gpus()
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # CUDA numbers GPUs as nvidia-smi does
    monkeypatch.setenv("PATH", "")
    assert machine.gpus_in_use(free=0.92) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "most"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.5"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "no"),
    ],
)
def test_malformed_settings_of_the_memory_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}='{value}': expected"):
        machine.gpu_memory()


def test_the_summary_of_a_run_on_gpus_has_memory_and_attention(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    run = smoke.shrink(loader.load("gin/quickstart.gin", slice_name="h100:4").build())
    assert slices.get(run.slice).chip.platform == "cuda"
    shown = progress.rows(run, run.bind(jax.devices()[:4]), host=Host(0, 1, simulated=True))
    assert shown["memory"] == "up to 92% of each GPU, allocated when it is needed"
    assert shown["attention"] == "plain products: JAX has found no cuDNN"


def test_devices_of_several_hosts_are_not_those_of_one_machine(monkeypatch):
    assert machine.of_this_process().name == f"cpu:{jax.device_count()}"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"one of the 2 hosts of cpu:\d+x2, .* start it with launch/pod\.sh"):
        machine.of_this_process()


class Prepared(Exception):
    """Raised in place of preparing the GPUs, before JAX would initialize them."""


@pytest.mark.parametrize(
    ("platforms", "plugins", "is_prepared"),
    [
        ("cpu", ["xla_cuda13"], False),
        ("tpu,cpu", ["xla_cuda13"], False),
        ("cuda", ["xla_cuda13"], True),
        ("gpu", ["xla_cuda13"], True),
        (None, ["xla_cuda13"], True),
        (None, ["another"], False),
        (None, [], False),
    ],
)
def test_gpus_are_prepared_only_where_jax_may_use_them(monkeypatch, platforms, plugins, is_prepared):
    def prepare():
        raise Prepared

    found = [importlib.metadata.EntryPoint(name, f"jax_plugins.{name}", "jax_plugins") for name in plugins]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.setattr(jax_internals, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(machine, "prepare_gpus", prepare)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        if is_prepared:
            with pytest.raises(Prepared):
                machine.of_this_process()
        else:
            monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(platform="cpu", device_kind="cpu")])
            assert machine.of_this_process().name.startswith("cpu:")
    finally:
        jax.config.update("jax_platforms", before)


class Listed(importlib.metadata.EntryPoint):
    """An installed plugin of JAX."""

    dist = types.SimpleNamespace(version="0.10.2")


@pytest.mark.covers("R10", "R12")
@pytest.mark.parametrize(
    ("plugins", "said", "absent"),
    [
        ([], ["JAX has no plugin for them: `launch/setup.sh --extra cuda` adds it"], "a warning"),
        (["xla_cuda12"], ["JAX's plugin for them (xla_cuda12 0.10.2) cannot", "JAX printed:\na warning"], "--extra"),
    ],
)
def test_a_cpu_in_place_of_gpus_that_jax_cannot_use_is_an_error(nvidia_smi, monkeypatch, plugins, said, absent):
    """JAX without CUDA, and a driver that is too old: it then uses the CPU, and prints a warning at most."""
    nvidia_smi(600)
    installed = [Listed(name, f"jax_plugins.{name}", "jax_plugins") for name in plugins]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: installed)
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(machine, "_LOOK", "import sys; print('a warning', file=sys.stderr); print('[\"cpu\", 1]')")
    with pytest.raises(UserError, match=r"NVIDIA H100 80GB HBM3, driver 470\.82\.01") as raised:
        machine.local()
    assert all(text in str(raised.value) for text in said)
    assert absent not in str(raised.value)
    for name, value in (("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", "")):  # asked for, or hidden
        with monkeypatch.context() as chosen:
            chosen.setenv(name, value)
            assert machine.local().name == "cpu:1"


def test_hidden_gpus_are_not_in_use(nvidia_smi, monkeypatch):
    nvidia_smi(74000)
    with pytest.raises(UserError, match="other processes use GPUs"):
        machine.prepare_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.prepare_gpus()


def test_a_machine_on_which_jax_finds_nothing_is_an_error_with_the_end_of_what_it_said(monkeypatch):
    monkeypatch.setattr(machine, "_LOOK", "import sys; sys.exit('x' * 5000 + ' no driver')")
    with pytest.raises(UserError, match="JAX finds no devices on this machine") as raised:
        machine.local()
    assert str(raised.value).endswith(" no driver")
    assert len(str(raised.value)) < 2000


def test_a_process_that_got_the_cpu_of_a_machine_with_gpus_is_an_error(nvidia_smi, monkeypatch):
    before = jax.config.jax_platforms
    nvidia_smi(600)
    assert machine.of_this_process().generation == "cpu"  # as asked for
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(UserError, match="JAX would use the CPU of this machine, which has GPUs"):
            machine.of_this_process()
    finally:
        jax.config.update("jax_platforms", before)
