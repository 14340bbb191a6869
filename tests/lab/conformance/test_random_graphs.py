"""Random graphs: their classes; that each graph is valid and reproducible; that wrong outputs are detected."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.tiers import IS_DEEP

from nnfmq.hal.types import Model, OperandType, is_scalar
from nnfmq.lab.child_processes import call_in_child
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import PASSED, run_test
from nnfmq.lab.conformance.criteria import MIN_COMPARED_ELEMENTS
from nnfmq.lab.conformance.random_graphs import FAMILIES, SEEDS, Batch, GraphClass, batches, classes, generate, usages
from nnfmq.lab.conformance.random_operations import GENERATORS
from nnfmq.lab.conformance.random_source import GraphLimits, RandomSource, Sign
from nnfmq.lab.conformance.runner import open_target
from nnfmq.lab.conformance.targets import ExecutionOutput, ExecutionRequest, Interpreter, Prepared
from nnfmq.validation import validate_model

Array = npt.NDArray[Any]
Line = dict[str, Any]

FLOAT32, FLOAT16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16
TYPES = {"float32": FLOAT32, "float16": FLOAT16, "int32": OperandType.TENSOR_INT32, "bool": OperandType.TENSOR_BOOL8}
LARGEST_ELEMENTS = 10_000
DEPTH = SEEDS[1] + 1 if IS_DEEP else 1


def of_family(family: str) -> list[GraphClass]:
    return [graph_class for graph_class in classes().values() if graph_class.family == family]


@cache
def line_of(name: str, seed: int = 0) -> Line:
    return generate(classes()[name], seed)


def operands_of(line: Line, key: str) -> list[Line]:
    return [line["main"]["operands"][index] for index in line["main"][key]]


def array_of(operand: Line) -> Array:
    raw = np.frombuffer(base64.b64decode(operand["data"]), testmodels.DTYPES[operand["type"]])
    return raw.reshape(operand["dimensions"])


# ------------------------------------------------------------------------------------------------ the classes


def test_TST_6_there_are_179_tests_of_one_operation_with_dimensions_up_to_1000() -> None:
    single = of_family("single")
    assert len(single) == len({(c.code, c.exact_level) for c in single}) == 179
    assert {(c.operation_count, c.limits.dimension) for c in single} == {(1, 1000)}


@pytest.mark.parametrize(("family", "operations", "dimension"), [("small", 5, 1000), ("large", 40, 10)])
def test_TST_6_graphs_have_each_type_and_rank(family: str, operations: int, dimension: int) -> None:
    found = of_family(family)
    assert {(c.type, c.rank) for c in found} == {(t, r) for t in TYPES.values() for r in (1, 2, 3, 4)}
    assert {(c.operation_count, c.limits.dimension) for c in found} == {(operations, dimension)}


def test_TST_6_the_seeds_are_0_to_49() -> None:
    assert SEEDS == (0, 49)
    assert batches(("single",), *SEEDS)[0] == Batch("single_depth_to_space_v1_0", 0, 49)


def test_every_generator_is_used_by_a_class() -> None:
    assert set().union(*(usages(graph_class) for graph_class in classes().values())) == set(GENERATORS)


# ------------------------------------------------------------------------------------------------ the graphs


@pytest.mark.parametrize("seed", range(DEPTH))
@pytest.mark.parametrize("name", classes())
def test_TST_6_a_graph_is_valid_and_within_its_limits_and_passes_on_the_reference(name: str, seed: int) -> None:
    line, graph_class = line_of(name, seed), classes()[name]
    test = testmodels.read(line)

    assert validate_model(test.model) == testmodels.FEATURE_LEVELS[line["minSupportedVersion"]]
    assert len(test.model.main.operations) == graph_class.operation_count
    assert max(math.prod(operand.dimensions) for operand in test.model.main.operands) <= LARGEST_ELEMENTS
    assert test.inputs
    assert set(line["criteria"]) == {operand["type"] for operand in test.output_operands}
    result = run_test(test, Interpreter())
    assert [outcome for outcome in result.outcomes if outcome.status != PASSED] == []


@pytest.mark.parametrize("name", [c.name for c in classes().values() if c.type is not None])
def test_TST_6_the_first_operation_has_an_array_of_the_class_s_type_rank_and_dimensions(name: str) -> None:
    line, graph_class = line_of(name), classes()[name]
    first = line["main"]["operations"][0]
    indexes = [*first["inputs"], *first["outputs"]]
    arrays = [line["main"]["operands"][index] for index in indexes]
    fitting = [a for a in arrays if a["type"] == graph_class.type.name and len(a["dimensions"]) == graph_class.rank]
    assert any(max(array["dimensions"]) <= graph_class.limits.dimension for array in fitting)


@pytest.mark.parametrize("name", [c.name for c in of_family("large")])
def test_TST_6_operations_read_each_other_s_results(name: str) -> None:
    operands = line_of(name)["main"]["operands"]
    assert sum(operand["lifetime"] == "TEMPORARY_VARIABLE" for operand in operands) >= 10


def test_TST_6_every_operation_every_lifetime_and_both_layouts_occur() -> None:
    # one seed of each class, and more of those with omitted arguments or a layout argument
    lines = [line_of(name, seed) for name in classes() for seed in (range(4) if "squeeze" in name else range(1))]
    lines += [line_of("single_instance_normalization_v1_2", seed) for seed in range(8)]
    operations = {operation["type"] for line in lines for operation in line["main"]["operations"]}
    lifetimes = {operand["lifetime"] for line in lines for operand in line["main"]["operands"]}
    assert operations == {code.name for code in GENERATORS}
    assert lifetimes == {
        "SUBGRAPH_INPUT", "SUBGRAPH_OUTPUT", "TEMPORARY_VARIABLE", "CONSTANT_COPY", "CONSTANT_REFERENCE", "NO_VALUE",
    }  # fmt: skip
    assert {layout for line in lines for layout in layouts(line)} == {0, 1}


def layouts(line: Line) -> Iterator[int]:
    for operation in line["main"]["operations"]:
        if operation["type"] == "INSTANCE_NORMALIZATION":
            yield int(array_of(line["main"]["operands"][operation["inputs"][4]]))


def test_TST_6_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    names = ["single_conv_2d_v1_2", "small_float16_rank4", "large_uint8_rank3", "later_pack_aidl_v2"]

    def digests() -> list[str]:
        return [hashlib.sha256(json.dumps(generate(classes()[name], 7)).encode()).hexdigest() for name in names]

    assert digests() == call_in_child(digests, environment={"PYTHONHASHSEED": "1"})
    assert generate(classes()[names[0]], 7)["main"] != generate(classes()[names[0]], 8)["main"]


MIXED = GraphClass("mixed", "", GraphLimits(16, 500), classes()["large_bool_rank1"].criteria, 25, level=8)


@pytest.mark.parametrize("seed", range(12))
def test_a_custom_class_mixes_types_ranks_and_feature_levels(seed: int) -> None:
    test = testmodels.read(generate(MIXED, seed))

    assert len({operand.type for operand in test.model.main.operands}) > 5
    assert max(math.prod(operand.dimensions) for operand in test.model.main.operands) <= 500
    assert run_test(test, Interpreter()).outcomes[0].status == PASSED


def test_a_batch_yields_the_graphs_whose_names_match() -> None:
    batch = Batch("single_relu_v1_0", 3, 12)
    assert batch.seeds(re.compile("_seed_1")) == [10, 11, 12]
    assert [seed for seed, _ in batch.lines(re.compile("_seed_12$"))] == [12]


# ------------------------------------------------------------------------------------------------ expected outputs


def seed_with(name: str, type: str) -> Line:
    """Return the first graph of a class whose first output has this type and enough elements to evaluate means."""
    outputs = ((line_of(name, seed), operands_of(line_of(name, seed), "outputIndexes")[0]) for seed in range(50))
    return next(
        line for line, o in outputs if o["type"] == type and math.prod(o["dimensions"]) >= MIN_COMPARED_ELEMENTS
    )


def arguments_of(line: Line) -> list[Line]:
    (operation,) = line["main"]["operations"]
    return [line["main"]["operands"][index] for index in operation["inputs"]]


def test_TST_6_float16_outputs_are_computed_in_float32_and_rounded_once() -> None:
    line = seed_with("single_exp_v1_2", "TENSOR_FLOAT16")
    (source,), (output,) = arguments_of(line), operands_of(line, "outputIndexes")
    exact = np.exp(array_of(source).astype(np.float64))
    assert np.abs(array_of(output) - exact).max() <= 2.0**-11 * exact.max()  # one rounding


def test_TST_6_quantized_outputs_are_computed_from_real_numbers() -> None:
    line = seed_with("single_mul_v1_0", "TENSOR_QUANT8_ASYMM")
    first, second, activation = arguments_of(line)
    (output,) = operands_of(line, "outputIndexes")
    a, b = ((array_of(o).astype(np.float64) - o["zeroPoint"]) * o["scale"] for o in (first, second))
    low, high = {0: (-np.inf, np.inf), 1: (0, np.inf), 2: (-1, 1), 3: (0, 6)}[int(array_of(activation))]
    exact = np.clip(a * b, low, high) / output["scale"] + output["zeroPoint"]
    assert np.abs(array_of(output) - np.clip(exact, 0, 255)).max() <= 0.5 + 1e-3


# ---------------------------------------------------------------------------------------- detection of wrong outputs


class ChangedOutputs(Interpreter):
    """The interpreter, with outputs changed by a function."""

    def __init__(self, change: Callable[[Array], Array]) -> None:
        self.change = change

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        with super().prepared(model) as prepared:
            yield _Changed(prepared, self.change)


@dataclass(frozen=True)
class _Changed:
    prepared: Prepared
    change: Callable[[Array], Array]

    def execute(self, execution: ExecutionRequest) -> ExecutionOutput:
        executed = self.prepared.execute(execution)
        pairs = zip(execution.expected, executed.outputs, strict=True)
        changed = (self.change(np.frombuffer(raw, e.dtype, e.size).reshape(e.shape)).tobytes() for e, raw in pairs)
        return replace(executed, outputs=tuple(changed))


def add_to_first(difference: float) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        changed = array.copy()
        changed.reshape(-1)[0] += array.dtype.type(difference)
        return changed

    return change


def reason_of_failure(name: str, type: str, change: Callable[[Array], Array]) -> str:
    line = seed_with(name, type)
    return run_test(testmodels.read(line), ChangedOutputs(change)).outcomes[0].reason


@pytest.mark.parametrize(
    ("name", "type", "change", "mismatch"),
    [
        ("single_transpose_v1_1", "TENSOR_FLOAT32", add_to_first(1e-4), "elements are wrong"),
        ("single_transpose_v1_1", "TENSOR_FLOAT32", lambda a: a + np.float32(9e-7), "the mean difference is"),
        ("single_transpose_v1_2", "TENSOR_FLOAT16", add_to_first(0.1), "elements are wrong"),
        ("single_relu_v1_0", "TENSOR_QUANT8_ASYMM", lambda a: np.clip(a, 2, 253) + np.uint8(2), "the mean difference"),
        ("single_greater_v1_2", "TENSOR_BOOL8", lambda a: 1 - a, "elements are wrong"),
        ("single_argmax_v1_2", "TENSOR_INT32", add_to_first(2), "elements are wrong"),
        ("large_int32_rank4", "TENSOR_INT32", add_to_first(2), "elements are wrong"),
    ],
)
def test_TST_6_small_errors_of_an_engine_are_detected(
    name: str, type: str, change: Callable[[Array], Array], mismatch: str
) -> None:
    assert mismatch in reason_of_failure(name, type, change)


# ------------------------------------------------------------------------------------------------ through a driver


STRATA = [*list(classes())[::7], "later_pack_aidl_v2"]


@pytest.mark.parametrize("path", ["sync", "burst"])
def test_TST_6_a_driver_passes_graphs_of_every_family(path: str) -> None:
    assert {classes()[name].family for name in STRATA} == set(FAMILIES)
    with closing(open_target(path, "reference", "embedded")) as target:
        results = [run_test(testmodels.read(line_of(name)), target) for name in STRATA]
    assert [(r.name, v) for r in results for v in r.outcomes if v.status != PASSED] == []


# ------------------------------------------------------------------------------------------------ random source


def test_random_values_are_within_their_limits_and_reach_them() -> None:
    rng = RandomSource([1, 2], GraphLimits(10))
    assert {rng.integer(-2, 3) for _ in range(200)} == set(range(-2, 4))
    assert {rng.dimension(7) for _ in range(200)} == set(range(1, 8))
    assert all(math.prod(rng.shape(4, 50)) <= 50 for _ in range(100))
    assert max(max(rng.shape(3)) for _ in range(100)) == 10
    assert sorted(rng.permutation(6)) == list(range(6))


@pytest.mark.parametrize("type", [t for t in OperandType if t.name.startswith("TENSOR_") and "OEM" not in t.name])
@pytest.mark.parametrize("sign", Sign)
def test_values_have_the_requested_sign(type: OperandType, sign: Sign) -> None:
    rng = RandomSource([3], GraphLimits(10))
    assert not is_scalar(type)
    zero_point = rng.quantization(type).zero_point
    values = rng.values(type, (500,), sign, zero_point)
    assert type == OperandType.TENSOR_BOOL8 or sign.is_satisfied(values.astype(np.float64) - zero_point)
    assert len(np.unique(values)) > 1
