"""What the documents promise about errors: which class each mistake raises, and what the classes derive from."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import places
from support.drivers import LIMIT_S, InThread, Process, until
from support.models import add_model, null_model
from support.stateful_models import stream

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.queue import MessageQueue
from nnfmq.queue.event_flag import EventFlag

ONE, FOUR = np.ones(1, np.float32), np.ones(4, np.float32)
GUIDE = (places.ROOT / "docs/how-to/handle-errors.md").read_text(encoding="utf-8")


@pytest.fixture
def model(shared_client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    with shared_client.device("reference").prepare(null_model()) as made:
        yield made


def test_each_error_of_the_guide_exists_and_derives_from_what_it_says() -> None:
    rows = [line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row) if name[0].isupper()}
    assert names >= {"InvalidArgument", "BadState", "ModelNotFound", "DeviceUnavailable", "DeadObject"}
    for name in names:
        assert issubclass(getattr(nnfmq, name), nnfmq.NnfmqError)
        assert issubclass(getattr(nnfmq, name), (nnfmq.HalError, nnfmq.TransportError))
    assert issubclass(nnfmq.ModelNotFound, nnfmq.InvalidArgument)
    assert issubclass(nnfmq.BadState, nnfmq.InvalidArgument)
    assert issubclass(nnfmq.InvalidArgument, ValueError)
    assert issubclass(nnfmq.MissedDeadline, TimeoutError)
    assert issubclass(nnfmq.DeadObject, ConnectionError)


# ------------------------------------------------------------------------------------------------ closed objects

MODEL_CALLS: dict[str, Callable[[Any], Any]] = {
    "call": lambda model: model(ONE),
    "execute": lambda model: model.execute(ONE),
    "execute_async": lambda model: model.execute_async(ONE).result(LIMIT_S),
    "execute_fenced": lambda model: model.execute_fenced(ONE),
    "create_reusable_execution": lambda model: model.create_reusable_execution(),
    "create_execution": lambda model: model.create_execution(),
    "burst": lambda model: model.burst(),
    "burst_pool": lambda model: model.burst_pool(1),
    "request_burst": lambda model: model.request_burst(),
    "aidl_burst": lambda model: model.aidl_burst(),
    "run": lambda model: nnfmq.run(model, ONE),
}
CLIENT_CALLS: dict[str, Callable[[Any], Any]] = {
    "devices": lambda client: client.devices(),
    "device": lambda client: client.device("reference"),
    "prepare": lambda client: client.prepare(null_model()),
    "statistics": lambda client: client.statistics(),
    "set_device_status": lambda client: client.set_device_status("reference", "available"),
}
DEVICE_CALLS: dict[str, Callable[[Any], Any]] = {
    "prepare": lambda device: device.prepare(null_model()),
    "capabilities": lambda device: device.capabilities(),
    "supported_operations": lambda device: device.supported_operations(null_model()),
}


@pytest.mark.parametrize("call", MODEL_CALLS.values(), ids=MODEL_CALLS)
def test_a_closed_model_is_a_bad_state(model: nnfmq.PreparedModel, call: Callable[[Any], Any]) -> None:
    model.close()
    with pytest.raises(nnfmq.BadState, match="this prepared model is closed"):
        call(model)


def test_a_closed_client_is_a_bad_state_for_everything_that_it_made() -> None:
    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(embedded=True))
        device = client.device("reference")
        model = stack.enter_context(device.prepare(null_model()))
        burst = stack.enter_context(model.burst())
        pool = stack.enter_context(model.burst_pool(1))
        execution = stack.enter_context(model.create_reusable_execution())
        client.close()
        calls: list[tuple[Callable[[Any], Any], Any]] = [
            *((call, client) for call in CLIENT_CALLS.values()),
            *((call, device) for call in DEVICE_CALLS.values()),
            *((call, model) for name, call in MODEL_CALLS.items() if name != "create_execution"),  # it calls no driver
            (lambda burst: burst.execute(ONE), burst),
            (lambda burst: asyncio.run(burst.execute_async(ONE)), burst),
            (lambda pool: pool.execute(ONE), pool),
            (lambda execution: execution.compute(ONE), execution),
        ]
        for call, target in calls:
            with pytest.raises(nnfmq.BadState, match="this client is closed"):
                call(target)


CLOSABLE: dict[str, tuple[Callable[[Any], Any], list[Callable[[Any], Any]]]] = {
    "burst": (
        lambda model: model.burst(),
        [lambda burst: burst.execute(ONE), lambda burst: asyncio.run(burst.execute_async(ONE))],
    ),
    "burst_pool": (lambda model: model.burst_pool(1), [lambda pool: pool.execute(ONE), lambda pool: pool.acquire()]),
    "execution": (
        lambda model: model.create_reusable_execution(),
        [lambda execution: execution.compute(ONE), lambda execution: execution.compute_fenced(ONE)],
    ),
    "buffer": (
        lambda model: nnfmq.allocate(inputs=[(model, 0)]),
        [lambda buffer: buffer.copy_from(ONE), lambda buffer: buffer.array()],
    ),
    "memory": (lambda model: Memory.create(16), [lambda memory: memory.view, lambda memory: memory.fileno()]),
    "fence": (
        lambda model: nnfmq.Fence.create(),
        [lambda fence: fence.wait(0), lambda fence: fence.fileno()],
    ),
    "fenced execution": (lambda model: model.execute_fenced(ONE), [lambda fenced: fenced.result(LIMIT_S)]),
    "fenced execution, awaited": (lambda model: model.execute_fenced(ONE), [lambda fenced: fenced.wait()]),
    "runtime": (
        lambda model: nnfmq.Runtime([]),
        [
            lambda runtime: runtime.devices(),
            lambda runtime: runtime.device("reference"),
            lambda runtime: runtime.prepare(null_model()),
            lambda runtime: runtime.plan(null_model()),
            lambda runtime: runtime.supported_operations(null_model(), ["reference"]),
            lambda runtime: runtime.cpu.prepare(null_model()),
        ],
    ),
    "request burst": (lambda model: model.request_burst(), [lambda burst: burst.execute(ONE)]),
    "queue": (
        lambda model: MessageQueue.create(8, 4),
        [
            lambda queue: queue.send(bytes(8)),
            lambda queue: queue.receive(0, 0),
            lambda queue: queue.receive_into(bytearray(8), 0, 0),
            lambda queue: queue.counters(),
            lambda queue: queue.begin_write(1),
            lambda queue: queue.begin_read(1),
            lambda queue: asyncio.run(queue.receive_async(0)),
            lambda queue: queue.write(bytes(8)),
            lambda queue: queue.read(1),
            lambda queue: queue.available_to_read(),
        ],
    ),
    "event flag": (
        lambda model: EventFlag.from_buffer(memoryview(bytearray(8)), 0),
        [lambda flag: flag.wait(1, 0), lambda flag: flag.wake(1)],
    ),
}


@pytest.mark.parametrize(("make", "calls"), CLOSABLE.values(), ids=CLOSABLE)
def test_a_closed_object_is_a_bad_state(
    model: nnfmq.PreparedModel, make: Callable[[Any], Any], calls: list[Callable[[Any], Any]]
) -> None:
    made = make(model)
    made.close()
    made.close()
    for call in calls:
        with pytest.raises(nnfmq.BadState, match="closed"):
            call(made)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda _device, model, _burst: model.execute(ONE), nnfmq.DeadObject),
        (lambda _device, model, _burst: model.execute_async(ONE).result(LIMIT_S), nnfmq.DeadObject),
        (lambda _device, _model, burst: burst.execute(ONE), nnfmq.DeadObject),
        (lambda device, *_: device.prepare(null_model()), nnfmq.BadState),
        (lambda device, *_: device.capabilities(), nnfmq.BadState),
    ],
    ids=["execute", "execute_async", "burst", "prepare", "capabilities"],
)
def test_closing_the_client_in_another_thread_ends_a_call_that_waits(
    call: Callable[..., Any], error: type[nnfmq.NnfmqError]
) -> None:
    with nnfmq.connect(embedded=True) as client, Process(client.worker_pid) as worker:
        device = client.device("reference")
        with device.prepare(null_model()) as model, model.burst() as burst:
            worker.stop()
            waiting = InThread.start(lambda: call(device, model, burst))
            waiting.wait_until_asleep()
            closing = InThread.start(client.close)
            assert type(waiting.wait().error) is error
            with suppress(ProcessLookupError):
                worker.resume()  # otherwise the driver waits for it for two seconds
            closing.wait()


# ------------------------------------------------------------------------------------------------ other promises


def test_no_driver_is_device_unavailable_at_connect_and_in_a_task(tmp_path: Path) -> None:
    async def main() -> None:
        async with nnfmq.connect(tmp_path / "none.sock"):
            pass

    with pytest.raises(nnfmq.DeviceUnavailable, match=r"none\.sock"):
        nnfmq.connect(tmp_path / "none.sock")
    with pytest.raises(nnfmq.DeviceUnavailable, match=r"none\.sock"):
        asyncio.run(main())


def test_the_error_says_how_to_start_the_driver_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.sock"
    with pytest.raises(nnfmq.DeviceUnavailable, match=f"at {path}: .*: start one with `nnfmq serve --socket {path}`"):
        nnfmq.connect(path)
    path.write_text("a file")
    with pytest.raises(nnfmq.DeviceUnavailable, match="which is no socket: give the one of `nnfmq serve`"):
        nnfmq.connect(path)


def test_an_output_that_there_is_not_is_an_index_error(model: nnfmq.PreparedModel) -> None:
    with pytest.raises(IndexError, match="there is no output 3; the model has 1 output: "):
        _ = model.execute(ONE)[3]


@pytest.mark.parametrize(
    "call",
    [
        lambda: nnfmq.read_photo("photo.jpg", nnfmq.example_path("digits.tflite")),  # type: ignore[arg-type]
        lambda: nnfmq.read_audio("word.wav", "digits.tflite"),  # type: ignore[arg-type]
        lambda: nnfmq.top_classes(FOUR, "digits.tflite"),  # type: ignore[arg-type]
    ],
    ids=["photo", "recording", "classes"],
)
def test_a_path_in_place_of_a_model_is_invalid_with_what_to_give(call: Callable[[], Any]) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"(Path|str).*nnfmq\.load"):
        call()


def test_a_device_that_is_busy_is_unavailable(shared_client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    shared_client.set_device_status("reference", "busy")
    try:
        with pytest.raises(nnfmq.DeviceUnavailable):
            model(ONE)
    finally:
        shared_client.set_device_status("reference", "AVAILABLE")
    assert model(ONE)[0] == 1
    with pytest.raises(nnfmq.InvalidArgument, match=r"status 'bussy': allowed are .*did you mean 'busy'"):
        shared_client.set_device_status("reference", "bussy")  # type: ignore[arg-type]


def test_a_timeout_that_has_passed_is_a_missed_deadline(model: nnfmq.PreparedModel) -> None:
    with pytest.raises(nnfmq.MissedDeadline):
        model.execute(ONE, timeout=0)
    with model.burst() as burst, pytest.raises(nnfmq.MissedDeadline):
        burst.execute(ONE, timeout=0)


@pytest.mark.parametrize("timeout", ["1", -1, float("nan"), [1]])
def test_a_timeout_that_is_none_is_invalid(model: nnfmq.PreparedModel, timeout: Any) -> None:
    said = "a timeout is 0 or more seconds, or None for no limit; got "
    with model.burst() as burst:
        for call in (model, model.execute, model.execute_async, burst.execute):
            with pytest.raises(nnfmq.InvalidArgument, match=said):
                call(ONE, timeout=timeout)
    with pytest.raises(nnfmq.InvalidArgument, match=said):
        nnfmq.connect(timeout=timeout)


def test_a_second_run_is_a_bad_state(shared_client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    with (
        nnfmq.Fence.create() as fence,
        model.create_reusable_execution() as execution,
        execution.compute_fenced(ONE, wait_for=[fence]) as launched,
    ):
        with pytest.raises(nnfmq.BadState, match="this execution is running; one run at a time"):
            execution.compute(ONE)
        fence.signal()
        assert launched.result(LIMIT_S)[0] == 1
    with model.create_execution() as once:
        once.compute(ONE)
        with pytest.raises(nnfmq.BadState, match="was computed and is not reusable; see create_reusable_execution"):
            once.compute(ONE)
    with shared_client.device("reference").prepare(stream()) as stateful:
        zeros = np.zeros(stateful.inputs[0].shape, np.float32)
        with pytest.raises(nnfmq.InvalidArgument, match=r"the model has \d states?; only synchronous calls"):
            stateful.execute_async(zeros)


def test_the_death_of_the_driver_is_a_dead_object_and_a_reason_to_connect_again() -> None:
    with (
        nnfmq.connect(embedded=True, recover=False) as client,
        client.device("reference").prepare(null_model()) as model,
    ):
        os.kill(client.driver_pid, signal.SIGKILL)
        until(lambda: not client.connection.is_open, "the client knows")
        with pytest.raises(nnfmq.DeadObject):
            model(ONE)
        with pytest.raises(nnfmq.DeadObject):
            client.devices()


def test_a_burst_has_no_durations_before_the_first_execution(model: nnfmq.PreparedModel) -> None:
    with model.burst() as burst, pytest.raises(nnfmq.GeneralFailure, match="nothing was executed on this burst yet"):
        _ = burst.last


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((FOUR,), r"the model has 2 inputs \('input 0', 'input 1'\); 1 was given"),
        ((), r"the model has 2 inputs \('input 0', 'input 1'\); 0 were given"),
        ((FOUR, [1, 2, 3]), "input 'input 1' has shape 4; the given array has 3"),
        ((FOUR, None), "input 'input 1' holds float32; the given value is a NoneType: give an array of the shape 4"),
        ((FOUR, "photo.jpg"), "the given value is a str: give an array of the shape 4"),
        ((FOUR, Path("photo.jpg")), "the given value is a Posix"),
        ((FOUR, [[1], [2, 3]]), "input 'input 1' is no array"),
        (
            (FOUR, FOUR + 1j),
            r"holds float32; the given array is complex64: convert it, as by array\.astype\('float32'\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_invalid_with_what_is_allowed(
    shared_client: nnfmq.Client, given: Any, said: str
) -> None:
    with shared_client.device("reference").prepare(add_model()) as model:
        with pytest.raises(nnfmq.InvalidArgument, match=said):
            model.execute(*given)
        assert model.execute([1, 2, 3, 4], FOUR.astype(np.float64))[0].tolist() == [2, 3, 4, 5]
