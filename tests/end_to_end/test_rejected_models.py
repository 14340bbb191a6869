"""Models that the HAL forbids, through a driver process: both methods reject each, and the same client continues.

Some messages could not be sent by nnfmq's client; every test ends with a valid model on the same connection. The full
tier takes one mutation of each kind from every second test model of a selection, the deep tier all of all test models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.control_flow_models import COUNT, REAL, branching, counting, named, output
from support.drivers import LIMIT_S, Daemon
from support.model_mutations import FAMILIES, Mutant, mutants
from support.models import add_model
from support.protocol import ProtocolPeer
from support.sessions import HELLO, NO_LIMIT, create_request, encoded, prepare, prepare_message, statuses_of
from support.small_models import F32, OUTPUT, Q8S, TEMPORARY, two_adds, with_main, with_operand, with_operation
from support.vts_models import FOLDER, SPECS, is_legal, one_of_each

from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    OperationType,
)
from nnfmq.lab.conformance import testmodels
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.models import encode_model

INVALID = ErrorStatus.INVALID_ARGUMENT
REJECTED = (INVALID, INVALID, 0, INVALID)
POOL_BYTES = 64
CONSTANT = LifeTime.CONSTANT_REFERENCE
PC = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
SUBGRAPH = OperandType.SUBGRAPH
NAME = "com.example.one"
ADD = add_model()


@pytest.fixture(scope="module")
def client(shared_daemon: Daemon) -> Iterator[ProtocolPeer]:
    """Return the client of all tests: rejected models must not affect later calls."""
    with speaking(shared_daemon, "AIDL v4") as made:
        yield made


def speaking(driver: Daemon, interface: str) -> ProtocolPeer:
    client = ProtocolPeer(Channel.connect(driver.path, time.monotonic_ns() + int(LIMIT_S * 1e9)), PeerRole.CLIENT)
    client.send(msgspec.structs.replace(HELLO, interface=interface))
    client.receive(messages.HelloReply)
    return client


def goes_on(client: ProtocolPeer) -> bool:
    """Return whether the same client prepares and executes a good model."""
    with ExitStack() as stack:
        pooled = create_request(stack, ADD, [1, 2, 3, 4], [10, 20, 30, 40])
        model_id = prepare(client, ADD)
        client.send(pooled.call(messages.Execute, 600, model_id, deadline_ns=NO_LIMIT), pooled.fds)
        assert client.receive(messages.Executed).status is ErrorStatus.NONE
        client.send(messages.ReleaseModel(601, model_id))
        client.receive(messages.Reply)
        return pooled.result() == [11, 22, 33, 44]


def statuses_with_pools(client: ProtocolPeer, model: Model) -> tuple[ErrorStatus, ErrorStatus, int, ErrorStatus]:
    """Ask for a model, whose pools are as many memories as it names."""
    with ExitStack() as stack:
        pools = [stack.enter_context(Memory.create(POOL_BYTES)) for _ in model.pools]
        bare = replace(model, pools=tuple(pools))
        pooled = [messages.memory_to_data(pool) for pool in pools]
        return statuses_of(client, encoded(bare), pooled, [pool.fileno() for pool in pools])


# ------------------------------------------------------------------------------------------------ the HAL's mutations

LEGAL = {"two ADDs": two_adds(), "int8": two_adds(Q8S, 0.5, 3), "WHILE": counting()}


def can_be_sent(model: Model) -> bool:
    """Return whether `encoded` can write it: unknown codes only in the main subgraph."""
    referenced = [(*graph.operands, *graph.operations) for graph in model.referenced]
    return all(isinstance(part.type, OperandType | OperationType) for graph in referenced for part in graph)


MUTATED = [(rule, name) for rule in FAMILIES for name in LEGAL if any(mutants(LEGAL[name], rule))]  # some have no order


@pytest.mark.parametrize(("rule", "name"), MUTATED, ids=[f"{rule} {name}" for rule, name in MUTATED])
def test_a_mutated_model_of_the_hal_s_suite_is_rejected_and_the_client_continues(
    rule: str, name: str, client: ProtocolPeer
) -> None:
    mutated = [mutant for mutant in mutants(LEGAL[name], rule) if can_be_sent(mutant.model)]
    wrong = [mutant.what for mutant in mutated if statuses_of(client, encoded(mutant.model)) != REJECTED]
    assert mutated and wrong == []
    assert goes_on(client)


def accepted(client: ProtocolPeer, chosen: Iterable[Mutant]) -> list[str]:
    """Return the mutations that the driver does not reject in both methods."""
    return [
        f"{mutant.rule}: {mutant.what}"
        for mutant in chosen
        if can_be_sent(mutant.model) and statuses_of(client, encoded(mutant.model)) != REJECTED
    ]


@cache
def legal_models() -> list[Model]:
    return [test.model for test in one_of_each() if is_legal(test.model)]


@pytest.mark.parametrize("rule", FAMILIES)
def test_one_mutation_of_every_second_test_model_is_rejected_and_the_client_continues(
    rule: str, client: ProtocolPeer, data_dir: Path
) -> None:
    first = list(FAMILIES).index(rule) % 2
    chosen = []
    for number, model in enumerate(legal_models()[first::2]):
        found = list(mutants(model, rule))
        chosen += found[number % len(found) :][:1] if found else []
    assert chosen and accepted(client, chosen) == []
    assert goes_on(client)


@pytest.mark.deep
@pytest.mark.parametrize("spec", SPECS)
def test_N_MOD_1_to_20_every_mutation_of_every_test_model_is_rejected(spec: str, client: ProtocolPeer) -> None:
    for _, line in testmodels.lines(FOLDER / f"{spec}.jsonl.gz"):
        model = testmodels.read(line).model
        if is_legal(model) and not model.pools:
            assert accepted(client, mutants(model)) == []
    assert goes_on(client)


@pytest.mark.parametrize(
    ("field", "code"),
    [("preference", -1), ("preference", 3), ("priority", -1), ("priority", 3)],
    ids=["N-MOD-21 below", "N-MOD-21 above", "N-MOD-22 below", "N-MOD-22 above"],
)
def test_a_preference_or_a_priority_out_of_range_is_rejected(field: str, code: int, client: ProtocolPeer) -> None:
    client.send(prepare_message(4, **{field: code}))
    ready, reply = client.receive(messages.PreparedModelReady), client.receive(messages.Reply)
    assert (ready.status, ready.model_id, reply.status) == (INVALID, 0, INVALID)
    assert goes_on(client)


def test_N_MOD_23_operations_that_feed_each_other_are_rejected(client: ProtocolPeer) -> None:
    assert statuses_with_pools(client, with_operation(two_adds(), 0, inputs=(0, 4, 2))) == REJECTED
    assert goes_on(client)


@pytest.mark.parametrize("change", [1, -1], ids=["one more", "one less"])
def test_MOD_3_N_MOD_8_a_wrong_number_of_consumers_is_rejected(shared_daemon: Daemon, change: int) -> None:
    data = encode_model(two_adds())[0]
    with speaking(shared_daemon, "HIDL 1.3") as client:
        for operand in range(5):
            counts = [1, 2, 2, 1, 0]
            counts[operand] = max(counts[operand] + change, 0)
            client.send(messages.GetSupportedOperations(8, "reference", data, (), (tuple(counts),)))
            expected = ErrorStatus.NONE if counts == [1, 2, 2, 1, 0] else INVALID
            assert client.receive(messages.SupportedOperations).status is expected
            client.send(prepare_message(9, data, consumers=(tuple(counts),)))
            if expected is INVALID:
                assert client.receive(messages.PreparedModelReady).status is INVALID
                assert client.receive(messages.Reply).status is INVALID
            else:
                assert client.receive(messages.Reply).status is ErrorStatus.NONE
                assert client.receive(messages.PreparedModelReady).status is ErrorStatus.NONE
        client.send(prepare_message(10, data, consumers=((1, 2, 2, 1, 0),)))
        assert client.receive(messages.Reply).status is ErrorStatus.NONE
        assert client.receive(messages.PreparedModelReady).status is ErrorStatus.NONE


# ------------------------------------------------------------------------------------------------ rules beyond


def weighted(operand_type: OperandType, dimensions: tuple[int, ...], **fields: Any) -> Model:
    """Return two ADDs and an unused constant in a pool: operand 5."""
    operand = Operand(operand_type, dimensions, lifetime=CONSTANT, **fields)
    model = two_adds()
    return replace(with_main(model, operands=(*model.main.operands, operand)), pools=(None,))  # type: ignore[arg-type]


def in_pool(*place: int) -> Model:
    return weighted(F32, (4,), location=DataLocation(*place))


def per_channel(quant: ChannelQuant | None, *dimensions: int) -> Model:
    return weighted(PC, dimensions, location=DataLocation(0, 0, 6), channel_quant=quant)


def with_more(*operands: Operand, **changes: Any) -> Model:
    model = two_adds()
    return with_main(model, operands=(*model.main.operands, *operands), **changes)


def in_subgraph(model: Model, number: int, **changes: Any) -> Model:
    referenced = list(model.referenced)
    referenced[number] = replace(referenced[number], **changes)
    return replace(model, referenced=tuple(referenced))


def reshaped(model: Model, number: int, index: int, **changes: Any) -> Model:
    """Change one operand of a subgraph, whose operations become ones that take all types."""
    graph = model.referenced[number]
    operands = list(graph.operands)
    operands[index] = replace(operands[index], **changes)
    operations = tuple(replace(o, type=OperationType.OEM_OPERATION) for o in graph.operations)
    return in_subgraph(model, number, operands=tuple(operands), operations=operations)


def recursive() -> Model:
    model = branching()
    first, second = model.referenced
    model = in_subgraph(model, 0, operands=(*first.operands, named(1)))
    return in_subgraph(model, 1, operands=(*second.operands, named(0)))


def extended(**fields: Any) -> Model:
    model = replace(two_adds(), extensions=(ExtensionNameAndPrefix(NAME, 1),))
    return with_operand(model, 3, **fields)


def named_twice(*entries: tuple[str, int]) -> Model:
    return replace(two_adds(), extensions=tuple(ExtensionNameAndPrefix(*entry) for entry in entries))


def more_outputs() -> Model:
    """Return a WHILE with more outputs than its body gives."""
    model = counting()
    operands = (*model.main.operands, output(COUNT), output(REAL))
    return with_operation(with_main(model, operands=operands, output_indexes=(6, 7, 8)), 0, outputs=(6, 7, 8))


def omitted() -> Model:
    return with_main(with_operand(two_adds(), 1, lifetime=LifeTime.NO_VALUE), input_indexes=(0,))


TWO, MORE = ChannelQuant((1.0, 1.0), 2), ChannelQuant((1.0,), 0)
PLACED = LifeTime.SUBGRAPH
FORBIDDEN: dict[str, Callable[[], Model]] = {
    "N-VAL-1 type": lambda: with_operand(two_adds(), 2, type=SUBGRAPH),
    "N-VAL-1 lifetime": lambda: with_operand(two_adds(), 2, lifetime=PLACED),
    "N-VAL-2 rank": lambda: weighted(F32, (), location=DataLocation(0, 0, 16)),
    "N-VAL-2 extent": lambda: weighted(F32, (0, 4), location=DataLocation(0, 0, 16)),
    "N-VAL-3 shorter": lambda: in_pool(0, 0, 15),
    "N-VAL-3 longer": lambda: in_pool(0, 0, 17),
    "N-VAL-3 over 32 bits": lambda: with_operand(two_adds(), 3, dimensions=(1 << 16, 1 << 16)),
    "N-VAL-3 over 64 bits": lambda: with_operand(two_adds(), 3, dimensions=(1 << 31, 1 << 31, 4)),
    "N-VAL-4 pool": lambda: with_operand(two_adds(), 2, location=DataLocation(1, 0, 4)),
    "N-VAL-4 range": lambda: with_operand(two_adds(), 2, location=DataLocation(0, 4, 4)),
    "N-VAL-5 pool": lambda: in_pool(1, 0, 16),
    "N-VAL-5 range": lambda: in_pool(0, POOL_BYTES - 12, 16),
    "N-VAL-5 sum": lambda: in_pool(0, (1 << 32) - 4, 16),
    "N-VAL-6 input": lambda: with_operand(two_adds(), 0, location=DataLocation(0, 0, 1)),
    "N-VAL-6 temporary": lambda: with_operand(two_adds(), 3, location=DataLocation(0, 1, 0)),
    "N-VAL-6 output": lambda: with_operand(two_adds(), 4, location=DataLocation(1, 0, 0)),
    "N-VAL-7 pool": lambda: with_operand(branching(), 1, location=DataLocation(1, 0, 0)),
    "N-VAL-7 length": lambda: with_operand(branching(), 1, location=DataLocation(0, 0, 4)),
    "N-VAL-7 none": lambda: with_operand(branching(), 1, location=DataLocation(0, 2, 0)),
    "N-VAL-8 padding": lambda: with_operand(two_adds(), 2, location=DataLocation(0, 0, 4, 4)),
    "N-VAL-9 missing": lambda: per_channel(None, 2, 3),
    "N-VAL-9 dimension": lambda: per_channel(TWO, 2, 3),
    "N-VAL-9 count": lambda: per_channel(MORE, 2, 3),
    "N-VAL-9 scale of 0": lambda: per_channel(ChannelQuant((1.0, 0.0), 0), 2, 3),
    "N-VAL-9 type": lambda: with_operand(two_adds(), 0, channel_quant=ChannelQuant((1.0, 1.0), 0)),
    "N-VAL-10 base type": lambda: extended(extension_data=b"x"),
    "N-VAL-10 extension type": lambda: extended(type=OperandType(1 << 16 | 7), scale=1.0),
    "N-VAL-11 operand": lambda: extended(type=OperandType(2 << 16 | 7)),
    "N-VAL-11 operation": lambda: with_operation(two_adds(), 0, type=OperationType(2 << 16 | 7)),
    "N-VAL-12 name": lambda: named_twice((NAME, 1), (NAME, 2)),
    "N-VAL-12 prefix": lambda: named_twice((NAME, 1), ("com.example.two", 1)),
    "N-VAL-12 prefix of 0": lambda: named_twice((NAME, 0)),
    "N-VAL-12 malformed": lambda: named_twice(("No Name", 1)),
    "N-VAL-14 twice": lambda: with_main(two_adds(), input_indexes=(0, 0)),
    "N-VAL-14 both": lambda: with_main(two_adds(), output_indexes=(4, 0)),
    "N-VAL-15 operands": lambda: with_main(two_adds(), operands=()),
    "N-VAL-15 operations": lambda: with_main(two_adds(), operations=()),
    "N-VAL-15 index": lambda: with_main(two_adds(), input_indexes=(0, 5)),
    "N-VAL-15 subgraph": lambda: in_subgraph(branching(), 1, operations=()),
    "N-VAL-16 temporary": lambda: with_more(Operand(F32, (1,), lifetime=TEMPORARY)),
    "N-VAL-16 output": lambda: with_more(Operand(F32, (1,), lifetime=OUTPUT), output_indexes=(4, 5)),
    "N-VAL-17 cycle": recursive,
    "N-VAL-18 inputs": lambda: with_operation(branching(), 0, inputs=(0, 1)),
    "N-VAL-18 outputs": lambda: with_operation(branching(), 0, outputs=()),
    "N-VAL-18 CF-1 condition": lambda: with_operand(branching(), 0, dimensions=(2,)),
    "N-VAL-18 CF-1 branch": lambda: reshaped(branching(), 0, 0, dimensions=(3,)),
    "N-VAL-18 CF-1 result": lambda: reshaped(branching(), 1, 3, type=OperandType.TENSOR_INT32),
    "N-VAL-19 inputs": lambda: with_operation(counting(), 0, inputs=(0, 1)),
    "N-VAL-19 CF-2 outputs": more_outputs,
    "N-VAL-19 CF-2 condition": lambda: reshaped(counting(), 0, 4, dimensions=(2,)),
    "N-VAL-19 CF-2 body": lambda: reshaped(counting(), 1, 3, dimensions=(3,)),
    "N-VAL-20 CF-3 IF": lambda: with_operand(branching(), 3, dimensions=(0,)),
    "N-VAL-20 CF-3 branch": lambda: reshaped(branching(), 0, 0, dimensions=()),
    "N-VAL-20 CF-3 WHILE": lambda: reshaped(counting(), 1, 4, dimensions=(0,)),
    "N-VAL-25 omitted": omitted,
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_VAL_1_a_model_that_the_hal_forbids_is_rejected_and_the_client_continues(
    name: str, client: ProtocolPeer
) -> None:
    assert statuses_with_pools(client, FORBIDDEN[name]()) == REJECTED
    assert goes_on(client)


def test_N_VAL_17_a_subgraph_that_no_operation_calls_is_legal(client: ProtocolPeer) -> None:
    model = branching()
    prepare(client, replace(model, referenced=(*model.referenced, model.referenced[0])))
    assert goes_on(client)


HINTS: dict[str, dict[str, Any]] = {
    "N-VAL-22 token twice": {
        "hints": (messages.HintData(3 << 16 | 1, b""), messages.HintData(3 << 16 | 1, b"")),
        "extensions": (messages.PrefixData(NAME, 3),),
    },
    "N-VAL-22 no extension": {"hints": (messages.HintData(3 << 16 | 1, b""),), "extensions": ()},
    "N-VAL-22 name": {"hints": (), "extensions": (messages.PrefixData("No Name", 3),)},
}


@pytest.mark.parametrize("name", HINTS)
def test_invalid_hints_are_rejected(name: str, client: ProtocolPeer) -> None:
    client.send(prepare_message(4, **HINTS[name]))
    ready, reply = client.receive(messages.PreparedModelReady), client.receive(messages.Reply)
    assert (ready.status, ready.model_id, reply.status) == (INVALID, 0, INVALID)
    assert goes_on(client)


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"nonsense"], ids=["N-VAL-24 nothing", "N-VAL-24 null", "N-VAL-24 noise"]
)
def test_a_missing_model_is_rejected(data: bytes, client: ProtocolPeer) -> None:
    assert statuses_of(client, data) == REJECTED
    assert goes_on(client)
