"""The doctor's checks before hosts are joined: those without a device, the checkpoint, and the HBM of a chip."""

from __future__ import annotations

from collections.abc import Sequence

from core import slices, units
from core.checkpoints import inspection
from core.slices import GIB
from core.types import NamesFiles, can
from launch import config, environment, prediction
from launch.check import preflight, preflight_inputs, regions
from launch.experiment import Experiment
from launch.findings import Finding
from launch.hosts import tpu_host

_MOST_DIFFERENCES = 10


def look(
    path: str, *, bindings: Sequence[str], slice_name: str, run_dir: str, hosts: preflight_inputs.Hosts
) -> list[Finding]:
    """The rows of an experiment on a slice."""
    checked = preflight.check(path, bindings=bindings, slice_name=slice_name, run_dir=run_dir, hosts=hosts)
    rows = list(checked.findings)
    if checked.program is not None:
        rows.append(checkpoint(checked.program, run_dir))
    task = checked.experiment.task if checked.experiment else None
    named = [run_dir, *(task.named_files() if can(task, NamesFiles) else ())]
    return [*rows, *region(named, zone=environment.read("TPU_ZONE") or tpu_host.zone())]


def checkpoint(program, run_dir: str) -> Finding:
    """Returns whether the newest checkpoint of the run fits the program."""
    name = "checkpoint"
    try:
        step, differences = inspection.newest_misfits(f"{run_dir}/checkpoints", program.abstract_state)
    except Exception as error:  # of many types: whatever files, formats and buckets make of it
        said = f"cannot be read: {type(error).__name__}: {error}"
        return Finding(name, True, said, "a start falls back to the newest one that is sound", is_note=True)
    if step is None:
        return Finding(name, True, "none: a fresh start")
    if differences:
        listed = "\n  ".join(units.shortened(differences, most=_MOST_DIFFERENCES))
        fix = "use the configuration that was saved with it (RUN/config.gin), or another --run-dir"
        return Finding(name, False, f"step {step} does not fit this model and optimizer:\n  {listed}", fix)
    return Finding(name, True, f"step {step} fits; a start continues from it")


def hbm(config_text: str, experiment: Experiment, *, limit_bytes: int | None) -> Finding:
    """Compares the recorded HBM need of this experiment with what a chip has (`limit_bytes`, if known)."""
    chip = slices.get(experiment.slice).chip
    have, whose = (limit_bytes, "says the runtime") if limit_bytes else (chip.usable_hbm_bytes, "by the slice table")
    there = f"{have / GIB:.4g} GiB a chip ({whose})"
    record = prediction.find(experiment, config.parse(config_text))
    if record is None:
        fix = "launch/run report EXPERIMENT.gin compiles it and says"
        return Finding("HBM", True, f"nobody compiled this experiment yet; there are {there}", fix, is_note=True)
    need = record["memory"]["peak_bytes"]
    fix = "more chips, fsdp or tensor, remat = 'full', or accum_steps: launch/run plan finds what fits"
    return Finding("HBM", need <= have, f"{need / GIB:.3g} GiB needed (compiled) of {there}", fix)


def region(named: Sequence[str], *, zone: str | None) -> list[Finding]:
    """Returns whether buckets are where the TPU is, as far as anybody can be asked."""
    return [row for bucket in regions.buckets(named) if (row := regions.judge(bucket, zone=zone)) is not None]
