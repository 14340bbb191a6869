"""A client process of a crash test: `python -m nnfmq.mlts.crash_client`. The task comes on stdin, see `crash_messages`.

It exits with status 0 once it has reported, whatever the result, and when stdin is closed, because the runner is gone
then. Core files are disabled, because some clients crash on purpose.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import numpy as np

from nnfmq.hal.errors import DeadObject, NnfmqError
from nnfmq.mlts.crash_context import WorkloadContext
from nnfmq.mlts.crash_list import Workload
from nnfmq.mlts.crash_messages import ClientMessage, ClientState, decode_task, encode
from nnfmq.mlts.crash_workloads import run_workload
from nnfmq.mlts.stress_models import inputs_for, open_model

_SELF_TEST_PAUSE_S = 0.2

Send = Callable[[ClientMessage], None]


def run_client(context: WorkloadContext, send: Send) -> None:
    """Report that the client is ready, run its workload, and report the result. Blocks."""
    send(ClientMessage(ClientState.READY, worker_pid=context.client.worker_pid))
    try:
        if (self_test := _SELF_TESTS.get(context.task.workload)) is not None:
            self_test(context)
        else:
            run_workload(context)
    except DeadObject as error:
        send(ClientMessage(ClientState.DRIVER_DIED, str(error), codes=context.codes))
    except Exception as error:  # noqa: BLE001  whatever a workload raises is the result
        reason = f"{type(error).__name__}: {error}"
        send(ClientMessage(ClientState.FAILURE, reason, codes=context.codes))
    else:
        send(ClientMessage(ClientState.SUCCESS, codes=context.codes))


# ------------------------------------------------------------------------------------------------ self-tests


class _NullPointer:
    """An array in the first page, at address 8; NumPy accepts no 0."""

    __array_interface__ = {"version": 3, "shape": (1,), "typestr": "|u1", "data": (8, False)}  # noqa: RUF012


def _write_to_null(_context: WorkloadContext) -> None:
    np.asarray(_NullPointer())[0] = 1


def _fail(_context: WorkloadContext) -> None:
    raise NnfmqError("this client fails on purpose")


def _hang(_context: WorkloadContext) -> None:
    threading.Event().wait()


def _signal_worker_and_execute(number: signal.Signals) -> Callable[[WorkloadContext], None]:
    def run(context: WorkloadContext) -> None:
        device = context.device() if context.task.device else None
        with context.prepare(device, open_model(context.task.models[0])) as prepared, prepared.burst() as burst:
            os.kill(context.client.worker_pid, number)
            while not context.is_over:
                burst.execute(*inputs_for(prepared))

    return run


def _crash_worker_without_a_call(context: WorkloadContext) -> None:
    """Crash the worker, and report success without another call."""
    time.sleep(_SELF_TEST_PAUSE_S)
    os.kill(context.client.worker_pid, signal.SIGSEGV)
    while not context.is_over:
        context.pause()


_SELF_TESTS: dict[Workload, Callable[[WorkloadContext], None]] = {
    Workload.NO_OP: lambda _context: None,
    Workload.FAIL: _fail,
    Workload.HANG: _hang,
    Workload.NULL_POINTER: _write_to_null,
    Workload.STOP_DRIVER: _signal_worker_and_execute(signal.SIGSTOP),
    Workload.CRASH_DRIVER: _signal_worker_and_execute(signal.SIGSEGV),
    Workload.CRASH_DRIVER_UNSEEN: _crash_worker_without_a_call,
}


# ------------------------------------------------------------------------------------------------ the process


def _main(requests: IO[bytes], sink: IO[bytes]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lock = threading.Lock()

    def send(message: ClientMessage) -> None:
        with lock:
            sink.write(encode(message))
            sink.flush()

    task = decode_task(requests.readline())
    threading.Thread(target=_exit_with_runner, args=(requests,), daemon=True).start()
    if task.kill_after_s is not None:
        threading.Timer(task.kill_after_s, _kill_this_process, (send,)).start()
    try:
        context = WorkloadContext.open(task)
    except (NnfmqError, OSError) as error:
        send(ClientMessage(ClientState.FAILURE, f"{type(error).__name__}: {error}"))
        return
    run_client(context, send)
    os._exit(0)  # threads of a workload that failed may still be in calls


def _exit_with_runner(requests: IO[bytes]) -> None:
    requests.read()
    os._exit(1)


def _kill_this_process(send: Send) -> None:
    send(ClientMessage(ClientState.KILLING))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the runner ends this process
    _main(sys.stdin.buffer, sys.stdout.buffer)
