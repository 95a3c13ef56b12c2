"""Runs one untrusted Python program in a confined process; `sandbox.run` runs this module as a script.

The process limits its CPU time and memory. Then it irrevocably gives up opening files other than those of Python, its
installed packages and the system's libraries (Landlock, `man 7 landlock`). It also gives up all system calls that are
not on a list (seccomp, `man 2 seccomp`). It cannot create a process or a thread, send a signal, open a socket, or
create, write, rename or remove a file. It can see by `stat` which files exist.

stdin has a line of JSON with `code` and the limits, then a token. The process writes READY to stdout before the program
starts, then the token if it ran to its end, otherwise the name of its error. A program that means to deceive can read
the token from the pipe itself. If the process cannot be confined, it writes the reason instead of READY.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from typing import NoReturn

READY = b"+"
SYSTEM = ("Linux", "x86_64")  # system call numbers differ on other systems
_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_ALLOWED = {  # system calls of x86-64 by name
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9, "mprotect": 10,
    "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "readv": 19,
    "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39, "exit": 60,
    "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "arch_prctl": 158, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262,
    "readlinkat": 267, "faccessat": 269, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
_OPENAT, _FLAGS = 257, 2  # openat(folder, path, flags, mode) is allowed without flags that write
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JMP|JSET|K, RET|K
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER, _SET_PDEATHSIG = 38, 22, 2, 1
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_BENEATH = 444, 445, 446, 1  # Landlock
_ALL_ACCESS, _READ_FILE, _READ_FOLDER = 2**13 - 1, 4, 8  # rights of version 1: to execute, read, write, make and remove
_SYSTEM_FILES = ("/usr/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")


def _program() -> bytes:
    """Returns the seccomp filter: packed BPF instructions, each (code, jump if true, jump if false, operand)."""
    numbers = sorted(_ALLOWED.values())
    steps = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _REFUSE)]
    steps += [(_LOAD, 0, 0, _NUMBER_AT), (_EQUAL, 0, 3, _OPENAT)]
    flags = _ARGUMENTS_AT + 8 * _FLAGS  # the lower half of the argument: the flags have 32 bits
    steps += [(_LOAD, 0, 0, flags), (_ANY_BIT, len(numbers) + 1, 0, _WRITES), (_RETURN, 0, 0, _ALLOW)]
    for left, number in enumerate(numbers):
        steps.append((_EQUAL, len(numbers) - left, 0, number))
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _confine() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    program = ctypes.create_string_buffer(_program())

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    steps = Filter(len(program.raw) // 8, ctypes.cast(program, ctypes.c_void_p))
    _checked(libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _restrict_reading(libc)
    _checked(libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(steps), 0, 0), "seccomp")


def _restrict_reading(libc: ctypes.CDLL) -> None:
    handled = ctypes.c_uint64(_ALL_ACCESS)
    rules = _checked(libc.syscall(_CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0), "Landlock")
    packages = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for path in (f"{sys.base_prefix}/lib", *packages, *_SYSTEM_FILES):
        if not os.path.exists(path):  # noqa: PTH110 (pathlib takes long to import)
            continue
        access = _READ_FILE | _READ_FOLDER if os.path.isdir(path) else _READ_FILE  # noqa: PTH112
        at = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, at))
        _checked(libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0), f"Landlock, {path}")
        os.close(at)
    _checked(libc.syscall(_RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _limit(*, seconds: float, memory_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)  # ends this process with its parent
    limits = {resource.RLIMIT_CPU: int(seconds) + 1, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0}
    limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 64}
    for name, most in limits.items():
        resource.setrlimit(name, (most, most))


def main() -> NoReturn:
    """Reads the program, confines this process, runs the program, and reports how it ended."""
    with os.fdopen(0, "rb", buffering=0, closefd=False) as pipe:
        given = json.loads(pipe.readline())  # unbuffered, because a buffer would hold the token
    answer, token_pipe = os.dup(1), os.dup(0)
    empty = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(empty, stream)
    try:
        if (platform.system(), platform.machine()) != SYSTEM:
            raise OSError(f"this is {platform.system()} on {platform.machine()}")
        _limit(seconds=given["seconds"], memory_bytes=given["memory_bytes"])
        _confine()
    except (OSError, ValueError) as error:
        os.write(answer, str(error).encode()[:200])
        os._exit(1)
    os.write(answer, READY)
    said = _run(given["code"]).encode() or os.read(token_pipe, 200)
    os.write(answer, said[:200])
    os._exit(0)


def _run(code: str) -> str:
    """Runs a program; returns "", or the name of the nearest builtin class of the error that ended it."""
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException as error:
        return next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
    return ""


if __name__ == "__main__":
    main()
