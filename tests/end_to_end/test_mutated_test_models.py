"""Mutated models and requests through a worker: after each of them the same worker executes a valid one.

The daemon's fixture checks that they leak nothing and cause no internal error.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from support.drivers import LIMIT_S, Daemon, one
from support.models import null_model
from support.mutated_test_models import MutatedTest, mutated_tests
from support.tiers import IS_DEEP

import nnfmq
from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    OutputInsufficientSize,
    ResourceExhaustedTransient,
)
from nnfmq.hal.types import DataLocation, ExecutionConfig, Model, Request, RequestArgument, is_scalar, operand_bytes
from nnfmq.memory import Memory
from nnfmq.operations import HAL_DECLARATIONS

EXAMPLES = 2000 if IS_DEEP else 60
LOOP_NS = 5_000_000
OUTPUT_BYTES = 1 << 16
EXPECTED = (
    GeneralFailure,
    InvalidArgument,
    OutputInsufficientSize,
    MissedDeadlineTransient,
    ResourceExhaustedTransient,
)


def inputs_of(test: MutatedTest, stack: ExitStack) -> tuple[list[RequestArgument], Memory]:
    """Lay the arrays out in a memory."""
    arguments, data = [], bytearray()
    for array in test.inputs:
        if array is None:
            arguments.append(RequestArgument(has_no_value=True))
            continue
        data += bytes(-len(data) % 64)
        place = DataLocation(0, len(data), array.nbytes)
        arguments.append(RequestArgument(location=place, dimensions=array.shape))
        data += array.tobytes()
    memory = stack.enter_context(Memory.create(max(len(data), 1)))
    memory.view[: len(data)] = data
    return arguments, memory


def outputs_of(model: Model, stack: ExitStack) -> tuple[list[RequestArgument], Memory]:
    """Lay out the outputs, with their sizes if those are known and small."""
    arguments, end = [], 0
    for index in model.main.output_indexes:
        operand = model.main.operands[index]
        is_known = is_scalar(operand.type) or (operand.dimensions and 0 not in operand.dimensions)
        size = operand_bytes(operand) if is_known else OUTPUT_BYTES
        arguments.append(RequestArgument(location=DataLocation(1, end, min(size, OUTPUT_BYTES))))
        end += OUTPUT_BYTES
    return arguments, stack.enter_context(Memory.create(end))


def run(device: nnfmq.Device, test: MutatedTest) -> None:
    """Prepare and execute without client-side checks, as HAL calls do."""
    with ExitStack() as stack:
        inputs, source = inputs_of(test, stack)
        outputs, sink = outputs_of(test.model, stack)
        model = stack.enter_context(device.prepare(test.model, timeout=LIMIT_S))
        request = Request(tuple(inputs), tuple(outputs), (source, sink))
        model.execute_request(request, ExecutionConfig(loop_timeout_ns=LOOP_NS), timeout=LIMIT_S)


def test_VAL_1_LIFE_8_TST_9_after_each_mutated_model_the_same_worker_executes_a_valid_one(
    daemon: Daemon, data_dir: Path
) -> None:
    outcomes: Counter[str] = Counter()
    with daemon.connect() as client, client.device("reference").prepare(null_model()) as good:
        device, worker = client.device("reference"), client.worker_pid

        @given(mutated_tests(list(HAL_DECLARATIONS)))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=not IS_DEEP,  # the deep run searches at random
            suppress_health_check=[HealthCheck.too_slow],
        )
        def run_mutated(test: MutatedTest) -> None:
            try:
                run(device, test)
                outcomes["computed"] += 1
            except EXPECTED as error:
                outcomes[type(error).__name__] += 1
            assert good.execute(one(7), timeout=LIMIT_S)[0] == one(7)

        run_mutated()
        assert worker in daemon.process.descendants()
    assert {"computed", "InvalidArgument", "GeneralFailure"} <= set(outcomes)
