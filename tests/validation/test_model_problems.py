"""model_problems finds the violated rules of all parts of a model, and none exactly if validate_model accepts it."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.control_flow_models import branching, counting
from support.model_mutations import FAMILIES, mutants
from support.models import add_model, null_model
from support.small_models import two_adds, with_main, with_operand, with_operation
from support.vts_models import one_of_each

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import DataLocation, ExtensionNameAndPrefix, LifeTime, Model, OperandType, OperationType, Subgraph
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.validation import model_problems, validate_model


def rules(model: Model) -> list[str]:
    return [problem.rule for problem in model_problems(model)]


def first_error(model: Model) -> str | None:
    try:
        validate_model(model, allow_unspecified_boundaries=True)
    except InvalidArgument as error:
        return str(error)
    return None


@pytest.mark.parametrize("model", [null_model(), add_model(), two_adds(), branching(), counting()])
def test_a_valid_model_has_no_problems(model: Model) -> None:
    assert model_problems(model) == []


def test_every_invalid_part_is_named_with_its_rule() -> None:
    model = with_operand(two_adds(), 0, scale=2.0)
    model = with_operand(model, 1, dimensions=(1 << 20, 1 << 20))
    model = replace(model, extensions=(ExtensionNameAndPrefix("Not a name", 1),))
    found = model_problems(model)
    assert [problem.rule for problem in found][1:] == ["N-MOD-4", "N-VAL-3"]
    assert found[1].text == "operand 0: scale 2.0, TENSOR_FLOAT32 requires scale 0"
    assert "Not a name" in found[0].text


def test_operations_are_checked_beside_each_other_but_not_with_invalid_operands() -> None:
    model = with_operation(two_adds(), 0, inputs=(0,))
    model = with_operation(model, 1, type=OperationType.SOFTMAX)
    assert rules(model) == ["S1", "S2"]
    assert rules(with_operand(model, model.main.operations[1].outputs[0], zero_point=1)) == ["N-MOD-5", "S1"]


def test_parts_that_depend_on_invalid_ones_are_not_checked() -> None:
    assert rules(with_operand(two_adds(), 0, type=99)) == ["N-MOD-2"]
    assert rules(with_operation(two_adds(), 0, inputs=(77, 0, 1))) == ["N-MOD-12"]
    assert rules(with_main(two_adds(), input_indexes=())) == ["N-MOD-7"]


def test_an_empty_subgraph_an_unwritten_operand_and_a_cycle_are_problems() -> None:
    assert rules(Model(Subgraph((), (), (), ()))) == ["N-VAL-15"]
    model = two_adds()
    assert rules(with_main(model, operations=model.main.operations[:1])) == ["N-VAL-16"]
    names = [i for i, operand in enumerate(branching().main.operands) if operand.lifetime is LifeTime.SUBGRAPH]
    graph = replace(
        branching().main,
        operands=tuple(
            replace(operand, location=DataLocation(0, 0, 0)) if i in names else operand
            for i, operand in enumerate(branching().main.operands)
        ),
    )
    assert rules(replace(branching(), referenced=(graph, graph))) == ["N-VAL-17"]
    assert rules(with_operand(branching(), 0, type=OperandType.TENSOR_FLOAT32)) != []


def test_the_size_of_pools_is_checked() -> None:
    assert rules(replace(two_adds(), pools=(BytesPool(b""),))) == ["N-VAL-13"]


@pytest.mark.parametrize("rule", FAMILIES)
def test_models_mutated_as_in_the_hal_s_suite_have_a_problem_for_each_error(rule: str, data_dir: Path) -> None:
    for test in islice(one_of_each(), 0, None, 7):
        for mutant in islice(mutants(test.model, rule), 0, None, 5):
            found, error = model_problems(mutant.model, allow_unspecified_boundaries=True), first_error(mutant.model)
            assert bool(found) == (error is not None)
            assert error is None or error in [f"{text} ({name})" for name, text in found]
            assert all(re.fullmatch(r"[A-Z]+(-[A-Z]+)?-?\d+", problem.rule) for problem in found)
