"""DriverProcess: a driver (`nnfmq serve`) that this process owns: started, watched by its pidfd, and started again.

The driver exits with this process, however that ends (`--exit-with`). If the driver dies, another one starts at the
same socket immediately, so that clients that recover find it there; after a second death within a few seconds with a
pause that grows up to 1 s. One thread watches; it sleeps in poll(2) until something happens.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Self

from msgspec import Struct

from nnfmq.base.deadlines import deadline_after, has_passed, remaining_ms, remaining_s
from nnfmq.base.ownership import Uncopyable
from nnfmq.base.processes import kill_and_reap
from nnfmq.base.threads import Thread
from nnfmq.hal.errors import DeviceUnavailable, MissedDeadlineTransient

__all__ = ["DriverPhase", "DriverProcess", "DriverState"]

_START_S = 60.0
_STOP_S = 10.0
_STABLE_S = 5.0  # a driver that ran as long as this is started again without a pause
_PAUSES_S = (0.0, 0.05, 0.2, 1.0)  # before a start, after that many deaths of drivers that ran shorter
_log = logging.getLogger("nnfmq.serving")


class DriverPhase(Enum):
    """The phase of an owned driver."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"


class DriverState(Struct, frozen=True):
    """The state of an owned driver. `pid` is 0 unless it runs; `starts` counts its processes, this one included."""

    phase: DriverPhase
    socket: str
    pid: int = 0
    starts: int = 0
    reason: str = ""
    """Why the last process before this one ended; empty if there was none."""


class DriverProcess(Uncopyable):
    """A driver at `socket`, which serves the models of the directory `models`. Close it, or use `with`. Thread-safe.

    `options` are further ones of `nnfmq serve`, and `environment` is added to that of this process. The driver's log
    goes to this process's stderr.
    """

    def __init__(
        self,
        socket: Path,
        models: Path | None = None,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        model_options = [] if models is None else ["--models", str(models)]
        end = ["--exit-with", str(os.getpid())]
        self._command = [
            *(sys.executable, "-P", "-m", "nnfmq", "serve", "--socket", str(socket)), *model_options, *options, *end,
        ]  # fmt: skip
        self._environment = dict(environment or {})
        self._changed = threading.Condition()
        self._state = DriverState(DriverPhase.STARTING, str(socket))
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        # With its signals unblocked: the driver inherits the mask of the thread that starts it, and must get SIGTERM.
        self._thread = Thread(target=self._watch, name="nnfmq-driver-watch", daemon=True)
        self._thread.start()

    @property
    def state(self) -> DriverState:
        """The state of the driver."""
        return self._state

    def wait_until_running(self, timeout: float | None = _START_S) -> DriverState:
        """Return the state once the driver accepts clients; blocks.

        Raises:
            DeviceUnavailable: If this object is closed.
            MissedDeadlineTransient: If the timeout passes; the message says why the last driver ended.
        """
        deadline_ns = deadline_after(timeout)
        with self._changed:
            while self._state.phase is DriverPhase.STARTING:
                if not self._changed.wait(remaining_s(deadline_ns)) and has_passed(deadline_ns):
                    raise MissedDeadlineTransient(f"the driver did not start in time: {self._state}")
            if self._state.phase is DriverPhase.STOPPED:
                raise DeviceUnavailable("this driver was stopped")
            return self._state

    def close(self) -> None:
        """End the driver; blocks until it has exited, at most some seconds. Idempotent."""
        if self._stop_fd >= 0:
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()
            fd, self._stop_fd = self._stop_fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        early_deaths = 0
        try:
            while not self._wait([], _PAUSES_S[min(early_deaths, len(_PAUSES_S) - 1)]):
                begin_s = time.monotonic()
                reason = self._run_once()
                if reason is None:
                    return
                early_deaths = 0 if time.monotonic() - begin_s >= _STABLE_S else early_deaths + 1
                _log.error("the driver has ended: %s; another one is started", reason)
                self._set(DriverPhase.STARTING, pid=0, reason=reason)
        finally:
            self._set(DriverPhase.STOPPED, pid=0, reason=self._state.reason)

    def _run_once(self) -> str | None:
        """Run one driver until it exits; return why it did, None because this object is closed."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={**os.environ, **self._environment},
            )
        except OSError as error:
            return f"it cannot be started: {error}"
        pidfd = os.pidfd_open(process.pid)
        try:
            return self._follow(process, pidfd)
        finally:
            os.close(pidfd)
            kill_and_reap(process)
            assert process.stdout is not None
            process.stdout.close()

    def _follow(self, process: subprocess.Popen[bytes], pidfd: int) -> str | None:
        assert process.stdout is not None
        self._set(DriverPhase.STARTING, starts=self._state.starts + 1)
        ready = self._wait([process.stdout.fileno(), pidfd], _START_S)
        if process.stdout.fileno() in ready and b"listening" in process.stdout.readline():
            self._set(DriverPhase.RUNNING, pid=process.pid)
            ready = self._wait([pidfd], None)
        elif not ready:
            return f"it did not accept clients within {_START_S:g} s"
        if self._stop_fd not in ready:
            return _exit_text(process.wait()) if self._poll([pidfd], _STOP_S) else "it closed its output and stayed"
        process.send_signal(signal.SIGTERM)
        self._poll([pidfd], _STOP_S)
        return None

    def _wait(self, fds: Sequence[int], timeout: float | None) -> set[int]:
        """Wait until one of `fds` is readable or this object is closed. Return those that are; none after a timeout."""
        return self._poll([*fds, self._stop_fd], timeout)

    def _poll(self, fds: Sequence[int], timeout: float | None) -> set[int]:
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(remaining_ms(deadline_after(timeout)))}

    def _set(
        self, phase: DriverPhase, *, pid: int | None = None, starts: int | None = None, reason: str | None = None
    ) -> None:
        with self._changed:
            old = self._state
            self._state = DriverState(
                phase,
                old.socket,
                old.pid if pid is None else pid,
                old.starts if starts is None else starts,
                old.reason if reason is None else reason,
            )
            self._changed.notify_all()


def _exit_text(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
