"""Preflight: every check of a run that needs no device, in one pass of a few seconds.

The layout is checked on the compiler's description of the slice, so rows, shapes and degrees are those of the real
slice. What cannot be checked from here is a note (`launch.check.preflight_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from core import metrics, slices, units
from core.batches import batch_size
from core.errors import UserError
from core.slices import GIB
from launch import configuration, host_memory, terminal
from launch.check import preflight_inputs
from launch.check.preflight_inputs import Hosts
from launch.experiment import Experiment, padding
from launch.findings import Finding
from launch.runs import smoke
from parallel import mesh, report, strategy
from parallel.partitioner import Program

_SURELY_TOO_MUCH = 2.0  # times what a chip has, by an estimate that the compiler does not always confirm


class Checked(NamedTuple):
    """The findings and, if the configuration is valid, what the run would cost.

    Attributes:
      findings: in the order of the checks.
      training_bytes: state and gradients of all chips together, by arithmetic; 0 if the layout does not fit.
      program: the experiment on the compiler's description of the slice; None if it does not fit.
      experiment: as built; None if the configuration is not valid.
    """

    findings: tuple[Finding, ...]
    training_bytes: int
    program: Program | None = None
    experiment: Experiment | None = None

    @property
    def ok(self) -> bool:
        """Returns whether no check failed."""
        return all(f.ok for f in self.findings)


def check(
    path: str,
    *,
    bindings: Sequence[str] = (),
    slice_name: str | None = None,
    run_dir: str,
    smoked: bool = False,
    hosts: Hosts = "here",
) -> Checked:
    """Checks configuration, layout, data, run directory and memory; raises for no user's mistake and writes nothing."""
    findings: list[Finding] = []
    experiment = _configuration(path, bindings, slice_name, findings)
    program = None
    if experiment is not None:
        if project := experiment.wandb_project:
            _attempt("metrics", lambda: metrics.require_wandb(project), findings, say=lambda _: f"and in {project}")
        bound = _attempt("layout", lambda: _bind(experiment, smoked=smoked), findings, say=_layout_facts)
        meant, program = bound or (experiment, None)
        findings += preflight_inputs.data(experiment, smoked=smoked, hosts=hosts)
    findings += preflight_inputs.run_directory(run_dir, slices.get(experiment.slice) if experiment else None, hosts)
    if program is None:
        return Checked(tuple(findings), 0, None, experiment)
    sizes = report.totals(program)
    slice_ = program.partitioner.slice
    findings.append(_memory(program, sizes.everything, with_activations=not smoked and hosts != "simulated"))
    findings.append(_host_memory(meant, program, hosts))
    return Checked(tuple(findings), (sizes.everything + sizes.params) * slice_.chips, program, experiment)


def require(path: str, **options: Any) -> Checked:
    """Calls `check` with the same arguments.

    Raises:
      UserError: a check failed; lists every one that did.
    """
    checked = check(path, **options)
    if not checked.ok:
        raise UserError("\n".join(f"{f.name}: {f.detail}" for f in checked.findings if not f.ok))
    return checked


def _configuration(
    path: str, bindings: Sequence[str], slice_name: str | None, findings: list[Finding]
) -> Experiment | None:
    def build() -> tuple[Experiment, tuple[str, ...]]:
        config = configuration.load(path, bindings=bindings, slice_name=slice_name)
        return config.build(), config.notes

    built = _attempt("configuration", build, findings, say=lambda b: "\n".join((path, *b[1])))
    return built[0] if built else None


def _attempt(name: str, what: Callable, findings: list[Finding], *, say: Callable):
    try:
        result = what()
    except UserError as error:
        terminal.print_traceback(error)
        findings.append(Finding(name, False, str(error)))
        return None
    findings.append(Finding(name, True, say(result)))
    return result


def _bind(experiment: Experiment, *, smoked: bool) -> tuple[Experiment, Program]:
    """The experiment as it would run, and its program on the compiler's description of the slice."""
    experiment = smoke.shrink(experiment) if smoked else experiment
    return experiment, experiment.bind(mesh.topology_devices(slices.get(experiment.slice)))


def _layout_facts(bound: tuple[Experiment, Program]) -> str:
    _, program = bound
    shape = strategy.mesh_text(program.partitioner.shape)
    rows = batch_size(program.spec)
    where = f"{program.partitioner.strategy.name} on {program.partitioner.slice.name}"
    return f"{where}: {shape}; {units.counted(rows, 'row')}{padding(program.model)}"


def _memory(program: Program, state_bytes: int, *, with_activations: bool) -> Finding:
    """A chip's memory: the state, which is exact, and an estimate of activations.

    The estimate is up to 1.13 times the compiler's figure, so on its own it fails only above `_SURELY_TOO_MUCH`.
    """
    have = program.partitioner.slice.chip.usable_hbm_bytes
    state = f"state {state_bytes / GIB:.3g} GiB"
    of = f"of {have / GIB:.4g} GiB per chip (arithmetic"
    more_chips = "Split it over more chips (fsdp, tensor) or take a larger slice."
    if state_bytes > have:
        return Finding("memory", False, f"{state} {of}; activations not counted). {more_chips}")
    if not with_activations:
        return Finding("memory", True, f"{state} {of}; activations not counted)")
    from parallel.planning import arithmetic  # a training process imports this module and never needs it

    try:
        found = arithmetic.estimate(*arithmetic.place(program))
    except Exception as error:  # an estimate refuses nothing: it traces a model of any author
        why = f"{type(error).__name__}: {error}"
        return Finding("memory", True, f"{state} {of}; activations not estimated: {why})", is_note=True)
    rows = batch_size(program.spec)
    said = f"{state}, {found.peak_bytes / GIB:,.2f} GiB with activations and gradients, {of}, not compiled)"
    advice = f"BATCH_SIZE = {rows:,}: lower it, raise ACCUM_STEPS, or let the model rematerialise more. {more_chips}"
    if found.peak_bytes <= have:
        return Finding("memory", True, said)
    if found.peak_bytes <= _SURELY_TOO_MUCH * have:
        return Finding("memory", True, f"{said}; launch/run report --compile decides whether it fits", is_note=True)
    return Finding("memory", False, f"{said}. {advice}")


def _host_memory(experiment: Experiment, program: Program, hosts: Hosts) -> Finding:
    """Memory of one host, or of this machine if it simulates all hosts."""
    slice_ = program.partitioner.slice
    if hosts == "simulated":
        need, have, whose = host_memory.simulated(experiment, program), host_memory.available_bytes(), "this machine"
    else:
        need, have = host_memory.per_host(experiment, program), slice_.host_memory_bytes
        whose = f"a host of {slice_.name}"
    said = host_memory.problem(need, have_bytes=have, whose=whose, experiment=experiment, program=program)
    if said:
        return Finding("host memory", False, said)
    return Finding("host memory", True, f"{sum(need.values()) / GIB:.3g} GiB at least of {have / GIB:.4g} of {whose}")
