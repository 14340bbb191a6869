"""The HAL's test models give the same outputs if ModelBuilder builds them in another order, or prepares them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TypeAlias

import pytest
from support.rebuilt import rebuilt
from support.vts_models import FOLDER, SPECS

from nnfmq.hal.errors import ErrorStatus, NnfmqError
from nnfmq.hal.types import Model, OperationType
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.targets import ExecutionOutput, ExecutionRequest, Interpreter
from nnfmq.lab.conformance.testmodels import TestModel
from nnfmq.model_builder.simplification import prepare_for_compilation

Outcome: TypeAlias = ExecutionOutput | ErrorStatus
_ENDLESS_NS = 1_000_000


def outcome(test: TestModel, model: Model) -> Outcome:
    """Return shapes and bytes of the outputs, or the status of the error."""
    is_endless = test.must_fail and model.main.operations[0].type == OperationType.WHILE
    request = ExecutionRequest(test.inputs, test.expected, loop_timeout_ns=_ENDLESS_NS if is_endless else None)
    try:
        with Interpreter().prepared(model) as prepared:
            return prepared.execute(request)
    except NnfmqError as error:
        return error.status


def rebuilt_outcome(test: TestModel) -> Outcome:
    order = list(range(len(test.model.main.operations)))
    random.Random(test.name).shuffle(order)
    try:
        with rebuilt(test.model, order) as builder:
            return outcome(test, builder.model)
    except NnfmqError as error:
        return error.status


def prepared_outcome(test: TestModel) -> Outcome:
    try:
        model = prepare_for_compilation(test.model)
    except NnfmqError as error:
        return error.status
    assert prepare_for_compilation(model) is model
    return outcome(test, model)


@pytest.mark.parametrize("spec", SPECS)
def test_API_3_API_4_N_API_11_a_rebuilt_model_and_one_prepared_for_compilation_have_the_same_outputs(
    spec: str, data_dir: Path
) -> None:
    """Removed arguments and operands do not matter, and a model that is prepared needs no further change."""
    for _, line in testmodels.lines(FOLDER / f"{spec}.jsonl.gz"):
        test = testmodels.read(line)
        expected = outcome(test, test.model)
        assert rebuilt_outcome(test) == expected, test.name
        assert prepared_outcome(test) == expected, test.name
