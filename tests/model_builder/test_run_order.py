"""Operations in run order: any order of addition is legal, cycles and values without one writer are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.models import add_model
from support.small_models import F32, INPUT, OUTPUT, TEMPORARY, with_operation

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import ExtensionNameAndPrefix, LifeTime, Operand, Operation, OperationType, Subgraph
from nnfmq.model_builder.simplification import in_run_order, prepare_for_compilation

VALUE = Operand(F32, (2, 2))


def graph(operations: list[tuple[list[int], list[int]]], inputs: tuple[int, ...] = (0,), count: int = 0) -> Subgraph:
    """Return a subgraph of ADDs, which read and write these operands; the last operand is the output."""
    total = count or 1 + max(index for pair in operations for part in pair for index in part)
    operands = [replace(VALUE, lifetime=INPUT if index in inputs else TEMPORARY) for index in range(total)]
    operands[-1] = replace(VALUE, lifetime=OUTPUT)
    made = [Operation(OperationType.ADD, tuple(reads), tuple(writes)) for reads, writes in operations]
    return Subgraph(tuple(operands), tuple(made), inputs, (total - 1,))


def rejection(subgraph: Subgraph) -> str:
    with pytest.raises(InvalidArgument) as caught:
        in_run_order(subgraph)
    return str(caught.value)


def test_API_4_a_subgraph_in_order_is_returned_itself() -> None:
    ordered = graph([([0], [1]), ([0, 1], [2])])
    assert in_run_order(ordered) is ordered


def test_API_4_N_API_11_an_operation_added_before_those_that_it_reads_comes_after_them() -> None:
    subgraph = in_run_order(graph([([1, 2], [3]), ([1], [2]), ([0], [1])]))
    assert [operation.outputs for operation in subgraph.operations] == [(1,), (2,), (3,)]


def test_API_4_operations_that_do_not_depend_on_each_other_keep_their_order() -> None:
    subgraph = in_run_order(graph([([3], [4]), ([0], [1]), ([0], [2]), ([1, 2], [3])]))
    assert [operation.outputs for operation in subgraph.operations] == [(1,), (2,), (3,), (4,)]


@given(st.data())
def test_API_4_N_API_11_every_order_of_addition_becomes_a_run_order(data: st.DataObject) -> None:
    """Operation i writes operand i + 1, and reads earlier operands, some of them twice."""
    count = data.draw(st.integers(1, 12))
    reads = [data.draw(st.lists(st.integers(0, i), min_size=1, max_size=3)) for i in range(count)]
    operations = [(reads[i], [i + 1]) for i in range(count)]
    shuffled = graph(data.draw(st.permutations(operations)), count=count + 1)
    sorted_operations = in_run_order(shuffled).operations
    assert sorted(sorted_operations, key=lambda o: o.outputs) == sorted(shuffled.operations, key=lambda o: o.outputs)
    known = {0}
    for operation in sorted_operations:
        assert known.issuperset(operation.inputs)
        known.update(operation.outputs)


def test_N_API_10_a_cycle_is_named() -> None:
    subgraph = graph([([0], [1]), ([1, 4], [2]), ([2], [3]), ([3], [4])])
    assert "operation 1 (ADD) → operation 3 (ADD) → operation 2 (ADD) → operation 1 (ADD)" in rejection(subgraph)


def test_N_API_10_operations_after_a_cycle_are_not_part_of_it() -> None:
    """Operation 0 only reads what the cycle of 1 and 2 writes."""
    subgraph = graph([([1], [3]), ([2], [1]), ([1], [2])])
    text = rejection(subgraph)
    assert "operation 1 (ADD) → operation 2 (ADD) → operation 1 (ADD)" in text
    assert "operation 0" not in text


def test_N_API_10_an_operation_that_reads_its_own_output_is_a_cycle() -> None:
    assert "operation 0 (ADD) → operation 0 (ADD)" in rejection(graph([([0, 1], [1])]))


@pytest.mark.parametrize(("length", "named", "is_cut"), [(7, 8, False), (8, 8, True), (20, 8, True)])
def test_N_API_10_of_a_long_cycle_the_first_operations_are_named(length: int, named: int, is_cut: bool) -> None:
    ring = [([i], [i + 1]) for i in range(1, length)]
    text = rejection(graph([([length], [1]), *ring], count=length + 1))
    assert text.count("(ADD)") == named
    assert ("→ …" in text) is is_cut


def test_N_API_10_two_operations_that_write_an_operand_are_named() -> None:
    text = rejection(graph([([0], [1]), ([0], [1]), ([1], [2])]))
    assert "operand 1 (TENSOR_FLOAT32 2x2) is written twice, by operation 0 (ADD) and operation 1 (ADD)" in text


def test_N_API_10_an_operation_that_writes_an_operand_twice_is_named() -> None:
    assert "by operation 0 (ADD) and operation 0 (ADD)" in rejection(graph([([0], [1, 1])]))


def test_N_API_10_an_operand_that_is_read_and_never_written_is_named_with_its_reader() -> None:
    text = rejection(graph([([0], [1]), ([1, 2], [3])]))
    assert "no operation writes operand 2 (TENSOR_FLOAT32 2x2) and operation 1 (ADD) reads it" in text
    assert "make it an input, or set its value" in text


@pytest.mark.parametrize("lifetime", [TEMPORARY, OUTPUT])
def test_N_API_10_an_operand_that_nothing_reads_or_writes_is_named(lifetime: LifeTime) -> None:
    subgraph = graph([([0], [1])])
    unused = replace(subgraph, operands=(*subgraph.operands, replace(VALUE, lifetime=lifetime)))
    assert "no operation writes operand 2 (TENSOR_FLOAT32 2x2): make it" in rejection(unused)


@pytest.mark.parametrize(("reads", "writes"), [([0, 5], [1]), ([-1], [1]), ([0], [5])])
def test_N_API_8_an_index_without_an_operand_is_rejected(reads: list[int], writes: list[int]) -> None:
    subgraph = graph([(reads, writes)], count=2)
    assert "operation 0 (ADD) has operand" in rejection(subgraph)


def test_API_4_a_whole_model_is_ordered_validated_and_returned_itself_if_nothing_changes() -> None:
    model = add_model()
    assert prepare_for_compilation(model) is model
    with pytest.raises(InvalidArgument, match="argument 2"):
        prepare_for_compilation(with_operation(model, 0, inputs=(0, 1, 1)))


def test_API_4_two_extensions_with_one_prefix_are_rejected() -> None:
    extensions = (ExtensionNameAndPrefix("com.example.a", 1), ExtensionNameAndPrefix("com.example.b", 1))
    with pytest.raises(InvalidArgument, match="a prefix is given twice"):
        prepare_for_compilation(replace(add_model(), extensions=extensions))


def test_API_4_errors_name_the_referenced_subgraph() -> None:
    wrong = graph([([0], [1]), ([0], [1])])
    with pytest.raises(InvalidArgument, match=r"^referenced subgraph 0, operand 1 "):
        prepare_for_compilation(replace(add_model(), referenced=(wrong,)))
