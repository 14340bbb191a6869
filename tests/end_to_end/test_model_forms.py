"""The parts of a model as a driver process receives them: constants, pools, subgraphs, omitted and unused operands."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.control_flow_models import Parts, inputs, named, output
from support.small_models import (
    F32,
    I32,
    INPUT,
    OUTPUT,
    Q8,
    graph,
    one_operation,
    two_adds,
    vector,
    with_main,
    with_operand,
    with_operation,
)

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
)
from nnfmq.serialize.models import encode_model

REALS = np.array([1, 2], np.float32)
PER_CHANNEL = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL


@pytest.fixture
def pool() -> Iterator[Memory]:
    with Memory.create(4096, "constants") as made:
        np.frombuffer(made.view, np.float32, 1000, offset=64)[:] = np.arange(1000)
        yield made


def executed(device: nnfmq.Device, model: Model, *arguments: Any) -> Any:
    with device.prepare(model) as prepared:
        return prepared.execute(*arguments)[0]


def added(count: int) -> Model:
    """Return x + 0, 1, 2, ...: a constant whose data is in the model."""
    tensor = Operand(F32, (count,))
    data = np.arange(count, dtype=np.float32).tobytes()
    return one_operation(OperationType.ADD, [tensor, (tensor, data), 0], tensor)


def in_a_pool(model: Model, pool: Any) -> Model:
    """Return the model with its operand 1 at offset 64 of a pool."""
    place = DataLocation(0, 64, model.main.operands[1].location.length)
    moved = with_operand(model, 1, lifetime=LifeTime.CONSTANT_REFERENCE, location=place)
    return replace(moved, pools=(pool,))


def rejected(device: nnfmq.Device, model: Model, rule: str) -> None:
    for call in (device.prepare, device.supported_operations):
        with pytest.raises(nnfmq.InvalidArgument, match=rf"\({rule}\)"):
            call(model)


# ------------------------------------------------------------------------------------------------ the parts


def test_MOD_1_every_part_of_a_model_reaches_the_driver(shared_device: nnfmq.Device, pool: Memory) -> None:
    """Main and a called subgraph, inline and pooled constants, the relaxed flag, and an extension's name."""
    parts = Parts()
    branches = [named(parts.binary(code)) for code in (OperationType.ADD, OperationType.MUL)]
    truth, x = inputs(Operand(OperandType.TENSOR_BOOL8, (1,)), Operand(F32, (2,)))
    pooled = Operand(F32, (2,), lifetime=LifeTime.CONSTANT_REFERENCE, location=DataLocation(0, 64, 8))
    model = parts.model(
        [truth, *branches, x, pooled, output(Operand(F32, (2,)))], [Operation(OperationType.IF, (0, 1, 2, 3, 4), (5,))]
    )
    model = replace(
        model,
        pools=(pool,),
        relax_computation_float32_to_float16=True,
        extensions=(ExtensionNameAndPrefix("com.example.one", 1),),
    )
    with shared_device.prepare(model) as prepared:
        found = [prepared.execute(np.array([choice]), REALS)[0].tolist() for choice in (True, False)]
    assert found == [[1.0, 3.0], [0.0, 2.0]]
    twice = replace(model, extensions=model.extensions * 2)
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.prepare(twice)


def test_MOD_2_operations_run_in_the_given_order_and_a_read_before_its_write_is_rejected(
    shared_device: nnfmq.Device,
) -> None:
    chain = two_adds()
    ones = np.ones((2, 2), np.float32)
    assert executed(shared_device, chain, ones, ones * 10).tolist() == [[21, 21], [21, 21]]
    first, second = chain.main.operations
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.prepare(with_main(chain, operations=(second, first)))


def test_MOD_3_scale_and_zero_point_of_every_operand_decide_the_result(shared_device: nnfmq.Device) -> None:
    model = two_adds(Q8, 0.5, 10)
    given = np.full((2, 2), 12, np.uint8)  # 1.0
    assert executed(shared_device, model, given, given).tolist() == [[16, 16]] * 2  # 3.0 at scale 0.5 and zero point 10
    coarser = with_operand(model, 4, scale=1.0, zero_point=20)
    assert executed(shared_device, coarser, given, given).tolist() == [[23, 23]] * 2


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (3, {"location": DataLocation(0, 0, 4)}),
        (0, {"location": DataLocation(0, 0, 16)}),
        (2, {"location": DataLocation(0, 0, 1 << 20)}),
        (2, {"lifetime": LifeTime.CONSTANT_REFERENCE}),
        (2, {"lifetime": LifeTime.NO_VALUE}),
        (3, {"lifetime": LifeTime.SUBGRAPH}),
    ],
)
def test_MOD_4_a_location_that_the_lifetime_does_not_allow_is_rejected(
    index: int, changes: Any, shared_device: nnfmq.Device
) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.prepare(with_operand(two_adds(), index, **changes))


def test_MOD_5_unknown_extents_take_any_size_and_a_scalar_has_none(shared_device: nnfmq.Device) -> None:
    model = one_operation(OperationType.RELU, [Operand(F32, (0, 2))], Operand(F32, ()))
    with shared_device.prepare(model) as prepared:
        for rows in (1, 3):
            given = np.full((rows, 2), -1, np.float32)
            assert prepared.execute(given)[0].shape == (rows, 2)
        with pytest.raises(nnfmq.InvalidArgument):
            prepared.execute(np.zeros((2, 3), np.float32))
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.prepare(with_operand(two_adds(), 2, dimensions=(1,)))  # the activation, a scalar


def test_MOD_5_HAL_1_1_requires_the_rank_of_every_operand() -> None:
    """Unknown extents are legal as in the vectors of HAL 1.0."""
    cases = [(0, (), False), (3, (), False), (4, (), False), (0, (0, 2), True), (3, (0, 2), True)]
    ones = np.ones((2, 2), np.float32)
    with nnfmq.connect(embedded=True, interface="HIDL 1.1") as client:
        old = client.device("reference")
        for index, dimensions, is_legal in cases:
            model = with_operand(two_adds(), index, dimensions=dimensions)
            if is_legal:
                assert executed(old, model, ones, ones).tolist() == [[3, 3], [3, 3]]
                continue
            with pytest.raises(nnfmq.InvalidArgument):
                old.prepare(model)


def per_channel(**changes: Any) -> Model:
    """CONV_2D of one pixel: two channels from one, with weights 2 and 4 at scales 0.5 and 0.25."""
    quant = changes.pop("channel_quant", ChannelQuant((0.5, 0.25), 0))
    weights = replace(Operand(PER_CHANNEL, (2, 1, 1, 1), channel_quant=quant), **changes)
    bias = Operand(I32, (2,))
    arguments = [
        Operand(Q8, (1, 1, 1, 1), 1.0, 0), (weights, bytes([2, 4])), (bias, bytes(8)), 2, 1, 1, 0,
    ]  # fmt: skip
    return one_operation(OperationType.CONV_2D, arguments, Operand(Q8, (1, 1, 1, 2), 1.0, 0))


def test_MOD_6_MOD_7_each_channel_has_its_own_scale(shared_device: nnfmq.Device) -> None:
    assert executed(shared_device, per_channel(), np.array([[[[10]]]], np.uint8)).reshape(-1).tolist() == [10, 10]
    other = per_channel(channel_quant=ChannelQuant((1.0, 0.25), 0))
    assert executed(shared_device, other, np.array([[[[10]]]], np.uint8)).reshape(-1).tolist() == [20, 10]


@pytest.mark.parametrize(
    "changes",
    [
        {"channel_quant": None},
        {"channel_quant": ChannelQuant((0.5,), 0)},
        {"channel_quant": ChannelQuant((0.5, 0.25), 4)},
        {"channel_quant": ChannelQuant((0.5, 0.0), 0)},
        {"scale": 1.0},
        {"zero_point": 1},
    ],
    ids=["none", "too few", "dimension", "zero", "scale", "zero point"],
)
def test_MOD_6_MOD_7_wrong_channel_parameters_are_rejected(changes: Any, shared_device: nnfmq.Device) -> None:
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.prepare(per_channel(**changes))


@pytest.mark.parametrize("count", [2, 1000])
def test_MOD_8_a_constant_means_the_same_in_the_model_and_in_a_pool(
    count: int, shared_device: nnfmq.Device, pool: Memory
) -> None:
    ones = np.ones(count, np.float32)
    for model in (added(count), in_a_pool(added(count), pool)):
        assert executed(shared_device, model, ones).tolist() == list(range(1, count + 1))


def test_MOD_9_a_pool_that_is_overwritten_afterwards_changes_no_prepared_model(
    shared_device: nnfmq.Device, pool: Memory
) -> None:
    with shared_device.prepare(in_a_pool(added(2), pool)) as prepared:
        pool.view[:] = bytes(4096)
        assert prepared.execute(REALS)[0].tolist() == [1, 3]


def test_MOD_10_the_first_dimension_is_the_slowest_and_rows_have_no_gaps(shared_device: nnfmq.Device) -> None:
    cube = np.frombuffer(np.arange(24, dtype="<i4").tobytes(), np.int32).reshape(2, 3, 4)
    arguments = [Operand(I32, (2, 3, 4)), vector([1, 2, 0]), vector([1, 1, 4])]
    row = executed(shared_device, one_operation(OperationType.SLICE, arguments, Operand(I32, (1, 1, 4))), cube)
    assert struct.unpack("<4i", row.tobytes()) == (20, 21, 22, 23)  # (1 * 3 + 2) * 4 + 0 ... 3


def nested() -> Model:
    """IF whose branches are subgraphs with another IF: a - b or a * b."""
    parts = Parts()
    real, truth = Operand(F32, (2,)), Operand(OperandType.TENSOR_BOOL8, (1,))
    leaves = [named(parts.binary(code, real)) for code in (OperationType.SUB, OperationType.MUL)]
    inner_operands = [*inputs(truth, real, real), *leaves, output(real)]
    inner = parts.add(inner_operands, [Operation(OperationType.IF, (0, 3, 4, 1, 2), (5,))])
    other = parts.add(inner_operands, [Operation(OperationType.IF, (0, 4, 3, 1, 2), (5,))])
    outer = [*inputs(truth, truth, real, real), named(inner), named(other), output(real)]
    return parts.model(outer, [Operation(OperationType.IF, (0, 4, 5, 1, 2, 3), (6,))])


def test_MOD_11_CF_6_subgraphs_may_call_subgraphs_but_not_themselves(shared_device: nnfmq.Device) -> None:
    model = nested()
    with shared_device.prepare(model) as prepared:
        found = {
            (a, b): prepared.execute(np.array([a]), np.array([b]), REALS, REALS * 3)[0].tolist()
            for a in (True, False)
            for b in (True, False)
        }
    assert found == {
        (True, True): [-2, -4], (True, False): [3, 12], (False, True): [3, 12], (False, False): [-2, -4],
    }  # fmt: skip
    inner = model.referenced[2]
    itself = tuple(named(2) if o.lifetime is LifeTime.SUBGRAPH else o for o in inner.operands)
    cyclic = (*model.referenced[:2], replace(inner, operands=itself), *model.referenced[3:])
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.prepare(replace(model, referenced=cyclic))


def test_MOD_12_operands_may_be_omitted_where_the_operation_says_so(shared_device: nnfmq.Device) -> None:
    squeezed = one_operation(OperationType.SQUEEZE, [Operand(F32, (1, 2, 1)), None], Operand(F32, (2,)))  # all axes
    assert executed(shared_device, squeezed, REALS.reshape(1, 2, 1)).tolist() == [1, 2]
    adding = two_adds()
    with pytest.raises(nnfmq.InvalidArgument):
        shared_device.prepare(with_operand(with_main(adding, input_indexes=(0,)), 1, lifetime=LifeTime.NO_VALUE))


def test_MOD_14_an_OEM_operation_is_valid_but_supported_by_no_device(shared_client: nnfmq.Client) -> None:
    oem = Operand(OperandType.TENSOR_OEM_BYTE, (4,), lifetime=INPUT)
    model = graph([oem, replace(oem, lifetime=OUTPUT)], [Operation(OperationType.OEM_OPERATION, (0,), (1,))])
    for info in shared_client.devices():
        assert shared_client.device(info.name).supported_operations(model) == [False]
    with pytest.raises(nnfmq.NnfmqError) as caught:
        shared_client.device("reference").prepare(model)
    assert not isinstance(caught.value, nnfmq.DeadObject)


def test_MOD_16_a_driver_changes_no_model_and_prepares_one_for_many_threads(
    shared_device: nnfmq.Device, pool: Memory
) -> None:
    model = in_a_pool(added(1000), pool)
    before, data = bytes(pool.view), encode_model(model)[0]

    def run(value: int) -> bool:
        return executed(shared_device, model, np.full(1000, value, np.float32)).tolist() == list(
            range(value, 1000 + value)
        )

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(12))) == [True] * 12
    assert (bytes(pool.view), encode_model(model)[0]) == (before, data)


# ------------------------------------------------------------------------------------------------ validation


def test_VAL_2_an_operation_needs_the_version_that_introduced_it() -> None:
    model = one_operation(OperationType.ABS, [Operand(F32, (2,))], Operand(F32, (2,)))  # since 1.2
    for interface, is_legal in (("HIDL 1.1", False), ("HIDL 1.2", True)):
        with nnfmq.connect(embedded=True, interface=interface) as client:
            device = client.device("reference")
            if is_legal:
                assert executed(device, model, -REALS).tolist() == [1, 2]
                continue
            with pytest.raises(nnfmq.InvalidArgument, match=r"HIDL 1\.2"):
                device.prepare(model)


def test_VAL_6_unused_inputs_are_legal_and_unwritten_or_rewritten_operands_are_not(shared_device: nnfmq.Device) -> None:
    chain = two_adds()
    unused = Operand(F32, (3,), lifetime=INPUT)
    wider = with_main(chain, operands=(*chain.main.operands, unused), input_indexes=(0, 1, 5))
    ones = np.ones((2, 2), np.float32)
    assert executed(shared_device, wider, ones, ones, np.zeros(3, np.float32)).tolist() == [[3, 3], [3, 3]]
    for outputs in ((3,), (4,)):  # the second operation writes the temporary again; the output is never written
        if outputs == (4,):
            broken = with_main(chain, operations=chain.main.operations[:1])
        else:
            broken = with_operation(chain, 1, outputs=outputs)
        with pytest.raises(nnfmq.InvalidArgument):
            shared_device.prepare(broken)
