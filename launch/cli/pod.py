"""`launch/pod.sh`: trains an experiment on a slice, wherever that slice is.

On a host with TPUs or GPUs it trains there; from a workstation it reaches all hosts through gcloud; with --simulate it
simulates them.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core import slices
from core.errors import UserError
from core.files import paths
from core.training import supervise
from launch import environment, flags
from launch.hosts import alerts, gcloud, lifecycle, machine, simulate, tpu_host, workstation

if TYPE_CHECKING:
    from launch.check import preflight

COMMAND = ("runs", "pod")
HELP = "train an experiment on a slice: on this TPU host, from a workstation, or simulated here"
EXAMPLE = """launch/pod.sh v4-16 gin/quickstart.gin --simulate
  launch/pod.sh local gin/quickstart.gin                    (the GPUs or the CPU of this machine)
  launch/pod.sh v4-16 gin/quickstart.gin --check
  launch/pod.sh v4-32 gin/valkyrie_7b.gin --simulate --check smoke
  launch/pod.sh v5p-8 gin/arrcoc/v5p_128.gin --scale-from v5p-128 --simulate --check smoke
  launch/pod.sh v4-16 gin/quickstart.gin --gin "BATCH_SIZE = 64" --run-dir gs://bucket/runs/first
  launch/pod.sh v4-16 gin/quickstart.gin --tune --run-dir gs://bucket/runs/first
  launch/pod.sh v4-16 gin/quickstart.gin --tpu my-tpu --zone us-central2-b --run-dir gs://bucket/runs/first
  launch/pod.sh 2xv4-16 gin/quickstart.gin --gin "include 'gin/strategies/multislice.gin'" --tpu first,second \\
      --zone us-central2-b --run-dir gs://bucket/runs/both
  launch/pod.sh logs --tpu my-tpu --zone us-central2-b      (and status, stop, tensorboard)
  launch/pod.sh profile RUN --seconds 5                     (all hosts of a running job; RUN: its directory)
  launch/pod.sh logs RUN                                    (a simulated run: all hosts, ordered by time)
  launch/pod.sh tensorboard RUN                             (a run directory that this machine can read)
  launch/pod.sh v4-32 gin/quickstart.gin --check slice --tpu my-tpu --zone us-central2-b --run-dir gs://bucket/first
  launch/pod.sh create v4-32 --tpu my-tpu --zone us-central2-b --spot      (and queue, delete)"""


_OF_TPUS = ("tpu", "zone", "project", "dry_run")
_READ_BY = {  # flags that each action reads
    **dict.fromkeys(("status", "logs", "stop"), _OF_TPUS),
    "tensorboard": (*_OF_TPUS, "run_dir"),
    **dict.fromkeys(("create", "queue"), (*_OF_TPUS, "spot")),
    "delete": (*_OF_TPUS, "queued"),
}
_READ_BY_RUNS = (
    "gin",
    "scale_from",
    "run_dir",
    "restarts",
    "steps",
    "simulate",
    "tune",
    "check",
    "tpu",
    "dry_run",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = " | ".join((*workstation.ACTIONS, *lifecycle.ACTIONS, "profile"))
    parser.add_argument(
        "target", metavar="SLICE", help=f"such as v4-32 (launch/run slices), h100:8, local; or {actions}"
    )
    named = "the experiment file; of profile, logs and tensorboard, the run; of create and queue, the SLICE"
    parser.add_argument("experiment", metavar="EXPERIMENT.gin", nargs="?", help=named)
    flags.add(parser, "--gin", "--scale-from", "--run-dir", "--restarts")
    flags.add(parser, "--steps", help="stop after step N; with profile: number of steps to trace")
    parser.add_argument("--seconds", metavar="S", type=flags.positive, help="with profile: how long to trace")
    modes = parser.add_argument_group("modes")
    flags.add(modes, "--simulate", "--check", "--tune")
    modes.add_argument("--tpu", metavar="NAME[,NAME]", help="from a workstation: the TPU of each slice (or TPU_NAME)")
    modes.add_argument("--zone", help="its zone (or TPU_ZONE)")
    modes.add_argument("--project", help="its project (or TPU_PROJECT)")
    modes.add_argument("--spot", action="store_true", help="create, queue, --restarts: a TPU that may be preempted")
    modes.add_argument("--queued", action="store_true", help="delete, --restarts: the TPU is a queued resource")
    modes.add_argument("--dry-run", action="store_true", help="print the commands for the hosts, run none")


def run(args: argparse.Namespace) -> int:
    """Runs an action of pod.sh, or trains in the place that the flags select.

    Raises UserError if arguments are missing or contradictory, or select no place.
    """
    if args.target == "profile" or (args.target in ("logs", "tensorboard") and args.experiment):
        return _of_a_run(args)
    if args.target in (*workstation.ACTIONS, *lifecycle.ACTIONS):
        return _of_a_tpu(args)
    if args.target == flags.LOCAL and (args.simulate or args.tpu):
        raise UserError(
            f"SLICE {flags.LOCAL} means the devices of this machine: with --simulate or --tpu name the slice, "
            "such as v4-8"
        )
    slice_ = machine.local() if args.target == flags.LOCAL else slices.get(args.target)
    if args.experiment is None:
        raise UserError(f"no experiment given: launch/pod.sh {args.target} EXPERIMENT.gin (gin/ has some)")
    _refuse_contradictions(args)
    place = tpu_host.look()
    if not slice_.is_tpu and args.tpu:
        raise UserError(f"{slice_.name} are no TPUs: run the command on their hosts, without --tpu")
    is_here = place.on_tpu_host and not args.tpu if slice_.is_tpu else not args.simulate
    tpus = () if args.simulate or is_here else gcloud.find_tpus(args.tpu, args.zone, args.project)
    if args.simulate or is_here or tpus:
        more = ("zone", "project", *(("spot", "queued") if args.restarts else ())) if tpus else ()
        _refuse_unused(args, (*_READ_BY_RUNS, *more))
    if args.scale_from:
        args.gin = _scaled(args, slice_)
    if args.dry_run and not tpus:
        here = "this is a host of a TPU slice" if slice_.is_tpu else f"{slice_.name} are devices of this machine"
        why = here if is_here else "no TPU is named"
        raise UserError(
            f"--dry-run prints what a workstation would send to a TPU, and {why}: "
            "give --tpu NAME --zone ZONE, or set TPU_NAME and TPU_ZONE"
        )
    if args.check == "config" or (args.check in ("hosts", "slice") and not tpus):
        where = ["--simulate"] if args.simulate else ["--ship"] if tpus else []
        options = flags.passed_on(args, "--gin", "--run-dir")
        return _become(["check", slice_.name, args.experiment, "--level", args.check, *options, *where])
    if args.simulate:
        return _simulate(args, slice_)
    if tpus:
        return _from_workstation(args, slice_, tpus)
    if not is_here:
        raise UserError(_no_place(slice_, args.experiment, place))
    if slice_.is_tpu:
        tpu_host.require_slice(slice_, accelerator_type=place.accelerator_type, where="this host's TPU")
    return _train_here(args, slice_)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    exclusive = [("simulate", "tpu"), ("simulate", "dry_run")]
    exclusive += [("tune", other) for other in ("restarts", "steps", "check")]
    exclusive += [("check", other) for other in (["dry_run"] if args.check == "config" else ["steps", "restarts"])]
    for one, other in exclusive:
        if getattr(args, one) and getattr(args, other):
            level = f" {args.check}" if one == "check" else ""
            raise UserError(f"--{one}{level} and --{other.replace('_', '-')} exclude each other: give one of them")


def _scaled(args: argparse.Namespace, slice_: slices.Slice) -> list[str]:
    from launch import scaling

    found = scaling.bindings(args.experiment, slice_name=slice_.name, scale_from=args.scale_from, given=args.gin)
    print(f"as on {args.scale_from}, with the same rows for each device: {', '.join(found)}", flush=True)
    return [*args.gin, *found]


def _refuse_unused(args: argparse.Namespace, read: Sequence[str]) -> None:
    words = ("target", "experiment", *read)
    if unused := [f"--{name.replace('_', '-')}" for name, value in vars(args).items() if value and name not in words]:
        command = " ".join(filter(None, (args.target, args.experiment, args.simulate and "--simulate")))
        raise UserError(f"launch/pod.sh {command} does not use {', '.join(unused)} (see launch/pod.sh --help)")


def _of_a_run(args: argparse.Namespace) -> int:
    from core.training import profile_request
    from launch.hosts import logs

    _refuse_unused(args, ("steps", "seconds") if args.target == "profile" else ())
    if args.experiment is None:
        raise UserError("profile of which run? launch/pod.sh profile RUN --seconds 5 (its run directory)")
    if args.target == "logs":
        return logs.show(args.experiment)
    if args.target == "tensorboard":
        return _become(["tensorboard", args.experiment])
    return profile_request.request(args.experiment, steps=args.steps, seconds=args.seconds)


def _of_a_tpu(args: argparse.Namespace) -> int:
    _refuse_unused(args, _READ_BY[args.target])
    needs_slice = args.target in ("create", "queue")
    tpus = gcloud.find_tpus(args.tpu, args.zone, args.project)
    if not tpus or (args.experiment is not None) != needs_slice:
        words = f"{args.target} SLICE" if needs_slice else args.target
        raise UserError(f"expected: launch/pod.sh {words} --tpu NAME --zone ZONE (or TPU_NAME and TPU_ZONE)")
    if args.target in workstation.ACTIONS:
        return workstation.act(tpus, action=args.target, log_directory=args.run_dir, dry_run=args.dry_run)
    is_queued = args.queued if args.target == "delete" else args.target == "queue"
    slice_ = slices.require_tpu(args.experiment, what="create and queue") if needs_slice else None
    if slice_:
        workstation.require_one_for_each(tpus, slice_)
    order = lifecycle.Order(slice_, args.spot, is_queued)
    return lifecycle.act(tpus, action=args.target, order=order, dry_run=args.dry_run)


def _simulate(args: argparse.Namespace, slice_: slices.Slice) -> int:
    run_directory = os.fspath(paths.resolve(_run_directory(args, slice_)))
    checked = _checked(args, slice_, run_directory=run_directory, hosts="simulated")
    if _is_finished(args, checked, run_directory):
        return 0
    options = ["--run-dir", run_directory, *flags.passed_on(args, "--gin", "--steps", "--check", "--tune")]
    command = [*environment.COMMAND, "train", args.experiment, "--slice", slice_.name, *options]
    here = run_directory
    if paths.is_remote(run_directory):
        here = environment.run_directory(args.experiment, slice_.name, level=args.check, environ={})
    logs = Path(here) / "logs"
    xla_flags = checked.experiment.simulation_xla_flags if checked.experiment else ""
    simulate.announce(slice_, logs)
    return _supervised(
        lambda requested: simulate.run(
            slice_, command=command, log_directory=logs, requested=requested, xla_flags=xla_flags
        ),
        run_directory=run_directory,
        restarts=args.restarts,
    )


def _train_here(args: argparse.Namespace, slice_: slices.Slice) -> int:
    if slice_.generation == "cpu":
        os.environ |= environment.ON_CPUS | os.environ
    options = flags.passed_on(args, "--gin", "--run-dir", "--steps", "--check", "--tune")
    arguments = ["train", args.experiment, "--slice", slice_.name, *options]
    if not args.restarts and not environment.read("RENGA_ALERT"):
        return _become(arguments)
    return _supervised(
        lambda requested: supervise.run_child([*environment.COMMAND, *arguments], requested),
        run_directory=_run_directory(args, slice_),
        restarts=args.restarts,
        host=tpu_host.own_index(slice_),
    )


def _supervised(
    attempt: Callable[[list[int]], int], *, run_directory: str, restarts: int, host: int | None = None
) -> int:
    with alerts.watching(run_directory, host=host) as report, supervise.stop_requests() as requested:

        def told() -> int:
            code = attempt(requested)
            if not requested:
                report(code)
            return code

        return supervise.supervise(
            told, restarts=restarts, newest_step=lambda: supervise.newest_step(run_directory), requested=requested
        )


def _from_workstation(args: argparse.Namespace, slice_: slices.Slice, tpus: Sequence[gcloud.Tpu]) -> int:
    run_directory = _run_directory(args, slice_)
    if args.restarts and not paths.is_remote(run_directory):
        raise UserError(
            f"--restarts with the run directory {run_directory}: a recreated TPU has empty disks, so there "
            "would be no checkpoint to resume from. Give --run-dir gs://BUCKET/…"
        )
    directory = args.run_dir or _from_workspace(run_directory)
    _require_kept(directory)
    experiment = workstation.shipped_path(args.experiment, workspace=environment.WORKSPACE)
    sent = environment.sent()
    if sent.left_out:
        print(f"# XLA_FLAGS that are not for TPUs are not sent to the hosts: {' '.join(sent.left_out)}")
    where = "dry run" if args.dry_run else "shipped to"
    checked = _checked(args, slice_, run_directory=run_directory, hosts=where)
    for finding in checked.findings:
        if finding.is_note:
            print(f"# {finding.title}: {finding.detail}")
    # A local directory with this name is not the one on the hosts.
    is_shared = not args.dry_run and paths.is_remote(run_directory)
    if is_shared and _is_finished(args, checked, run_directory, is_elsewhere=True):
        return 0
    options = flags.passed_on(args, "--gin", "--steps", "--check", "--tune", *(["--restarts"] if args.restarts else []))
    variables = [f"{name}={value}" for name, value in sent.variables.items()]
    job = workstation.Run([slice_.name, experiment, *options], directory, variables)

    def start() -> int:
        return workstation.start(tpus, slice_=slice_, run=job, workspace=environment.WORKSPACE, dry_run=args.dry_run)

    code = start()
    if code or args.dry_run or not args.restarts:
        return code
    print("Watching the TPU; it is recreated if it is preempted. Ctrl-C ends only the watch, not the run.", flush=True)
    with supervise.stop_requests() as requested:
        order = lifecycle.Order(slice_.single, args.spot, args.queued)
        watch = lifecycle.Watch(tpus=tpus, order=order, start=start, requested=requested)
        return watch.run(restarts=args.restarts, newest_step=lambda: supervise.newest_step(run_directory))


def _checked(args: argparse.Namespace, slice_: slices.Slice, *, run_directory: str, hosts: str) -> preflight.Checked:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from launch.check import preflight

    return preflight.require(
        args.experiment,
        bindings=args.gin,
        slice_name=slice_.name,
        run_dir=run_directory,
        smoked=args.check == "smoke",
        tuned=args.tune,
        hosts=hosts,
    )


def _is_finished(
    args: argparse.Namespace, checked: preflight.Checked, run_directory: str, *, is_elsewhere: bool = False
) -> bool:
    from launch.runs import continuation

    if args.check or args.tune:
        return False
    assert checked.config is not None
    assert checked.experiment is not None
    return continuation.has_ended(
        run_directory, checked.config, checked.experiment.spans(), steps=args.steps, is_elsewhere=is_elsewhere
    )


def _run_directory(args: argparse.Namespace, slice_: slices.Slice) -> str:
    return args.run_dir or environment.run_directory(args.experiment, slice_.name, level=args.check)


def _from_workspace(directory: str) -> str:
    """Returns a directory inside the workspace relative to it: the hosts' workspace is at another path."""
    path = Path(directory)
    return str(path.relative_to(environment.WORKSPACE)) if path.is_relative_to(environment.WORKSPACE) else directory


def _require_kept(directory: str) -> None:
    """Raises UserError if the next start would delete a run directory of a host together with the shipped workspace."""
    path = posixpath.normpath(directory) + "/"
    inside = posixpath.normpath(path.removeprefix(workstation.HOME))
    is_inside = path.startswith(workstation.HOME) or not path.startswith(("/", "~", "../"))
    if "://" not in directory and is_inside and inside.partition("/")[0] != workstation.KEPT:
        raise UserError(
            f"--run-dir {directory}: this is in the shipped workspace, which each start replaces, except for "
            f"{workstation.KEPT}/. Give --run-dir gs://BUCKET/…, {workstation.KEPT}/NAME or a directory outside"
        )


def _become(arguments: list[str]) -> int:
    """Replaces this process, so that the command receives its signals and sets the exit code."""
    sys.stdout.flush()
    os.execv(environment.COMMAND[0], [*environment.COMMAND, *arguments])


def _no_place(slice_: slices.Slice, experiment: str, place: tpu_host.Place) -> str:
    looked_at = "\n".join(f"  {line}" for line in place.looked_at)
    return f"""nowhere to run {slice_.name} from here. There are three ways:
  on a host of a TPU slice   launch/pod.sh {slice_.name} {experiment}        (the same on every host)
  from a workstation         launch/pod.sh {slice_.name} {experiment} --tpu NAME --zone ZONE [--project P]
  simulated on this machine  launch/pod.sh {slice_.name} {experiment} --simulate
This is no TPU host, and names no TPU:
{looked_at}
  environment: TPU_NAME is not set"""
