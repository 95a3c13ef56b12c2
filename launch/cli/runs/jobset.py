"""`launch/run jobset`: writes the JobSet manifest with which GKE starts and restarts a run on all hosts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from core import paths, slices
from core.errors import UserError
from launch import environment
from launch.cli import flags
from launch.hosts import jobset

HELP = "write the JobSet with which GKE runs an experiment on a slice"
EXAMPLE = "launch/run jobset v4-32 gin/valkyrie_7b.gin --image IMAGE --run-dir gs://bucket/first --out job.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "SLICE", "EXPERIMENT.gin", "--gin")
    flags.add(parser, "--run-dir", metavar="gs://…")
    parser.add_argument("--image", required=True, help="a container image whose working directory is this workspace")
    restarts = "restarts of the whole set, with a new checkpoint or without (default: 1000)"
    flags.add(parser, "--restarts", default=1000, help=restarts)
    parser.add_argument("--name", help="name of the JobSet (default: the experiment's)")
    out = "file to write (default: standard output)"
    parser.add_argument("--out", metavar="FILE", type=flags.output_file, help=out)


def run(args: argparse.Namespace) -> int:
    """Writes the manifest as JSON, which kubectl accepts like YAML."""
    slice_, experiment = slices.get(args.slice), Path(args.experiment)
    if not experiment.is_file():
        raise UserError(f"no such experiment file: {experiment}")
    run_dir = args.run_dir or environment.run_directory(experiment)
    if not paths.is_remote(run_dir):
        raise UserError(f"the run directory {run_dir} would go with its pod: give --run-dir gs://BUCKET/…")
    manifest = jobset.manifest(
        args.name or experiment.stem.replace("_", "-").lower(),
        slice_,
        image=args.image,
        arguments=[slice_.name, args.experiment, "--run-dir", run_dir, *flags.passed_on(args, "--gin")],
        restarts=args.restarts,
        environment={name: value for name in environment.SENT if (value := environment.read(name))},
    )
    text = json.dumps(manifest, indent=2)
    if args.out:
        args.out.write_text(text + "\n")
    print(f"kubectl apply -f {args.out}" if args.out else text)
    return 0
