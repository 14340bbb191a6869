"""The driver as a fuzz target: bytes become a mutated test model with a request, which a driver receives and executes.

The driver's parts run in this process, so that a fuzzer sees which lines an input reaches: the codec, validation, the
reference device and its engine. `through_process` sends the same model to a driver process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from nnfmq.base.memory import Memory
from nnfmq.client.connection.device import Device
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.driver.devices.registry import load_devices
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.hal.errors import (
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    OutputInsufficientSize,
    ResourceExhaustedTransient,
    status_for_error,
)
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    ExecutionPreference,
    Model,
    OperationType,
    Priority,
    Request,
    RequestArgument,
    is_scalar,
    operand_bytes,
)
from nnfmq.operations import HAL_DECLARATIONS
from nnfmq.serialize.models import decode_model, encode_model
from support.choices import ByteChoices
from support.mutated_test_models import MutatedTest, mutated_test

LOOP_NS = 5_000_000
OUTPUT_BYTES = 1 << 16
FILL_BYTE = 0xA5
EXPECTED_ERRORS = (
    GeneralFailure,
    InvalidArgument,
    OutputInsufficientSize,
    MissedDeadlineTransient,
    ResourceExhaustedTransient,
)
"""What a driver may answer to a mutated model or its request."""
_CODES = tuple(HAL_DECLARATIONS)
_CONFIG = ExecutionConfig(loop_timeout_ns=LOOP_NS)


def decode(data: bytes) -> MutatedTest:
    """Return the mutated test model that the bytes choose."""
    return mutated_test(ByteChoices(data), _CODES)


def run_driver(data: bytes) -> ErrorStatus:
    """Receive, validate, prepare and execute the model twice; return the status of the first step that fails, or NONE.

    Raises:
        AssertionError: If the driver logs an internal error, changes memory beside the outputs, returns shapes that do
            not fit its status, or another result the second time.
    """
    test = decode(data)
    with ExitStack() as stack, no_internal_errors():
        try:
            prepared = _prepare(test.model)
        except EXPECTED_ERRORS as error:
            return status_for_error(error)
        laid_out = LaidOut(test, stack)
        source = bytes(laid_out.source.view)
        first = prepared.execute_synchronously(laid_out.request, _CONFIG)
        results = laid_out.outputs()
        assert bytes(laid_out.source.view) == source, "an execution changed its inputs"
        assert first.status in {error.status for error in EXPECTED_ERRORS} | {ErrorStatus.NONE}, first
        if first.status is ErrorStatus.NONE:
            assert len(first.output_shapes) == len(laid_out.request.outputs)
            assert all(shape.is_sufficient for shape in first.output_shapes)
            second = prepared.execute_synchronously(laid_out.request, _CONFIG)
            if second.status is not ErrorStatus.MISSED_DEADLINE_TRANSIENT and not _is_random(test.model):
                assert (second.output_shapes, laid_out.outputs()) == (first.output_shapes, results), "results differ"
        return first.status


def _is_random(model: Model) -> bool:
    """Return whether results may differ: RANDOM_MULTINOMIAL with seeds of 0 draws its own."""
    return any(operation.type is OperationType.RANDOM_MULTINOMIAL for operation in model.main.operations)


def _prepare(model: Model) -> DriverPreparedModel:
    device = _reference()
    sent, pools = encode_model(model)
    received = decode_model(sent, pools)
    checked = device.check_prepare_arguments(
        received, ExecutionPreference.SUSTAINED_SPEED, Priority.MEDIUM, deadline_ns=None
    )
    assert all(device.supported_operations(received)), "the reference device supports every valid operation"
    return device.prepare_model(checked)


@cache
def _reference() -> DeviceBase:
    return load_devices()["reference"]


def through_process(test: MutatedTest, device: Device, limit_s: float) -> ErrorStatus:
    """Prepare and execute the model as HAL calls do, without the client library's own checks; return the status.

    Raises:
        NnfmqError: If the driver answers with a status that it may not return for a mutated model.
    """
    with ExitStack() as stack:
        try:
            model = stack.enter_context(device.prepare(test.model, timeout=limit_s))
            model.execute_request(LaidOut(test, stack).request, _CONFIG, timeout=limit_s)
        except EXPECTED_ERRORS as error:
            return status_for_error(error)
    return ErrorStatus.NONE


class LaidOut:
    """The request of a mutated test: inputs in pool 0; outputs in pool 1, one every OUTPUT_BYTES."""

    def __init__(self, test: MutatedTest, stack: ExitStack) -> None:
        inputs, data = _inputs(test)
        outputs = list(_outputs(test.model))
        self.source = stack.enter_context(Memory.create(max(len(data), 1)))
        self.source.view[: len(data)] = data
        self.sink = stack.enter_context(Memory.create(OUTPUT_BYTES * len(outputs)))
        self.sink.view[:] = bytes([FILL_BYTE]) * self.sink.size_bytes
        self.request = Request(tuple(inputs), tuple(outputs), (self.source, self.sink))

    def outputs(self) -> list[bytes]:
        """Return the bytes of each output, and fill them again.

        Raises:
            AssertionError: If a byte beside the outputs has changed.
        """
        found = []
        for place in (argument.location for argument in self.request.outputs):
            end = place.offset + place.length
            found.append(bytes(self.sink.view[place.offset : end]))
            beside = self.sink.view[end : place.offset + OUTPUT_BYTES]
            assert bytes(beside) == bytes([FILL_BYTE]) * len(beside), "an execution wrote beside its outputs"
            self.sink.view[place.offset : end] = bytes([FILL_BYTE]) * place.length
        return found


def _inputs(test: MutatedTest) -> tuple[list[RequestArgument], bytes]:
    arguments, data = [], bytearray()
    for array in test.inputs:
        if array is None:
            arguments.append(RequestArgument(has_no_value=True))
            continue
        data += bytes(-len(data) % 64)
        place = DataLocation(0, len(data), array.nbytes)
        arguments.append(RequestArgument(location=place, dimensions=array.shape))
        data += array.tobytes()
    return arguments, bytes(data)


def _outputs(model: Model) -> Iterator[RequestArgument]:
    """Yield the outputs, with their sizes if those are known and small."""
    for number, index in enumerate(model.main.output_indexes):
        operand = model.main.operands[index]
        is_known = is_scalar(operand.type) or (operand.dimensions and 0 not in operand.dimensions)
        size = operand_bytes(operand) if is_known else OUTPUT_BYTES
        yield RequestArgument(location=DataLocation(1, number * OUTPUT_BYTES, min(size, OUTPUT_BYTES)))


class _Errors(logging.Handler):
    """Keeps the records of level ERROR, by which a driver reports its own mistakes."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)


@contextmanager
def no_internal_errors() -> Iterator[None]:
    """Raise AssertionError after a block in which the driver has reported a mistake of its own."""
    errors, log = _Errors(), logging.getLogger("nnfmq")
    log.addHandler(errors)
    try:
        yield
    finally:
        log.removeHandler(errors)
    for record in errors.records:
        cause = record.exc_info[1] if record.exc_info else None
        raise AssertionError(f"an internal error: {record.getMessage()}") from cause
