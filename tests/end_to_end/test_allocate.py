"""Tensors for models of different devices: shared memory is used instead of a managed buffer, and behaves the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, Process, running_daemon
from support.models import add_model, relu_model, unsized_relu_model

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.types import Protection

FOUR, SUM = np.array([1, 2, 3, 4], np.float32), [2, 4, 6, 8]


Make = Callable[[Daemon, ExitStack, Path], tuple[nnfmq.PreparedModel, nnfmq.PreparedModel]]


def of_two_devices(daemon: Daemon, stack: ExitStack, _folder: Path) -> tuple[nnfmq.PreparedModel, nnfmq.PreparedModel]:
    client = stack.enter_context(daemon.connect())
    return prepared(client, stack), prepared(client, stack, "sample-float_fast")


def of_two_drivers(daemon: Daemon, stack: ExitStack, _folder: Path) -> tuple[nnfmq.PreparedModel, nnfmq.PreparedModel]:
    other = stack.enter_context(nnfmq.connect(embedded=True))
    return prepared(stack.enter_context(daemon.connect()), stack), prepared(other, stack)


def over_an_interface_without_buffers(
    daemon: Daemon, stack: ExitStack, _folder: Path
) -> tuple[nnfmq.PreparedModel, nnfmq.PreparedModel]:
    client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface="HIDL 1.2"))
    return prepared(client, stack), prepared(client, stack)


def prepared(
    client: nnfmq.Client, stack: ExitStack, device: str = "reference", shape: tuple[int, ...] = (4,)
) -> nnfmq.PreparedModel:
    return stack.enter_context(client.device(device).prepare(add_model(shape)))


REASONS: list[Make] = [of_two_devices, of_two_drivers, over_an_interface_without_buffers]


@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_DOM_15_shared_memory_is_used_if_no_single_device_can_hold_a_tensor(
    make: Make, daemon: Daemon, folder: Path, resources: ExitStack
) -> None:
    first, second = make(daemon, resources, folder)
    roles = [(first, 0), (second, 0)]
    with nnfmq.allocate(inputs=roles, outputs=roles) as one, nnfmq.allocate(inputs=roles, outputs=roles) as other:
        assert one.is_shared and other.is_shared
        assert one.dimensions is None
        with pytest.raises(nnfmq.GeneralFailure, match="uninitialized"):
            first.execute(one, FOUR)
        one.copy_from(FOUR)
        assert first.execute(one, FOUR, out=[other]) == (other,)  # 1 + 1
        assert other.array().tolist() == SUM
        assert second.execute(other, FOUR, out=[one]) == (one,)  # 2 + 1
        assert (one.array().tolist(), one.dimensions) == ([3, 6, 9, 12], (4,))
        assert second.execute(one, FOUR)[0].tolist() == [4, 8, 12, 16]


def test_DOM_15_shared_memory_is_used_if_the_driver_has_no_memory_left(folder: Path, resources: ExitStack) -> None:
    limit = {"NNFMQ_CLIENT_MEMORY_MIB": "6"}
    client = resources.enter_context(
        resources.enter_context(running_daemon(folder / "d.sock", environment=limit)).connect()
    )
    device = client.device("reference")
    model = resources.enter_context(device.prepare(relu_model((1 << 20,))))  # of 4 MiB
    assert not resources.enter_context(nnfmq.allocate(inputs=[(model, 0)])).is_shared
    with pytest.raises(nnfmq.ResourceExhausted):
        device.allocate(inputs=[(model, 0)])
    with nnfmq.allocate(inputs=[(model, 0)]) as buffer:
        assert buffer.is_shared
        buffer.copy_from(np.full(1 << 20, -1, np.float32))
        assert not np.any(buffer.array() + 1)


def test_DOM_15_a_device_that_can_hold_the_tensor_does(client: nnfmq.Client, resources: ExitStack) -> None:
    model = prepared(client, resources)
    with nnfmq.allocate(inputs=[(model, 0)], outputs=[(model, 0)]) as buffer, Process(client.worker_pid) as worker:
        assert not buffer.is_shared and buffer.token > 0
        before = worker.shared_mappings()
        buffer.copy_from(FOUR)
        model.execute(buffer, FOUR, out=[buffer_of(model, resources)])
        assert worker.shared_mappings() == before


def test_DOM_15_a_device_that_a_runtime_calls_otherwise_holds_the_tensor(resources: ExitStack) -> None:
    runtime = resources.enter_context(nnfmq.Runtime([]))
    model = resources.enter_context(runtime.prepare(add_model(), ["nnapi-reference"]))
    assert model.device == "nnapi-reference"  # which its driver calls "compiled" or "reference"
    with nnfmq.allocate(inputs=[(model, 0)], outputs=[(model, 0)]) as buffer:
        assert not buffer.is_shared
        buffer.copy_from(FOUR)
        assert model.execute(buffer, FOUR)[0].tolist() == SUM


def buffer_of(model: nnfmq.PreparedModel, resources: ExitStack) -> nnfmq.Buffer:
    return resources.enter_context(nnfmq.allocate(outputs=[(model, 0)]))


def test_DOM_15_a_caller_can_exclude_shared_memory(daemon: Daemon, resources: ExitStack) -> None:
    client = resources.enter_context(daemon.connect())
    first, second = prepared(client, resources), prepared(client, resources, "sample-float_fast")
    with pytest.raises(nnfmq.InvalidArgument, match="N-DOM-3"):
        client.device("reference").allocate(inputs=[(first, 0), (second, 0)])
    client.device("reference").allocate(inputs=[(first, 0)]).close()


def test_DOM_15_wrong_roles_raise_instead_of_falling_back(daemon: Daemon, resources: ExitStack) -> None:
    client = resources.enter_context(daemon.connect())
    first, second = prepared(client, resources), prepared(client, resources, "sample-float_fast")
    wide = prepared(client, resources, "sample-float_fast", (5,))
    wrong = {
        "N-DOM-1": {},
        "N-DOM-5": {"inputs": [(first, 2), (second, 0)]},
        "N-DOM-7": {"inputs": [(first, 0), (second, 0), (first, 0)]},
        "N-DOM-12": {"inputs": [(first, 0), (wide, 0)]},
    }
    for rule, roles in wrong.items():
        with pytest.raises(nnfmq.InvalidArgument, match=rule):
            nnfmq.allocate(**roles)
    with pytest.raises(nnfmq.InvalidArgument, match=r"DOM-1[24]"):
        nnfmq.allocate(inputs=[(first, 0), (second, 0)], dimensions=(5,))
    with pytest.raises(nnfmq.InvalidArgument):
        nnfmq.allocate(inputs=[(first, 0)], dimensions=(5,))
    nnfmq.allocate(inputs=[(first, 0), (second, 0)], dimensions=(4,)).close()


def test_DOM_15_shared_memory_has_a_fixed_shape(daemon: Daemon, resources: ExitStack) -> None:
    client = resources.enter_context(daemon.connect())
    models = [
        resources.enter_context(client.device(name).prepare(unsized_relu_model()))
        for name in ("reference", "sample-float_fast")
    ]
    roles = [(model, 0) for model in models]
    with pytest.raises(nnfmq.GeneralFailure, match="fixed shape"):
        nnfmq.allocate(outputs=roles)
    with nnfmq.allocate(outputs=roles, dimensions=(4,)) as buffer:
        models[0].execute(-FOUR, out=[buffer])
        assert buffer.array().tolist() == [0] * 4


def test_nothing_is_copied_to_memory_that_is_read_only(resources: ExitStack) -> None:
    source, target = (resources.enter_context(Memory.create(16)) for _ in range(2))
    reading = resources.enter_context(Memory.adopt(os.dup(target.fileno()), protection=Protection.READ))
    with pytest.raises(nnfmq.InvalidArgument, match="the memory to copy to is read-only"):
        nnfmq.copy(source, reading)


def test_N_RQX_12_a_driver_writes_nothing_to_memory_that_was_adopted_read_only(
    daemon: Daemon, resources: ExitStack
) -> None:
    client = resources.enter_context(daemon.connect())
    model = prepared(client, resources)
    target = resources.enter_context(Memory.create(16))
    reading = resources.enter_context(Memory.adopt(os.dup(target.fileno()), protection=Protection.READ))
    buffer = resources.enter_context(client.device("reference").allocate(inputs=[(model, 0)]))
    buffer.copy_from(FOUR)
    for copy in (lambda: buffer.copy_to(reading), lambda: nnfmq.copy(buffer, reading)):
        with pytest.raises(nnfmq.InvalidArgument, match="read-only"):
            copy()
    assert bytes(target.view) == bytes(16)
    buffer.copy_to(target)
    assert bytes(target.view) == FOUR.tobytes()


def test_DOM_15_shared_memory_is_validated_as_the_driver_validates_buffers(
    daemon: Daemon, resources: ExitStack
) -> None:
    client = resources.enter_context(daemon.connect())
    first, second = prepared(client, resources), prepared(client, resources, "sample-float_fast")
    with nnfmq.allocate(inputs=[(first, 0), (second, 1)], outputs=[(first, 0)]) as buffer, Memory.create(12) as short:
        buffer.copy_from(FOUR)
        for call in (lambda: second.execute(buffer, FOUR), lambda: second.execute(FOUR, FOUR, out=[buffer])):
            with pytest.raises(nnfmq.InvalidArgument, match="DOM-9"):
                call()
        for copy in (lambda: buffer.copy_to(short), lambda: nnfmq.copy(buffer, short)):
            with pytest.raises(nnfmq.InvalidArgument, match="16 bytes cannot be copied into 12"):
                copy()
        assert buffer.array().tolist() == FOUR.tolist()
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-13"):  # where it is read it is not written
            first.execute(buffer, FOUR, out=[buffer])
        with pytest.raises(nnfmq.GeneralFailure, match="uninitialized"):
            buffer.array()
        buffer.copy_from(FOUR)
        with pytest.raises(nnfmq.MissedDeadline):
            first.execute(FOUR, FOUR, out=[buffer], timeout=0)
        with pytest.raises(nnfmq.GeneralFailure, match="uninitialized"):
            first.execute(buffer, FOUR)
        with pytest.raises(nnfmq.InvalidArgument, match="DOM-12"):
            buffer.copy_from(short)
        first.execute(FOUR, FOUR, out=[buffer])
        assert second.execute(FOUR, buffer)[0].tolist() == [3, 6, 9, 12]
    with pytest.raises(nnfmq.InvalidArgument, match="closed"):
        buffer.copy_from(FOUR)
