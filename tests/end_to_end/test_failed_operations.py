"""Invalid arguments of operations, through a driver process: one execution fails, and the same client continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import LIMIT_S, Daemon, one
from support.executed import model_of
from support.models import null_model
from support.rejected_operations import CASES, F32, TWO, Argument, Op
from support.small_models import one_operation, with_main, with_operand

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.types import (
    DataLocation,
    LifeTime,
    Operand,
    OperandType,
    OperationType,
    Request,
    RequestArgument,
    is_scalar,
)

POOL_BYTES = 1 << 14
SOFTMAX = one_operation(Op.SOFTMAX, [replace(F32, dimensions=(1, 2)), Operand(OperandType.FLOAT32)], TWO)


@pytest.fixture(scope="module")
def client(shared_daemon: Daemon) -> Iterator[nnfmq.Client]:
    with shared_daemon.connect() as made:
        yield made


@pytest.fixture(scope="module")
def device(client: nnfmq.Client) -> nnfmq.Device:
    return client.device("reference")


@pytest.fixture(autouse=True)
def goes_on(client: nnfmq.Client, device: nnfmq.Device) -> Iterator[None]:
    """After each test the same process executes a valid request of the same client."""
    worker = client.worker_pid
    yield
    with device.prepare(null_model()) as model:
        assert model.execute(one(7), timeout=LIMIT_S)[0] == one(7)
    assert client.worker_pid == worker


def execute(
    device: nnfmq.Device, code: OperationType, arguments: list[Argument], outputs: list[Operand], *, unknown: bool
) -> None:
    """Prepare a model of one operation and execute it; with `unknown` all shapes and scalars come with the request."""
    given = [(replace(o, dimensions=() if is_scalar(o.type) or unknown else a.shape), a) for o, a in arguments]
    constants = [] if unknown else [i for i, (operand, _) in enumerate(given) if is_scalar(operand.type)]
    model = model_of(code, given, [replace(output, dimensions=()) for output in outputs], constants)
    inputs = [(operand, array) for i, (operand, array) in enumerate(given) if i not in constants]
    with Memory.create(POOL_BYTES) as source, Memory.create(POOL_BYTES) as sink:
        places, end = [], 0
        for operand, array in inputs:
            dimensions = () if is_scalar(operand.type) else array.shape
            length = max(array.nbytes, 1)
            source.view[end : end + array.nbytes] = array.tobytes()
            places.append(RequestArgument(location=DataLocation(0, end, length), dimensions=dimensions))
            end += -(-length // 64) * 64
        capacity = POOL_BYTES // len(outputs)
        results = tuple(RequestArgument(location=DataLocation(1, capacity * i, capacity)) for i in range(len(outputs)))
        with device.prepare(model, timeout=LIMIT_S) as prepared:
            prepared.execute_request(Request(tuple(places), results, (source, sink)), timeout=LIMIT_S)


@pytest.mark.parametrize("unknown", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("rule", "code", "arguments", "outputs"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_invalid_arguments_of_an_operation_fail_the_execution(
    rule: str,
    code: OperationType,
    arguments: list[Argument],
    outputs: list[Operand],
    unknown: bool,
    device: nnfmq.Device,
) -> None:
    # A request can express neither an empty input nor a tensor of rank 0: it is rejected before (N-RQX-7).
    cannot_be_said = any(0 in array.shape or not (is_scalar(o.type) or array.shape) for o, array in arguments)
    expected = nnfmq.InvalidArgument if cannot_be_said else nnfmq.GeneralFailure
    with pytest.raises(expected, match="N-RQX-7" if cannot_be_said else rf"\({code.name}\): .*\({rule}\)$"):
        execute(device, code, arguments, outputs, unknown=unknown)


def test_N_OPF_6_an_output_of_another_shape_is_rejected(device: nnfmq.Device) -> None:
    with pytest.raises(nnfmq.GeneralFailure, match="R4"):
        device.prepare(one_operation(Op.ADD, [TWO, TWO, 0], replace(F32, dimensions=(3,))))


def test_N_OPF_9_an_omitted_operand_that_is_required_is_rejected(device: nnfmq.Device, resources: ExitStack) -> None:
    model = one_operation(Op.ADD, [TWO, TWO, 0], TWO)
    omitted = with_main(with_operand(model, 1, lifetime=LifeTime.NO_VALUE), input_indexes=(0,))
    with pytest.raises(nnfmq.InvalidArgument, match="S5"):
        device.prepare(omitted)
    memory = resources.enter_context(Memory.create(64))
    places = [RequestArgument(location=DataLocation(0, at, 8)) for at in (0, 16, 32)]
    with device.prepare(model) as prepared:
        nothing = RequestArgument(has_no_value=True)
        with pytest.raises(nnfmq.InvalidArgument, match="received nothing"):
            prepared.execute_request(Request((places[0], nothing), (places[2],), (memory,)))
        prepared.execute_request(Request((places[0], places[1]), (places[2],), (memory,)))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_N_OPF_12_a_scalar_of_a_wrong_size_is_rejected(length: int, device: nnfmq.Device, resources: ExitStack) -> None:
    constant = one_operation(Op.SOFTMAX, [replace(F32, dimensions=(1, 2)), 1.0], replace(F32, dimensions=(1, 2)))
    short = with_operand(replace(constant, operand_values=bytes(8)), 1, location=DataLocation(0, 0, length))
    with pytest.raises(nnfmq.InvalidArgument, match="N-VAL-3"):
        device.prepare(short)
    memory = resources.enter_context(Memory.create(64))
    np.frombuffer(memory.view, np.float32, 1, 16)[:] = 1
    model = resources.enter_context(device.prepare(with_operand(SOFTMAX, 2, dimensions=(1, 2))))
    output = RequestArgument(location=DataLocation(0, 32, 8))
    for size in (length, 4):
        scalar = RequestArgument(location=DataLocation(0, 16, size))
        request = Request((RequestArgument(location=DataLocation(0, 0, 8)), scalar), (output,), (memory,))
        if size == 4:
            model.execute_request(request)
        else:
            with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-5"):
                model.execute_request(request)
    assert np.frombuffer(memory.view, np.float32, 2, 32).tolist() == [0.5, 0.5]
