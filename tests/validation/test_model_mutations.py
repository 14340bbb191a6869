"""The HAL's test models, with every mutation that its test suite makes: each is rejected.

The ordinary run takes a model for each operation, argument count and combination of types, and of the 50,000 replaced
types of arguments (N-MOD-10) every fourth; the deep tier takes all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from support.model_mutations import FAMILIES, mutants
from support.small_models import two_adds
from support.vts_models import FOLDER, SPECS, one_of_each

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Model
from nnfmq.lab.conformance import testmodels
from nnfmq.operations import HAL_DECLARATIONS
from nnfmq.validation import validate_model


def accepted(name: str, model: Model, *rules: str, first: int = 0, step: int = 1) -> Iterator[str]:
    """Yield the mutations of a legal model, all or some, that validation accepts. Other exceptions end the test."""
    validate_model(model, allow_unspecified_boundaries=True)
    for mutant in islice(mutants(model, *rules), first, None, step):
        try:
            validate_model(mutant.model, allow_unspecified_boundaries=True)
        except InvalidArgument:
            continue
        yield f"{mutant.rule}: {name}: {mutant.what}"


@pytest.mark.parametrize("rule", FAMILIES)
def test_every_operation_mutated_as_in_the_hal_s_suite_is_rejected(rule: str, data_dir: Path) -> None:
    step = 4 if rule == "N-MOD-10" else 1
    found = [
        what
        for number, test in enumerate(one_of_each())
        for what in accepted(test.name, test.model, rule, first=number % step, step=step)
    ]

    assert found == []


@pytest.mark.deep
@pytest.mark.parametrize("spec", SPECS)
def test_N_MOD_1_to_20_every_test_model_mutated_as_in_the_hal_s_suite_is_rejected(spec: str) -> None:
    tests = [testmodels.read(line) for _, line in testmodels.lines(FOLDER / f"{spec}.jsonl.gz")]
    found = [what for test in tests if not is_rejected(test) for what in accepted(test.name, test.model)]

    assert found == []


def is_rejected(test: testmodels.TestModel) -> bool:
    """Return True for a model that is invalid unchanged; the test model must be marked so."""
    try:
        validate_model(test.model, allow_unspecified_boundaries=True)
    except InvalidArgument:
        assert test.must_fail
        return True
    return False


def test_the_chosen_models_have_every_operation_and_every_mutation(data_dir: Path) -> None:
    operations = set().union(*(testmodels.operation_types(test.line) for test in one_of_each()))

    assert operations == set(HAL_DECLARATIONS)
    assert {mutant.rule for test in one_of_each()[::10] for mutant in mutants(test.model)} == set(FAMILIES)


def test_a_mutated_model_differs_from_the_legal_one_which_stays_as_it_was() -> None:
    model = two_adds()
    found = list(mutants(model))

    assert model == two_adds()
    assert all(mutant.model != model for mutant in found)
    assert {mutant.rule for mutant in found} == set(FAMILIES)


def test_N_MOD_10_if_a_type_is_replaced_the_operand_by_itself_stays_legal() -> None:
    for mutant in mutants(two_adds(), "N-MOD-10"):
        with pytest.raises(
            InvalidArgument, match=r"\(ADD\): .*\(S[24]\)$|\(N-VAL-1\)$"
        ):  # SUBGRAPH goes with its own lifetime
            validate_model(mutant.model)
