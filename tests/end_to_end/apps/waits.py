"""An application that waits for its driver in the given call, prints that it waits, and never returns.

waits.py SOCKET burst|preparation|compilation|execution|computation|fenced|copy|copies|buffers|large|nothing: prints the
driver's pid, reads a line, begins, prints "waiting".
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from support.drivers import one, until, wait_until_waiting
from support.models import logistics_model, null_model, relu_model, slow_model
from support.small_models import with_constants

import nnfmq
from nnfmq.hal.types import ExecutionPreference, Model

client = nnfmq.connect(sys.argv[1])
device = client.device("reference")
model = device.prepare(null_model())
burst = model.burst(polling_window_us=0)
burst.execute(one(1))
slow = device.prepare(slow_model()) if sys.argv[2] == "computation" else model
wide = device.prepare(relu_model((1 << 22,))) if sys.argv[2] == "copies" else model
buffers = [device.allocate(inputs=[(each, 0)], outputs=[(each, 0)]) for each in (model, model, wide)]
buffers[0].copy_from(one(1))


def copies() -> None:
    """Copy 16 MiB, again and again."""
    with nnfmq.Memory.create(1 << 24) as memory:
        while True:
            buffers[2].copy_from(memory)


def prepare_large_models() -> None:
    """Prepare a model with 256 MiB of constants, again and again."""
    with nnfmq.Memory.create(256 << 20) as memory:
        memory.view[:] = bytes(len(memory.view))
        while True:
            device.prepare(with_constants(memory)).close()


def when_called() -> None:
    """Print that a call over the control channel is pending."""
    until(lambda: bool(client._connection._pending_calls), "a call is open")
    print("waiting", flush=True)


def when_in_burst() -> None:
    """Print that the main thread waits for a result."""
    wait_until_waiting(burst)
    print("waiting", flush=True)


def when_fenced() -> None:
    """Print that an execution in the driver waits for the application's fence."""
    until(lambda: bool(launched), "it is launched")
    print("waiting", flush=True)


launched: list[nnfmq.FencedExecution[Any]] = []


def wait_for_a_fence_of_our_own() -> None:
    """Launch two executions, the second of which waits for the first, and never signal the fence of the first."""
    own = nnfmq.Fence.create()
    first = model.execute_fenced(one(2), wait_for=[own])
    launched.append(model.execute_fenced(one(3), wait_for=[first.fence, own]))
    launched[0].wait()


def compiled(model: Model) -> nnfmq.PreparedModel:
    """Prepare a model so that the reply is sent after its compilation."""
    return client.device("compiled").prepare(model, preference=ExecutionPreference.SUSTAINED_SPEED)


WAITS: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {
    "burst": (lambda: burst.execute(one(2)), when_in_burst),
    "preparation": (lambda: device.prepare(null_model()), when_called),
    "compilation": (lambda: compiled(logistics_model(1200)), when_called),
    "execution": (lambda: model.execute(one(2)), when_called),
    "computation": (lambda: slow.execute(np.zeros(slow.inputs[0].shape, np.float32)), when_called),
    "copy": (lambda: buffers[0].copy_from(one(2)), when_called),
    "copies": (copies, when_called),
    "buffers": (lambda: model.execute(buffers[0], out=[buffers[1]]), when_called),
    "fenced": (wait_for_a_fence_of_our_own, when_fenced),
    "large": (prepare_large_models, when_called),
    "nothing": (signal.pause, lambda: print("waiting", flush=True)),
}

wait, announce = WAITS[sys.argv[2]]
print(client.worker_pid, flush=True)
sys.stdin.readline()
threading.Thread(target=announce).start()
wait()
