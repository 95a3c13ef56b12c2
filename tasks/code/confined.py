"""Runs one untrusted Python program in a process that can only compute. Run as a script, by `sandbox.run`.

The process limits its own time and memory, and then gives up, for good, every system call that is not on a list
(seccomp, `man 2 seccomp`). What is left can compute, read files, and write to one pipe. It cannot create a process or a
thread, send a signal, open a socket, or create, write, rename or remove a file; such calls fail with EPERM.

On stdin: JSON with `code`, `token` and the limits. On stdout: READY before the code starts, then the token if it ran to
its end, else the name of its error. The module imports the standard library alone, because it is started once for each
program.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

READY = b"+"
SYSTEM = ("Linux", "x86_64")  # numbers of system calls differ on others
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
_OPENAT, _FLAGS = 257, 2  # openat(folder, path, flags, mode): with no flag that writes
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JMP|JSET|K, RET|K
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER, _SET_PDEATHSIG = 38, 22, 2, 1


def _program() -> bytes:
    """Returns the filter, in instructions of the Berkeley packet filter: (code, jump if true, if false, operand)."""
    numbers = sorted(_ALLOWED.values())
    steps = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _REFUSE)]
    steps += [(_LOAD, 0, 0, _NUMBER_AT), (_EQUAL, 0, 3, _OPENAT)]
    flags = _ARGUMENTS_AT + 8 * _FLAGS  # its lower half: the flags are 32 bits
    steps += [(_LOAD, 0, 0, flags), (_ANY_BIT, len(numbers) + 1, 0, _WRITES), (_RETURN, 0, 0, _ALLOW)]
    for left, number in enumerate(numbers):
        steps.append((_EQUAL, len(numbers) - left, 0, number))
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _confine() -> None:
    """Gives up all system calls but those of the filter. Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = ctypes.create_string_buffer(_program())

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    steps = Filter(len(program.raw) // 8, ctypes.cast(program, ctypes.c_void_p))
    for call in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(steps), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "prctl")


def _limit(*, seconds: float, memory_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)  # ends with its parent
    limits = {resource.RLIMIT_CPU: int(seconds) + 1, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0}
    limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 64}
    for name, most in limits.items():
        resource.setrlimit(name, (most, most))


def main() -> None:
    """Reads the program, confines this process, runs the program, and reports how it ended."""
    given = json.load(sys.stdin)
    answer = os.dup(1)
    empty = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(empty, stream)
    if (platform.system(), platform.machine()) != SYSTEM:
        raise SystemExit(f"needs {' on '.join(SYSTEM)}")
    _limit(seconds=given["seconds"], memory_bytes=given["memory_bytes"])
    _confine()
    os.write(answer, READY)
    try:
        exec(given["code"], {"__name__": "__main__"})
        said = given["token"]
    except BaseException as error:
        said = type(error).__name__
    os.write(answer, said.encode()[:200])
    os._exit(0)


if __name__ == "__main__":
    main()
