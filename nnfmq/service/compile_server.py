"""The compile server and its compile processes, in which models become machine code.

LLVM compiles slowly, one lock of llvmlite serializes all threads, and a failure inside LLVM ends the process. So models
are compiled in other processes than the worker. The worker forks a compile server first of all, while it has one thread
and no data of its client. The server forks a compile process for each job, which takes milliseconds, because everything
is imported already, or is imported on PREFETCH. (A new interpreter would import for as long as a small model takes to
compile.) Only file descriptors and kernel descriptions are sent:

    worker -> server    PREFETCH             import the compiler now: a compilation will follow
    worker -> server    FORK and 2 fds       the process's end of a connection; a pipe for its exit status
    worker -> process   description          kernels as data; the next one follows the reply
    process -> worker   CompileResult        object code, or an error

The server and its processes run in a separate session (setsid), and keep no fd except their connection and the
standard streams. They exit when the worker does, because their connections hang up then; in a compile process a thread
waits for that, since the main thread is busy in LLVM. The server waits for its processes and writes the exit status of
each to its pipe. `compile_jobs` decides what is compiled where.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
from contextlib import suppress
from typing import NoReturn

import msgspec

from nnfmq.channel import NO_WAIT, Channel, Frame
from nnfmq.hal.errors import DeadObject, ErrorStatus, MissedDeadlineTransient, NnfmqError, status_for_error

__all__ = ["FORK", "PREFETCH", "CompileResult", "fork_compile_server"]

PREFETCH, FORK = b"prefetch", b"fork"
_BUG_STATUS = 70
_OOM_SCORE_ADJ = "500"  # of 1000: if memory runs out, the kernel kills a compile process before a client's worker
_log = logging.getLogger("nnfmq.compiler")


class CompileResult(msgspec.Struct, frozen=True, array_like=True):
    """Reply of a compile process. `code` is object code if `status` is NONE; else `message` describes the error."""

    status: ErrorStatus
    message: str = ""
    code: bytes = b""


def fork_compile_server() -> Channel | None:
    """Fork a compile server and return the connection to it, which the caller owns. The server exits when it closes.

    Returns None if the fork fails, or if this process has more than one thread: the child of a fork would inherit locks
    that other threads hold.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        _log.warning("no compile server: this process has several threads already")
        return None
    local, remote = Channel.pair()
    fd = remote.detach()
    try:
        if os.fork() == 0:
            _run_and_exit(_Server, fd)
    except OSError as error:
        local.close()
        _log.warning("no compile server: %s", error.strerror)
        return None
    finally:
        os.close(fd)
    return local


def _run_and_exit(kind: type[_Server] | type[_CompileProcess], fd: int) -> NoReturn:
    """Run a server or a compile process on the connection `fd` until it closes, then exit. Never returns."""
    status = _BUG_STATUS
    try:
        _close_other_fds(fd)
        kind(Channel.adopt(fd)).run()
    except DeadObject:
        status = 0
    except BaseException:  # noqa: BLE001  the last frame of this process
        _log.critical("an internal error of the compiler ends this process", exc_info=True)
    finally:
        os._exit(status)  # no exit handlers: they are the worker's


def _close_other_fds(fd: int) -> None:
    """Close all fds that the fork copied, except `fd` and the standard streams.

    Garbage collection is disabled first: finalizers of inherited objects would close these fds a second time.
    """
    gc.disable()
    gc.freeze()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != fd:
            with suppress(OSError):  # the fd of the directory that was listed is closed already
                os.close(int(name))


class _Server:
    """Forks a compile process for each FORK message, and reports its exit status."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._processes: dict[int, tuple[int, int]] = {}  # pidfd → (pid, fd of the status pipe)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def run(self) -> None:
        """Serve until the worker exits; raises DeadObject then."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._processes:
                    self._reap(fd)
                else:
                    self._serve()

    def _serve(self) -> None:
        with suppress(MissedDeadlineTransient), self._channel.receive(NO_WAIT) as frame:
            from nnfmq.engines.compiled.kernel_serialization import warm_up

            warm_up()
            if frame.data == FORK and not frame.fds_truncated:  # else the worker sees its end of the connection hang up
                self._fork(frame)

    def _fork(self, frame: Frame) -> None:
        connection, status_pipe = frame.fds
        try:
            pid = os.fork()
        except OSError as error:
            _log.warning("no compile process: %s", error.strerror)
            return
        if pid == 0:
            _run_and_exit(_CompileProcess, connection)
        pidfd = os.pidfd_open(pid)
        frame.fds = [connection]  # the frame closes this one; the pipe stays open until the process exits
        self._processes[pidfd] = (pid, status_pipe)
        self._poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        pid, status_pipe = self._processes.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):  # the worker no longer needs the status
            os.write(status_pipe, str(exit_code).encode())
        os.close(status_pipe)


class _CompileProcess:
    """Compiles the descriptions that it receives, one after the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def run(self) -> None:
        """Compile until the worker closes the connection; raises DeadObject then, or exits during a compilation."""
        threading.Thread(target=self._exit_with_worker, daemon=True).start()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(_OOM_SCORE_ADJ)
        while True:
            with self._channel.receive() as frame:
                self._channel.send(msgspec.msgpack.encode(_compile(frame.data)))

    def _exit_with_worker(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), 0)  # no events: poll(2) reports POLLHUP and POLLERR in any case
        poll.poll()
        os._exit(0)


def _compile(description: bytearray) -> CompileResult:
    from nnfmq.engines.compiled.jit import compile_kernels
    from nnfmq.engines.compiled.kernel_serialization import decode_kernels

    try:
        return CompileResult(ErrorStatus.NONE, code=compile_kernels(*decode_kernels(description)))
    except MemoryError:
        text = "there is not enough memory to compile the model"
        return CompileResult(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)
    except NnfmqError as error:
        return CompileResult(status_for_error(error), str(error))
    except Exception as error:  # noqa: BLE001  errors of LLVM too: they fail one model
        _log.exception("compiling failed")
        return CompileResult(ErrorStatus.GENERAL_FAILURE, f"compiling failed: {error!r}")
