"""A client's memory limit bounds what its executions allocate, in each engine; neighbours and later calls go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, InThread, Process, running_daemon, short_folder, until
from support.small_models import F32, I32, INPUT, OUTPUT, TEMPORARY, graph, scalar, vector, with_unused_operands

import nnfmq
from nnfmq.hal.errors import ErrorStatus, ResourceExhausted, ResourceExhaustedPersistent, ResourceExhaustedTransient
from nnfmq.hal.types import Model, Operand, Operation, OperationType
from nnfmq.serialize import messages
from nnfmq.serialize.models import encode_model

MIB = 1 << 20
LIMIT_MIB = 64
ROW = 1024  # floats: 4 KiB


@pytest.fixture(scope="module")
def limited_driver() -> Iterator[Daemon]:
    environment = {"NNFMQ_CLIENT_MEMORY_MIB": str(LIMIT_MIB)}
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


@pytest.fixture
def limited(limited_driver: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client of a driver that allows each client 64 MiB."""
    with limited_driver.connect() as client:
        yield client


def tiles(copies: int, count: int = 6, *, known: bool = True) -> Model:
    """Return a model of `count` TILE operations on one row, each to `copies` rows, whose results exist together.

    The output is their largest element, so nothing large leaves the model. If not `known`, the
    number of copies is an input.
    """
    shape = (copies, ROW) if known else (0, 0)
    multiples = Operand(I32, (2,), lifetime=INPUT)
    operands = [Operand(F32, (1, ROW), lifetime=INPUT), multiples, *[Operand(F32, shape, lifetime=TEMPORARY)] * count]
    constants = {1: vector([copies, 1])[1]} if known else {}
    operations = [Operation(OperationType.TILE, (0, 1), (2 + n,)) for n in range(count)]
    last = 2
    for number in range(1, count):
        operands.append(Operand(F32, shape, lifetime=TEMPORARY))
        operations.append(Operation(OperationType.MAXIMUM, (last, 2 + number), (len(operands) - 1,)))
        last = len(operands) - 1
    axes, keep = len(operands), len(operands) + 1
    operands += [vector([0, 1])[0], scalar(False)[0], Operand(F32, (1,), lifetime=OUTPUT)]
    constants |= {axes: vector([0, 1])[1], keep: scalar(False)[1]}
    operations.append(Operation(OperationType.REDUCE_MAX, (last, axes, keep), (keep + 1,)))
    return graph(operands, operations, constants)


def peak_bytes(client: nnfmq.Client) -> int:
    """Return the most memory that the worker of `client` has had resident."""
    status = Path(f"/proc/{client.worker_pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def run(model: nnfmq.PreparedModel, copies: int, known: bool = True) -> float:
    row = np.arange(ROW, dtype=np.float32).reshape(1, ROW)
    inputs = [row] if known else [row, np.array([copies, 1], np.int32)]
    return float(np.asarray(model.execute(*inputs)).ravel()[0])


def refuse(client: nnfmq.Client, device: str, known: bool) -> None:
    """Check that the driver refuses six operations whose results take 461 MiB each: compiled ones when prepared."""
    text = f"the limit is {LIMIT_MIB * MIB}.*NNFMQ_CLIENT_MEMORY_MIB"
    with (
        pytest.raises(ResourceExhausted, match=text),
        client.device(device).prepare(tiles(461 * 256, known=known)) as large,
    ):
        run(large, 461 * 256, known)


@pytest.mark.parametrize("known", [True, False], ids=["shapes of the model", "shapes of the request"])
@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_temporaries_beyond_the_limit_are_refused_before_they_are_allocated(
    limited: nnfmq.Client, device: str, known: bool
) -> None:
    with limited.device(device).prepare(tiles(16, known=known)) as small:
        assert run(small, 16, known) == ROW - 1
        before = peak_bytes(limited)
        refuse(limited, device, known)
        assert peak_bytes(limited) - before < LIMIT_MIB * MIB
        assert run(small, 16, known) == ROW - 1


def test_a_size_that_never_fits_is_refused_for_good_and_one_that_fits_alone_for_now(limited: nnfmq.Client) -> None:
    reference = limited.device("reference")
    with reference.prepare(tiles(461 * 256, 1)) as never, pytest.raises(ResourceExhaustedPersistent):
        run(never, 461 * 256)
    with reference.prepare(tiles(40 * 256, 1)) as first, reference.prepare(tiles(40 * 256, 1)) as second:
        with first.burst() as burst:
            burst.execute(np.arange(ROW, dtype=np.float32).reshape(1, ROW))  # stays bound: 40 MiB are charged
            with pytest.raises(ResourceExhaustedTransient):
                run(second, 40 * 256)
        assert run(second, 40 * 256) == ROW - 1


def test_operands_whose_objects_would_exceed_the_limit_are_refused_before_they_are_decoded(
    limited: nnfmq.Client,
) -> None:
    data, _ = encode_model(with_unused_operands(LIMIT_MIB * MIB // 256))  # 6.5 MiB, charged as 312
    connection, before = limited.connection, peak_bytes(limited)
    message = messages.GetSupportedOperations(connection.next_call_id(), "reference", data)
    refused = connection.exchange(message, messages.SupportedOperations)
    assert refused.status is ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
    assert f"the limit is {LIMIT_MIB * MIB}" in refused.message
    assert peak_bytes(limited) - before < LIMIT_MIB * MIB
    with limited.device("reference").prepare(tiles(16)) as small:
        assert run(small, 16) == ROW - 1


def test_a_neighbour_executes_while_a_client_is_refused(limited_driver: Daemon, limited: nnfmq.Client) -> None:
    with limited_driver.connect() as neighbour, neighbour.device("reference").prepare(tiles(16)) as theirs:
        refused = InThread.start(lambda: [refuse(limited, "reference", known=True) for _ in range(20)])
        results = [run(theirs, 16)]
        while refused.is_running:
            results.append(run(theirs, 16))
    assert refused.wait().error is None
    assert len(results) > 1 and set(results) == {ROW - 1}


def test_all_clients_together_have_one_limit_and_a_killed_one_gives_its_part_back() -> None:
    copies, row = 24 * 256, np.arange(ROW, dtype=np.float32).reshape(1, ROW)
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        daemon = stack.enter_context(running_daemon(folder / "d.sock", environment={"NNFMQ_MEMORY_MIB": "64"}))
        clients = [stack.enter_context(daemon.connect()) for _ in range(3)]
        models = [stack.enter_context(client.device("reference").prepare(tiles(copies, 1))) for client in clients]
        bursts = [stack.enter_context(model.burst()) for model in models[:2]]
        for burst in bursts:
            burst.execute(row)  # stays bound: 24 MiB are charged to each
        with pytest.raises(
            ResourceExhaustedTransient, match=rf"all clients' memory.* the limit is {64 * MIB}.*--memory"
        ):
            run(models[2], copies)
        with Process(clients[0].worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        until(lambda: is_admitted(models[2], copies), "the third client has the share of the killed worker")
        bursts[1].execute(row)


def is_admitted(model: nnfmq.PreparedModel, copies: int) -> bool:
    try:
        return run(model, copies) == ROW - 1
    except ResourceExhaustedTransient:
        return False
