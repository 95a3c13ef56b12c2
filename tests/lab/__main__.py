"""`tests/run.sh lab COMMAND …`: test equipment for developers. Nothing of the product imports it."""

import importlib
import os
import sys
from collections.abc import Sequence

from core.hosts import exit_codes
from launch import __main__ as cli
from parallel.compiled.hlo import messages

COMMANDS = (
    "accelerator",
    "accelerator_packages",
    "accelerator_page",
    "bench",
    "failures",
    "folder_memory",
    "fuzz",
    "generation",
    "golden",
    "lm_eval_scores",
    "long_context",
    "long_range",
    "mutants",
    "peers",
    "pictures",
    "published",
    "recording",
    "reference",
    "schedules",
    "seqio_tasks",
    "soak",
    "status",
    "surroundings",
    "tokens",
    "without",
)


def main(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code, as `launch.__main__.main` does."""
    return cli.main(argv, command=_command)


def _command(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("\n".join(["tests/run.sh lab COMMAND …", *map(_overview, COMMANDS)]))
        return exit_codes.USER_ERROR if argv else exit_codes.DONE
    name, *rest = argv
    if name in ("golden", "long_context", "published"):  # before jax is imported: it compiles for TPUs without one
        os.environ.update(messages.AUDIBLE_WARNINGS, JAX_PLATFORMS="cpu")
    return cli.run_command(f"tests.lab.{name}", rest, program=f"tests/run.sh lab {name}")


def _overview(name: str) -> str:
    return f"  {name:<{max(map(len, COMMANDS))}}  {importlib.import_module(f'tests.lab.{name}').HELP}"


if __name__ == "__main__":
    cli.end_process(main(sys.argv[1:]))
