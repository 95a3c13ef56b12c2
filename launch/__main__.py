"""`python -m launch COMMAND …`: imports the module of one command and runs it.

A command's module has `COMMAND` (its family and name) and `HELP`, each on one line, `EXAMPLE`, `add_arguments(parser)`
and `run(args) -> int`. docs/reference/exit-codes.md lists the exit codes.
"""

import argparse
import difflib
import importlib
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from typing import NoReturn

from core.errors import UnreachableError, UserError
from core.hosts import exit_codes, heartbeat
from launch import environment, flags, terminal

FAMILIES = {
    "layouts": "Layouts: memory, traffic and agreement of strategies, plans and schedules.",
    "runs": "Runs: prepare, start, monitor and evaluate them.",
}


def commands() -> dict[str, str]:
    """Returns the modules of the commands, by command name."""
    return dict(sorted((name, module) for module, (_, name) in environment.declared("COMMAND").items()))


def main(argv: Sequence[str], *, command: Callable[[Sequence[str]], int] | None = None) -> int:
    """Runs one command line and returns the exit code.

    `command`: what runs it; None: the command that `argv` names.
    """
    try:
        code = (command or _command)(argv)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and terminal.is_reader_gone():
            code = 128 + signal.SIGPIPE
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # does not return once the process has joined a run
            code = exit_codes.RAISED
    terminal.flush()
    return code


def _command(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    name, *rest = flags.current(argv)
    modules = commands()
    if name not in modules:
        nearest = difflib.get_close_matches(name, modules, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {', '.join(modules)}"
        print(f"unknown command {name!r}: {hint}", file=sys.stderr)
        return exit_codes.USER_ERROR
    if environment.declared("COMMAND")[modules[name]][0] == "layouts":
        from parallel.compiled.hlo import messages

        # Set before jax is imported: these commands leave the chips to runs, and show the warnings of the TPU compiler.
        os.environ.update(messages.AUDIBLE_WARNINGS, JAX_PLATFORMS="cpu")
    program = "launch/pod.sh" if name == "pod" else f"launch/run {name}"
    return run_command(modules[name], rest, program=program)


def run_command(module: str, argv: Sequence[str], *, program: str) -> int:
    """Runs the command that a module defines, and returns its exit code.

    A UserError is printed, not raised.
    """
    try:
        command = importlib.import_module(module)
        args = parser(command, program).parse_args(argv)
        flags.require_free(args)
        return command.run(args)
    except UserError as error:
        terminal.print_traceback(error)
        print(terminal.wrapped("\n".join([f"error: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)
        code = exit_codes.UNREACHABLE if isinstance(error, UnreachableError) else exit_codes.USER_ERROR
        heartbeat.leave(code, f"error: {next(iter(str(error).splitlines()), '')}")
        return code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def parser(command: types.ModuleType, program: str) -> argparse.ArgumentParser:
    """Returns the parser of a command's module; `program` is its name in messages."""
    parser = _Parser(
        prog=program,
        description=command.HELP,
        epilog=f"example:\n  {command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return parser


def _overview() -> str:
    lines = ["launch/run COMMAND …   (launch/run COMMAND --help: options and an example)"]
    modules, helps = commands(), environment.declared("HELP")
    width = max(map(len, modules))
    for family, title in FAMILIES.items():
        own = [name for name, module in modules.items() if environment.declared("COMMAND")[module][0] == family]
        lines += ["", title, *(f"  {name:<{width}}  {helps[modules[name]]}" for name in own)]
    return "\n".join(lines)


def end_process(code: int) -> None:
    """Ends this process at once with a nonzero exit code; returns if it is 0."""
    sys.stderr.flush()
    if code:  # at once: on several hosts, a normal exit would wait for the others at JAX's exit barrier
        heartbeat.leave(code, exit_codes.ending(code).meaning)
        os._exit(code)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
