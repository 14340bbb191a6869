"""Slices: what a feature level can express of a model, and how a device's answer for it applies to the source."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.control_flow_models import REAL, TRUTH, Parts, branching, inputs, named, output
from support.planned import FakeDevice
from support.sketches import ANY_LENGTH, ANY_RANK, HALVES, VECTOR, Sketch, chain
from support.small_models import scalar, with_operand

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import ExtensionNameAndPrefix, LifeTime, Model, Operand, OperandType, Operation, OperationType
from nnfmq.planning.device_assignment import DeviceAssignment, PlanOptions
from nnfmq.planning.plan import MAIN
from nnfmq.planning.sub_models import MetaModel, ModelSlice, NeededLevels
from nnfmq.validation import validate_model

RELU, EXP, HARD_SWISH, FLOOR, IF = (
    OperationType.RELU,
    OperationType.EXP,
    OperationType.HARD_SWISH,
    OperationType.FLOOR,
    OperationType.IF,
)


def sliced(model: Model, level: int, subgraph: int = MAIN) -> ModelSlice | None:
    """Return the slice, after checking that it is valid for the level."""
    validate_model(model, allow_unspecified_boundaries=True)
    found = MetaModel(model, NeededLevels(model), subgraph).slice(level)
    assert found is None or validate_model(found.model) <= level
    return found


def kept(model: Model, level: int) -> tuple[int, ...]:
    found = sliced(model, level)
    return () if found is None else found.operations


@pytest.mark.parametrize(("level", "operations"), [(1, (0, 3)), (2, (0, 3)), (3, (0, 1, 3)), (4, (0, 1, 2, 3))])
def test_PART_2_a_slice_has_the_operations_that_the_level_knows(level: int, operations: tuple[int, ...]) -> None:
    assert kept(chain(RELU, EXP, HARD_SWISH, FLOOR), level) == operations


def test_PART_2_what_a_missing_operation_writes_is_an_input_of_the_slice_and_what_it_reads_an_output() -> None:
    found = sliced(chain(RELU, HARD_SWISH, RELU), 3)

    assert found is not None
    assert found.model.main.operations == (Operation(RELU, (0,), (1,)), Operation(RELU, (2,), (3,)))
    lifetimes = [operand.lifetime.name for operand in found.model.main.operands]
    assert lifetimes == ["SUBGRAPH_INPUT", "SUBGRAPH_OUTPUT", "SUBGRAPH_INPUT", "SUBGRAPH_OUTPUT"]
    assert found.model.main.input_indexes == (0, 2)
    assert found.model.main.output_indexes == (3, 1)  # the model's own outputs first


def test_PART_2_an_output_of_the_model_that_a_missing_operation_reads_is_listed_once() -> None:
    sketch = Sketch()
    x, shared = sketch.input(), sketch.output()
    sketch.operation(RELU, [x], shared)
    sketch.operation(HARD_SWISH, [shared], sketch.output())

    found = sliced(sketch.model(), 3)

    assert found is not None
    assert found.model.main.output_indexes == (1,)


def test_PART_2_a_result_that_nobody_reads_stays_a_temporary_of_the_slice() -> None:
    sketch = Sketch()
    x, unread, between = sketch.input(), sketch.temporary(), sketch.temporary()
    sketch.operation(RELU, [x], unread)
    sketch.operation(HARD_SWISH, [x], between)
    sketch.operation(RELU, [between], sketch.output())

    found = sliced(sketch.model(), 3)

    assert found is not None
    assert found.model.main.operands[1].lifetime == LifeTime.TEMPORARY_VARIABLE
    assert [found.model.main.input_indexes, found.model.main.output_indexes] == [(0, 2), (3,)]


def test_PART_2_a_model_that_the_level_knows_is_its_own_slice() -> None:
    model = chain(RELU, EXP, FLOOR)

    found = sliced(model, 3)

    assert found is not None
    assert found.model is model


def test_PART_2_types_decide_as_operations_do() -> None:
    sketch = Sketch()
    halves, x = sketch.input(HALVES), sketch.input()
    sketch.operation(RELU, [halves], sketch.output(HALVES))
    sketch.operation(RELU, [x], sketch.output())

    assert kept(sketch.model(), 2) == (1,)  # TENSOR_FLOAT16 is of HAL 1.2


def test_PART_2_the_slice_of_a_level_that_knows_no_operation_is_empty_and_the_device_is_not_asked() -> None:
    model, device = chain(HARD_SWISH), FakeDevice("acme-old", feature_level=3)

    assert sliced(model, 3) is None
    with pytest.raises(InvalidArgument, match="no device can execute operation 0"):
        DeviceAssignment(model, [device], PlanOptions()).of(MAIN)
    assert not device.asked


@pytest.mark.parametrize(("level", "operations"), [(1, ()), (2, ()), (3, (0, 2, 3)), (4, (0, 1, 2, 3))])
def test_PART_2_before_HAL_1_2_no_operation_stays_whose_boundary_has_an_unknown_size(
    level: int, operations: tuple[int, ...]
) -> None:
    """HARD_SWISH is cut out; its neighbours become boundaries; so are their neighbours without them, and so on."""
    assert kept(chain(RELU, HARD_SWISH, RELU, FLOOR, between=ANY_LENGTH), level) == operations


@pytest.mark.parametrize(("unknown", "operations"), [(ANY_LENGTH, (0, 1)), (ANY_RANK, ())])
def test_PART_2_before_HAL_1_2_a_temporary_may_have_an_unknown_extent_but_no_unknown_rank(
    unknown: Operand, operations: tuple[int, ...]
) -> None:
    assert kept(chain(RELU, FLOOR, between=unknown), 1) == operations


@pytest.mark.parametrize(("level", "operations"), [(2, (1,)), (3, (0, 1))])
def test_PART_2_before_HAL_1_2_inputs_and_outputs_have_a_known_size(level: int, operations: tuple[int, ...]) -> None:
    sketch = Sketch()
    unknown, x = sketch.input(ANY_LENGTH), sketch.input()
    sketch.operation(RELU, [unknown], sketch.output())
    sketch.operation(RELU, [x], sketch.output())

    assert kept(sketch.model(), level) == operations


def test_PART_2_an_output_of_unknown_size_drops_its_writer_and_the_writers_of_what_that_reads() -> None:
    sketch = Sketch()
    x, between, z = sketch.input(), sketch.temporary(ANY_LENGTH), sketch.output(ANY_LENGTH)
    sketch.operation(RELU, [x], between)
    sketch.operation(RELU, [between], z)
    sketch.operation(FLOOR, [x], sketch.output())

    assert kept(sketch.model(), 1) == (2,)


@pytest.mark.parametrize(("level", "is_relaxed"), [(1, False), (2, True)])
def test_PART_2_HAL_1_0_is_asked_without_the_permission_of_float16_range(level: int, is_relaxed: bool) -> None:
    model = replace(chain(RELU), relax_computation_float32_to_float16=True)

    found = sliced(model, level)

    assert found is not None
    assert found.model.relax_computation_float32_to_float16 == is_relaxed


def test_PART_2_a_slice_has_no_extension_and_no_constant_that_only_missing_operations_use() -> None:
    extension = OperationType(5 << 16 | 1)
    sketch = Sketch()
    x, none, between = sketch.input(), sketch.constant(0), sketch.temporary()
    ones = sketch.constant((VECTOR, b"\0\0\x80\x3f" * 4))
    sketch.operation(extension, [x, ones], between)
    sketch.operation(OperationType.ADD, [x, between, none], sketch.output())
    model = sketch.model(extensions=(ExtensionNameAndPrefix("com.acme.dsp", 5),))

    new, old = sliced(model, 3), sliced(model, 2)

    assert new is not None
    assert old is not None
    assert (new.operations, new.model.extensions) == ((0, 1), model.extensions)
    assert (old.operations, old.model.extensions) == ((1,), ())
    assert old.model.operand_values == scalar(0)[1]


def test_PART_2_an_operand_that_no_operation_uses_does_not_raise_the_level() -> None:
    sketch = Sketch()
    x = sketch.input()
    sketch.operation(RELU, [x], sketch.output())
    sketch.constant((Operand(OperandType.TENSOR_QUANT8_SYMM, (1,), 1.0), b"\1"))
    model = sketch.model()
    assert validate_model(model) == 3

    found = sliced(model, 1)

    assert found is not None
    assert len(found.model.main.operands) == 2


def test_PART_2_a_subgraph_that_nobody_calls_does_not_raise_the_level() -> None:
    model = replace(chain(RELU), referenced=branching().referenced, operand_values=branching().operand_values)
    assert validate_model(model) == 4

    found = sliced(model, 1)

    assert found is not None
    assert not found.model.referenced


def test_PART_2_an_input_of_a_branch_that_the_branch_does_not_read_does_not_raise_its_level() -> None:
    parts = Parts()
    newer = Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (2,), 1.0)
    branch = named(parts.add([*inputs(REAL, newer), output(REAL)], [Operation(RELU, (0,), (2,))]))
    condition, x, unread = inputs(TRUTH, REAL, newer)
    model = parts.model([condition, branch, branch, x, unread, output(REAL)], [Operation(IF, (0, 1, 2, 3, 4), (5,))])

    found = sliced(model, 1, subgraph=1)

    assert found is not None
    assert [operand.type for operand in found.model.main.operands] == [REAL.type, REAL.type]


def test_PART_2_an_IF_needs_the_level_of_what_its_branches_need() -> None:
    parts = Parts()
    operands = [*inputs(REAL), output(REAL)]
    old = parts.add(operands, [Operation(RELU, (0,), (1,))])
    new = parts.add([*inputs(REAL), output(REAL), Operand(OperandType.TENSOR_INT32, (1,))],
                    [Operation(OperationType.REVERSE, (0, 2), (1,))], c2=bytes(4))  # fmt: skip
    condition, x = inputs(TRUTH, REAL)
    outer = [condition, x, *map(named, (old, new)), output(REAL), output(REAL)]
    operations = [Operation(IF, (0, 2, 2, 1), (4,)), Operation(IF, (0, 2, 3, 1), (5,))]
    model = parts.model(outer, operations)

    assert [kept(model, level) for level in (3, 4, 6, 7)] == [(), (0,), (0,), (0, 1)]


def test_PART_2_a_slice_calls_the_subgraphs_that_the_source_calls() -> None:
    model = branching()
    found = sliced(model, 4)

    assert found is not None
    assert found.model is model
    branch = sliced(model, 1, subgraph=2)
    assert branch is not None
    assert [operation.type for operation in branch.model.main.operations] == [OperationType.MUL]


@pytest.mark.parametrize("level", [4, 8])
def test_PART_2_no_device_is_asked_about_an_IF_with_an_operand_of_unknown_size(level: int) -> None:
    model = with_operand(branching(), 5, dimensions=(0,))

    assert sliced(model, level) is None


def test_PART_2_nor_about_an_IF_around_such_an_IF() -> None:
    parts = Parts()
    inner_of = replace(REAL, dimensions=(0,))
    operands = [*inputs(inner_of), output(inner_of)]
    relu = parts.add(operands, [Operation(RELU, (0,), (1,))])
    condition, x = inputs(TRUTH, REAL)
    operands = [condition, x, named(relu), output(REAL)]
    nested = parts.add(operands, [Operation(IF, (0, 2, 2, 1), (3,))])
    operands = [condition, x, named(nested), output(REAL), output(REAL)]
    model = parts.model(operands, [Operation(IF, (0, 2, 2, 0, 1), (3,)), Operation(RELU, (1,), (4,))])

    assert kept(model, 8) == (1,)


def test_PART_2_answers_for_a_slice_are_those_of_the_source_operations() -> None:
    assert ModelSlice(chain(RELU), (1, 3)).supported_in_source([True, False], 5) == [False, True, False, False, False]


def test_PART_2_a_device_gets_the_operations_of_its_slice_that_it_supports() -> None:
    device = FakeDevice("acme-old", lambda _graph, operation: operation.type != FLOOR, feature_level=3)
    rest = FakeDevice("acme-new")
    model = chain(RELU, HARD_SWISH, FLOOR, EXP)

    assert DeviceAssignment(model, [device, rest], PlanOptions()).of(MAIN) == (0, 1, 1, 0)
    assert [operation.type for operation in device.asked[0].main.operations] == [RELU, FLOOR, EXP]


@pytest.mark.parametrize(
    ("options", "questions"), [(PlanOptions(), 1), (PlanOptions(strict_slicing=True), 0)], ids=["usual", "strict"]
)
def test_PART_2_strict_slicing_offers_only_valid_models(options: PlanOptions, questions: int) -> None:
    """A scale on a float tensor breaks a rule, though the level knows the operation and its types."""

    class Lenient(FakeDevice):
        def supported_operations(self, model: Model) -> list[bool]:
            self.asked.append(model)
            return [True] * len(model.main.operations)

    device, rest = Lenient("acme-old", feature_level=3), Lenient("acme-new")
    invalid = with_operand(chain(RELU, HARD_SWISH), 0, scale=1.0)

    choice = DeviceAssignment(invalid, [device], options)
    with pytest.raises(InvalidArgument):
        choice.of(MAIN)
    assert len(device.asked) == questions
    valid = chain(EXP, HARD_SWISH)  # the slice needs exactly the level of the device
    assert DeviceAssignment(valid, [device, rest], options).of(MAIN) == (0, 1)
