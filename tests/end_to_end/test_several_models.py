"""Several models in one driver process: executed in turn, released in any order, with constants in every kind of pool.

A model that multiplies by its own number shows which one was executed, and with which constants.
"""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.control_flow_models import counting
from support.drivers import LIMIT_S, Daemon
from support.models import pool_bytes, request_for
from support.small_models import F32, INPUT, OUTPUT, TEMPORARY, graph, scalar, two_adds, with_main

import nnfmq
from nnfmq.base import settings
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    LifeTime,
    Model,
    Operand,
    Operation,
    OperationType,
    Pool,
    Protection,
)

REALS = np.array([1, 2, 3, 4], np.float32)
BYTES = REALS.nbytes

CALLS = settings.CLIENT_CALLS.default


def times(number: float) -> Model:
    """Return MUL by a constant of four floats, which is `number`."""
    tensor = Operand(F32, (4,))
    operands = [replace(tensor, lifetime=INPUT), tensor, scalar(0)[0], replace(tensor, lifetime=OUTPUT)]
    constants = {1: struct.pack("<4f", *[number] * 4), 2: scalar(0)[1]}
    return graph(operands, [Operation(OperationType.MUL, (0, 1, 2), (3,))], constants)


# ------------------------------------------------------------------------------------------------ in turn, in any order


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_PREP_8_models_are_executed_in_turn_and_released_in_any_order(
    device: str, client: nnfmq.Client, resources: ExitStack
) -> None:
    prepare = client.device(device).prepare
    for order in permutations(range(3)):
        models = [resources.enter_context(prepare(times(number), timeout=LIMIT_S)) for number in range(3)]
        bursts = [model.burst() for model in models]
        for number in (0, 1, 0, 2, 1, 2, 0):
            for execute in (models[number].execute, bursts[number].execute):
                assert execute(REALS, timeout=LIMIT_S)[0].tolist() == (number * REALS).tolist()
        left = set(range(3))
        for released in order:
            bursts[released].close()
            models[released].close()
            left.remove(released)
            with pytest.raises(nnfmq.InvalidArgument, match="closed"):
                models[released].execute(REALS)
            for number in left:
                for execute in (models[number].execute, bursts[number].execute):
                    assert execute(REALS, timeout=LIMIT_S)[0].tolist() == (number * REALS).tolist()


# ------------------------------------------------------------------------------------------------ pools


def in_pool(model: Model, pool: Pool, offset: int) -> Model:
    """Return the model with its constant of four floats at `offset` of a pool."""
    operands = list(model.main.operands)
    place = DataLocation(0, offset, BYTES)
    operands[1] = replace(operands[1], lifetime=LifeTime.CONSTANT_REFERENCE, location=place)
    return replace(with_main(model, operands=tuple(operands)), pools=(pool,))


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_MOD_9_constants_are_in_shared_memory_or_in_a_part_of_a_file(
    device: str, client: nnfmq.Client, resources: ExitStack, tmp_path: Path
) -> None:
    numbers = np.repeat(np.arange(1, 65, dtype=np.float32), 4)  # each is a constant of four equal floats
    memory = resources.enter_context(nnfmq.Memory.create(numbers.nbytes))
    memory.view[:] = numbers.tobytes()
    path = tmp_path / "weights"
    path.write_bytes(numbers.tobytes())
    fd = os.open(path, os.O_RDONLY)
    resources.callback(os.close, fd)
    part = nnfmq.FileMemory.from_fd(fd, 512, offset=256, protection=Protection.READ)
    pools = {0: memory, 256: resources.enter_context(part)}
    for start, pool in pools.items():
        for offset in (0, 48, 496):
            expected = (start + offset) // BYTES + 1
            with client.device(device).prepare(in_pool(times(-1), pool, offset), timeout=LIMIT_S) as model:
                assert model.execute(REALS)[0].tolist() == (expected * REALS).tolist()
                if pool is memory:  # what is prepared has its own copy
                    memory.view[offset : offset + BYTES] = bytes(BYTES)
                assert model.execute(REALS)[0].tolist() == (expected * REALS).tolist()
        with pytest.raises(nnfmq.InvalidArgument, match="N-VAL-5"):
            client.device(device).prepare(in_pool(times(-1), pool, pool.size_bytes - BYTES + 4))


# ------------------------------------------------------------------------------------------------ unused operands


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_VAL_6_unused_inputs_and_constants_are_legal_and_have_no_effect(device: str, client: nnfmq.Client) -> None:
    model = times(3)
    unused = [replace(Operand(F32, (4,)), lifetime=INPUT), Operand(F32, (4,)), Operand(F32, (4,))]
    unused[1] = replace(unused[1], lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, BYTES))
    unused[2] = replace(unused[2], lifetime=LifeTime.NO_VALUE)
    main = model.main
    with_unused = with_main(model, operands=(*main.operands, *unused), input_indexes=(0, len(main.operands)))
    assert client.device(device).supported_operations(with_unused) == [True]
    with client.device(device).prepare(with_unused, timeout=LIMIT_S) as prepared:
        assert prepared.execute(REALS, 100 * REALS)[0].tolist() == (3 * REALS).tolist()


UNWRITTEN = {
    "a temporary": with_main(
        two_adds(), operands=(*two_adds().main.operands, Operand(F32, (2, 2), lifetime=TEMPORARY))
    ),
    "an output": with_main(
        two_adds(),
        operands=(*two_adds().main.operands, Operand(F32, (2, 2), lifetime=OUTPUT)),
        output_indexes=(4, 5),
    ),
    "an operand written twice": with_main(
        two_adds(), operations=(*two_adds().main.operations, Operation(OperationType.ADD, (0, 1, 2), (3,)))
    ),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_VAL_6_what_nobody_writes_or_two_write_is_rejected(name: str, client: nnfmq.Client) -> None:
    for call in (client.device("reference").supported_operations, client.device("reference").prepare):
        with pytest.raises(nnfmq.InvalidArgument, match=r"\((N-VAL-16|N-MOD-9|N-MOD-1)\)$"):
            call(UNWRITTEN[name])


# ------------------------------------------------------------------------------------------------ several clients


def test_LIFE_7_clients_have_their_own_models_and_limits_and_none_waits_for_another(
    daemon: Daemon, resources: ExitStack
) -> None:
    busy, *others = (resources.enter_context(daemon.connect()) for _ in range(3))
    models = [
        resources.enter_context(other.device("reference").prepare(times(number)))
        for number, other in enumerate(others, 1)
    ]
    assert models[0].handle.model_id == models[1].handle.model_id  # so a table for all would mix them up
    loop = resources.enter_context(busy.device("reference").prepare(counting()))
    pools = [resources.enter_context(nnfmq.Memory.create(size)) for size in pool_bytes(counting())]
    request = request_for(counting(), pools)
    at = request.inputs[1].location.offset
    pools[0].view[at : at + 4] = struct.pack("<i", 2**31 - 1)  # rounds
    endless = ExecutionConfig(loop_timeout_ns=15_000_000_000)
    pending = [loop.execute_request_async(request, endless) for _ in range(CALLS + 20)]
    for execution in pending[CALLS:]:
        with pytest.raises(
            nnfmq.ResourceExhaustedTransient, match=rf"{CALLS} calls of this client .*\$NNFMQ_CLIENT_CALLS"
        ):
            execution.result(LIMIT_S)
    for _ in range(10):  # the loop of the first client ends after 15 s
        for number, model in enumerate(models, 1):
            assert model.execute(REALS, timeout=LIMIT_S)[0].tolist() == (number * REALS).tolist()
    assert not any(execution.done() for execution in pending[:CALLS])
