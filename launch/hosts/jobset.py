"""Builds the JobSet manifest with which GKE starts a process on every host of every slice, and restarts them.

One replicated job has a child job for each slice, with a pod for each host. In each pod, GKE sets the environment
variables (TPU_WORKER_ID, MEGASCALE_…) from which JAX finds the other hosts. An exit code for which a restart cannot
help fails the whole set at once; any other restarts the set from the last checkpoint.

Fields: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 and
https://cloud.google.com/kubernetes-engine/docs/how-to/tpus.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core import slices
from core.errors import UserError
from core.files import paths
from core.hosts import exit_codes
from core.slices import Slice
from launch import environment, flags
from launch.config import loader

COMMAND = ("runs", "jobset")
HELP = "write the JobSet with which GKE runs an experiment on a slice"
EXAMPLE = "launch/run jobset v4-32 gin/valkyrie_7b.gin --image IMAGE --run-dir gs://bucket/first --out job.json"

# Node labels of GKE by generation.
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5p": "tpu-v5p-slice",
    "v5e": "tpu-v5-lite-podslice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
PORTS = (8471, 8080)  # of libtpu between hosts, and of Megascale between slices
_CONTAINER = "train"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def manifest(
    name: str, slice_: Slice, *, image: str, arguments: Sequence[str], restarts: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the JobSet of a run.

    Every pod runs `launch/pod.sh` with `arguments` in `image`, whose working directory is the workspace, set up.

    Args:
      name: name of the JobSet.
      slice_: the slice.
      image: the container image.
      arguments: those of launch/pod.sh.
      restarts: restarts of the whole set.
      environment: variables of the containers.

    Raises:
      UserError: `name` is not allowed by Kubernetes.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name {name!r}: expected up to 40 lower-case letters, digits and dashes, beginning with a letter"
        )
    chips = {"google.com/tpu": slice_.chips_per_host}
    container = {
        "name": _CONTAINER,
        "image": image,
        "command": ["launch/pod.sh", *arguments],
        "ports": [{"containerPort": port} for port in PORTS],
        "resources": {"limits": chips, "requests": chips},
        "env": [{"name": name, "value": value} for name, value in environment.items()],
    }
    failed = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": restarts, "rules": [failed]},
            "replicatedJobs": [
                {"name": "slice", "replicas": slice_.num_slices, "template": {"spec": _job(slice_, container)}}
            ],
        },
    }


def _job(slice_: Slice, container: dict[str, Any]) -> dict[str, Any]:
    """Returns the job of one slice: a pod with the container on each of its hosts."""
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,  # to save a checkpoint when a node is drained
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[slice_.generation],
            "cloud.google.com/gke-tpu-topology": slice_.topology_name,
        },
        "containers": [container],
    }
    final = sorted(code for code, end in exit_codes.ENDINGS.items() if not end.restart and code != exit_codes.DONE)
    on_final = {"containerName": _CONTAINER, "operator": "In", "values": final}
    return {
        "backoffLimit": 0,  # a failed pod fails its job, and the rules of the set say what happens then
        "completionMode": "Indexed",
        "completions": slice_.single.hosts,
        "parallelism": slice_.single.hosts,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_final}]},
        "template": {"spec": pod},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin")
    flags.add(parser, "--run-dir", metavar="gs://…")
    parser.add_argument("--image", required=True, help="a container image whose working directory is this workspace")
    restarts = "restarts of the whole set, with or without new checkpoints (default: 1000)"
    flags.add(parser, "--restarts", default=1000, help=restarts)
    parser.add_argument("--name", help="name of the JobSet (default: the experiment's)")
    out = "file to write (default: standard output)"
    parser.add_argument("--out", **flags.OUTPUT, help=out)
    flags.add(parser, "--overwrite")


def run(args: argparse.Namespace) -> int:
    """Writes the manifest as JSON, which kubectl accepts like YAML."""
    slice_ = slices.require_tpu(args.slice, what="JobSets")
    run_dir = args.run_dir or environment.run_directory(args.experiment, slice_.name)
    if not paths.is_remote(run_dir):
        raise UserError(f"the run directory {run_dir} would be deleted with its pod: give --run-dir gs://BUCKET/…")
    loader.load(args.experiment, bindings=args.gin, slice_name=slice_.name).build()  # mistakes before any pod
    made = manifest(
        args.name or Path(args.experiment).stem.replace("_", "-").lower(),
        slice_,
        image=args.image,
        arguments=[slice_.name, args.experiment, "--run-dir", run_dir, *flags.passed_on(args, "--gin")],
        restarts=args.restarts,
        environment={name: value for name in environment.SENT if (value := environment.read(name))},
    )
    text = json.dumps(made, indent=2)
    if args.out:
        args.out.write_text(text + "\n")
    print(f"kubectl apply -f {args.out}" if args.out else text)
    return 0
