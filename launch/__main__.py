"""`python -m launch COMMAND …`: imports the module of one command and runs it.

A command's module has `COMMAND` (its family and name) and `HELP`, each on one line, `EXAMPLE`, `add_arguments(parser)`
and `run(args) -> int`. A `core.errors.UserError` is printed as its message alone, and the exit code is 2, or 19 if a
service that the command needs, such as storage, cannot be reached. After an unexpected exception, including a plain
ValueError, the traceback is printed, and the exit code is 13. 1 is a regular result of some commands, such as "these
checkpoints differ". docs/reference/exit-codes.md has all exit codes.
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
    """Returns the module of each command, by the command's name."""
    return dict(sorted((name, module) for module, (_, name) in environment.declared("COMMAND").items()))


def main(argv: Sequence[str], *, command: Callable[[Sequence[str]], int] | None = None) -> int:
    """Runs one command line with `command`, by default as launch/run does, and returns the exit code.

    If `command` raises an exception, the traceback is printed and the code is 13; if the reader of the output has
    closed the pipe, nothing is printed and the code is 141 (128 + SIGPIPE). In a process that has joined a run, any
    exception but that of a closed pipe ends the process.
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
    """Parses `argv` for the command in a module with HELP, EXAMPLE, add_arguments and run, and runs it.

    Returns the command's exit code. After a UserError, it prints the message and returns 2, or 19 if a service could
    not be reached; after Ctrl-C it returns 130. Other exceptions are left to the caller.
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
    """Reports an invalid command line as a UserError, without printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def parser(command: types.ModuleType, program: str) -> argparse.ArgumentParser:
    """Returns the parser for a command's module; `program` is the command's name in usage and error messages."""
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
    """Ends this process with a nonzero exit code at once; returns for 0, so that the interpreter exits normally."""
    sys.stderr.flush()
    if code:  # at once: on several hosts, a normal exit would wait for the others at JAX's exit barrier
        heartbeat.leave(code, exit_codes.ending(code).meaning)
        os._exit(code)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
