"""A compile process: it turns descriptions of kernels into machine code, with a low priority and within limits.

The compile server forks it (`server`). It keeps no fd except its connection to the worker and the standard streams, of
which stderr is a file with its log, which the server reads when the process has died. It exits when the connection
hangs up; a thread waits for that, because the main thread is busy in LLVM. It exits as well when the server sends
SIGUSR1, after the part of a model that it compiles: then another client has its turn.

Its private memory is limited to what it has when it begins and $NNFMQ_COMPILE_MEMORY_MIB (RLIMIT_DATA), its CPU time
for each part to $NNFMQ_COMPILE_TIME_S (RLIMIT_CPU). If an allocation fails, Python raises and LLVM aborts: its last
words tell. Each result has what the process has taken, with which the worker charges the client.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import resource
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from nnfmq.base import settings
from nnfmq.base.channel import NO_WAIT, Channel
from nnfmq.base.limits import data_bytes, limit_softly
from nnfmq.base.processes import allowed_cpus
from nnfmq.base.sandbox.sandbox import enter
from nnfmq.base.scheduling import lower_priority
from nnfmq.base.threads import Thread
from nnfmq.driver.process.sandboxes import compile_sandbox
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    MissedDeadlineTransient,
    NnfmqError,
    ResourceExhaustedTransient,
    status_for_error,
)

__all__ = [
    "END_SIGNAL",
    "OUT_OF_MEMORY",
    "QUEUED",
    "READY",
    "TURN_IS_OVER",
    "CompileProcess",
    "CompileResult",
    "describe_death",
    "error_of_death",
    "processes_max",
    "set_session_priority",
]


# ----------------------------------------------------------------------------------------------------------------------
# The CPU priority of compile processes: below that of the workers, whose executions they would delay otherwise.
#
# A process lowers its priority before it compiles, and keeps it: raising it again needs CAP_SYS_NICE. The kernel weighs
# processes by their nice value within one scheduling group. With autogroups (CONFIG_SCHED_AUTOGROUP) each session is a
# group of its own, and the groups are weighed by values of their own; so the compile server sets that of its session as
# the processes in it need it, and takes it back when none is left: it has to answer, and to exit, as soon as the
# driver. See docs/explanation/scheduling.md for the values.


_NICE_MAX = 19
_PROC = Path("/proc")


def set_session_priority(nicer: int) -> bool:
    """Make this process's session so much nicer than its parent's; return False if a later call may.

    Every user may change the value back. For users without CAP_SYS_ADMIN the kernel changes one session in 0.1 s.
    """
    try:
        parent = (_PROC / str(os.getppid()) / "autogroup").read_text()  # empty if that exits
        (_PROC / "self" / "autogroup").write_text(str(min(int(parent.rpartition(" ")[2] or 0) + nicer, _NICE_MAX)))
    except OSError as error:  # a kernel without autogroups, or a sandbox
        return error.errno != errno.EAGAIN
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The process.


QUEUED, READY = b"queued", b"ready"
END_SIGNAL: Final = signal.SIGUSR1
_ANONYMOUS = re.compile(rb"^RssAnon:\s*(\d+) kB$", re.MULTILINE)
_log = logging.getLogger("nnfmq.compiler")


class CompileResult(msgspec.Struct, frozen=True, array_like=True):
    """Reply of a compile process. `codes` is each kernel's object code if `status` is NONE; else `message` tells why.

    `memory_bytes` is how much the process's memory has grown since it began.
    """

    status: ErrorStatus
    message: str = ""
    codes: tuple[bytes, ...] = ()
    memory_bytes: int = 0


class CompileProcess:
    """Compiles the descriptions that arrive at `fd`, one after the other. Takes ownership of `fd`.

    It is forked with END_SIGNAL blocked.
    """

    def __init__(self, fd: int, is_background: bool) -> None:
        self._channel = Channel.adopt(fd)
        self._is_background = is_background
        self._is_compiling = self._is_told_to_end = False
        self._begin_bytes = 0

    def run(self) -> None:
        """Compile until the worker closes the connection, or the server tells the process to end.

        The worker sends the parts that it has not got back to another process.
        """
        lower_priority(self._is_background)
        enter(compile_sandbox())
        Thread(target=self._exit_with_worker, daemon=True).start()
        self._begin_bytes = _memory_bytes()
        _limit_memory()
        signal.signal(END_SIGNAL, self._on_end_signal)
        with suppress(DeadObject, MissedDeadlineTransient):
            self._channel.send(READY)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [END_SIGNAL])  # in this thread only: it waits for descriptions
            while True:
                with self._channel.receive() as frame:
                    self._is_compiling = True
                    _limit_time()
                    reply = self._compile(frame.data)
                    self._is_compiling = False  # the send may wait for the worker, and the result be lost
                    self._channel.send(reply, (), NO_WAIT if self._is_told_to_end else None)
                    if self._is_told_to_end:
                        return

    def _compile(self, description: bytearray) -> bytes:
        result = compile_description(description)
        return msgspec.msgpack.encode(msgspec.structs.replace(result, memory_bytes=_memory_bytes() - self._begin_bytes))

    def _on_end_signal(self, _number: int, _frame: object) -> None:
        if self._is_compiling:
            self._is_told_to_end = True
        else:
            os._exit(0)

    def _exit_with_worker(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), 0)  # no events: poll(2) reports POLLHUP and POLLERR in any case
        poll.poll()
        os._exit(0)


def compile_description(description: bytearray) -> CompileResult:
    """Return the object code of the kernels that a description has, or the error."""
    from nnfmq.engines.compiled.code_generator import compile_kernels
    from nnfmq.engines.compiled.kernel_compilation import decode_kernels

    try:
        kernels, target = decode_kernels(description)
        return CompileResult(ErrorStatus.NONE, codes=tuple(compile_kernels([kernel], target) for kernel in kernels))
    except (MemoryError, SystemError):  # a C function that could not allocate may return without an exception
        _end_memory_limit()  # for what follows
        return CompileResult(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, _memory_text())
    except NnfmqError as error:
        return CompileResult(status_for_error(error), str(error))
    except Exception as error:  # noqa: BLE001  errors of LLVM too: they fail one model
        _log.exception("compiling failed")
        return CompileResult(ErrorStatus.GENERAL_FAILURE, f"compiling failed: {error!r}")


# ----------------------------------------------------------------------------------------------------------------------
# Its limits, and what its end says about them.


TURN_IS_OVER = "0"
"""What the server reports of a process that has exited of its own, or that was stopped: another one may go on."""
OUT_OF_MEMORY = "memory"
"""What the server reports, in place of an exit status, of a process that could not allocate."""
_LAST_WORDS_WITHOUT_MEMORY = (
    b"bad_alloc",
    b"out of memory",
    b"Allocation failed",
    b"MemoryError",
    b"Cannot recover from stack overflow",  # CPython, if there is no memory for the exception either
)


def processes_max() -> int:
    """Return how many compile processes of one driver run at a time."""
    return settings.COMPILE_PROCESSES.value() or allowed_cpus()


def _limit_memory() -> None:
    """Limit this process's private memory to what it has, and the setting."""
    limit_softly(resource.RLIMIT_DATA, data_bytes() + (settings.COMPILE_MEMORY_MIB.value() << 20))


def _end_memory_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _limit_time() -> None:
    """Limit the CPU time of this process to what it has used, and the setting. SIGXCPU ends it then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + settings.COMPILE_TIME_S.value()
    limit_softly(resource.RLIMIT_CPU, limit)


def _memory_bytes() -> int:
    """Return the memory of this process that is no file's, also what it still shares with the server."""
    found = _ANONYMOUS.search(Path("/proc/self/status").read_bytes())
    return int(found[1]) << 10 if found is not None else 0


def _memory_text() -> str:
    limit, setting = settings.COMPILE_MEMORY_MIB.value(), settings.COMPILE_MEMORY_MIB.variable
    return (
        f"there is not enough memory to compile the model: a process that compiles may take {limit} MiB, "
        f"the limit that ${setting} of the driver sets"
    )


def _time_text() -> str:
    limit, setting = settings.COMPILE_TIME_S.value(), settings.COMPILE_TIME_S.variable
    return (
        f"a part of the model takes more than {limit} s of CPU time to compile, the limit that ${setting} of the "
        "driver sets"
    )


def describe_death(status: int, last_words: bytes) -> str:
    """Return the server's report of a process that has ended: its status as text, or OUT_OF_MEMORY."""
    is_without_memory = status != 0 and any(words in last_words for words in _LAST_WORDS_WITHOUT_MEMORY)
    return OUT_OF_MEMORY if is_without_memory else str(status)


def error_of_death(description: str) -> NnfmqError:
    """Return the error for a process that has ended as the server described; an empty text: it did not."""
    if description == OUT_OF_MEMORY:
        return ResourceExhaustedTransient(_memory_text())
    if description == str(-signal.SIGXCPU):
        return ResourceExhaustedTransient(_time_text())
    return GeneralFailure(f"the process that compiled the model {_describe_exit(description)}; prepare it again")


def _describe_exit(status: str) -> str:
    if not status:
        return "has ended"
    if not status.startswith("-"):
        return f"ended with status {status}"
    number = -int(status)
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"was ended by {name}{' (is there enough memory?)' if name in ('SIGKILL', 'SIGABRT') else ''}"
