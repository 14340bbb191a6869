"""What is counted of an operation's work, against numbers worked out by hand, and what MobileNets are known for."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnfmq.engines import interpreter
from nnfmq.hal.types import LifeTime, OperationType
from nnfmq.importers import load
from nnfmq.lab.roofline import MULTIPLY_ADDS, OpCost, compute_op_cost
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import Match, Shape, match

GATES = ("input", "forget", "cell", "output")
LSTM = {
    "input": (2, 3),
    **{f"input_to_{gate}_weights": (4, 3) for gate in GATES},
    **{f"recurrent_to_{gate}_weights": (4, 4) for gate in GATES},
    **{f"{gate}_gate_bias": (4,) for gate in GATES},
    "output_state_in": (2, 4),
    "cell_state_in": (2, 4),
}
PEEPHOLES = {f"cell_to_{gate}_weights": (4,) for gate in ("input", "forget", "output")}
CELL = {"weights": (4, 3), "recurrent_weights": (4, 4), "bias": (4,), "hidden_state": (2, 4)}
FORWARD, BACKWARD = ({f"{way}_{name}": shape for name, shape in CELL.items()} for way in ("fw", "bw"))

EXAMPLES: dict[str, tuple[OperationType, dict[str, Shape], Shape, int]] = {
    "an image of 8x8x3, 16 filters of 3x3": (
        OperationType.CONV_2D, {"input": (1, 8, 8, 3), "filter": (16, 3, 3, 3)}, (1, 8, 8, 16), 8 * 8 * 16 * 27,
    ),
    "the same in NCHW": (
        OperationType.CONV_2D, {"input": (1, 3, 8, 8), "filter": (16, 3, 3, 3)}, (1, 16, 8, 8), 8 * 8 * 16 * 27,
    ),
    "filters that see 2 of 4 channels": (
        OperationType.GROUPED_CONV_2D, {"input": (1, 4, 4, 4), "filter": (8, 3, 3, 2)}, (1, 4, 4, 8), 4 * 4 * 8 * 18,
    ),
    "2 filters for each of 4 channels": (
        OperationType.DEPTHWISE_CONV_2D, {"input": (1, 5, 5, 4), "filter": (1, 3, 3, 8)}, (1, 5, 5, 8), 5 * 5 * 8 * 9,
    ),
    "each of 2x2x3 inputs goes to 3x3x4 outputs": (
        OperationType.TRANSPOSE_CONV_2D, {"input": (1, 2, 2, 3), "filter": (4, 3, 3, 3)}, (1, 5, 5, 4), 12 * 36,
    ),
    "two vectors of 5 to 3 units": (
        OperationType.FULLY_CONNECTED, {"input": (2, 5), "weights": (3, 5)}, (2, 3), 2 * 3 * 5,
    ),
    "two products of 3x4 and 4x5": (
        OperationType.BATCH_MATMUL, {"left": (2, 3, 4), "right": (2, 4, 5)}, (2, 3, 5), 2 * 3 * 4 * 5,
    ),
    "the left one transposed": (
        OperationType.BATCH_MATMUL, {"left": (2, 4, 3), "right": (2, 4, 5)}, (2, 3, 5), 2 * 3 * 4 * 5,
    ),
    "products of nothing": (OperationType.BATCH_MATMUL, {"left": (2, 0, 4), "right": (2, 4, 5)}, (2, 0, 5), 0),
    "4 gates of 4 units, from 3 inputs and 4 states, twice": (OperationType.LSTM, LSTM, (2, 16), 2 * 4 * (12 + 16)),
    "peepholes are no product": (OperationType.LSTM, LSTM | PEEPHOLES, (2, 16), 2 * 4 * (12 + 16)),
    "7 steps of 2 sequences": (
        OperationType.UNIDIRECTIONAL_SEQUENCE_LSTM, LSTM | {"input": (7, 2, 3)}, (7, 2, 4), 14 * 4 * (12 + 16),
    ),
    "one simple cell": (OperationType.RNN, {"input": (2, 3), **CELL}, (2, 4), 2 * (12 + 16)),
    "a simple cell, 5 steps of 2": (
        OperationType.UNIDIRECTIONAL_SEQUENCE_RNN, {"input": (5, 2, 3), **CELL}, (5, 2, 4), 10 * (12 + 16),
    ),
    "in both directions": (
        OperationType.BIDIRECTIONAL_SEQUENCE_RNN, {"input": (5, 2, 3)} | FORWARD | BACKWARD, (5, 2, 8), 20 * (12 + 16),
    ),
    "6 filters of 3 features, that remember 10": (
        OperationType.SVDF,
        {"input": (2, 3), "weights_feature": (6, 3), "weights_time": (6, 10), "state_in": (2, 60)},
        (2, 60),
        2 * (18 + 60),
    ),
}  # fmt: skip


def matched(code: OperationType) -> Match:
    """Return a match with all parameters of the operation's longest form."""
    declaration = REGISTRY[code]
    longest = max((overload.parameters for overload in declaration.overloads), key=len)
    return Match(declaration, longest, declaration.variants[0], 1)


@pytest.mark.parametrize("name", EXAMPLES)
def test_multiply_adds_are_those_counted_by_hand(name: str) -> None:
    code, shapes, output, expected = EXAMPLES[name]
    found = matched(code)
    unknown = set(shapes) - {parameter.name for parameter in found.parameters}

    work = compute_op_cost(found, [shapes.get(parameter.name) for parameter in found.parameters], [output])

    assert (unknown, work.multiply_adds) == (set(), expected)


def test_a_multiply_add_is_two_operations() -> None:
    assert OpCost(multiply_adds=21, elements=3).arithmetic_operations == 42
    assert OpCost(multiply_adds=None, elements=3).arithmetic_operations is None


def test_an_operation_without_a_matrix_product_has_its_output_elements() -> None:
    work = compute_op_cost(matched(OperationType.TOPK_V2), [(3, 9), None], [(3, 2), (3, 2)])

    assert (work.multiply_adds, work.elements) == (None, 12)


def test_every_cell_of_the_table_names_its_matrices_weights() -> None:
    recurrent = [code for code in MULTIPLY_ADDS if code.name.endswith(("LSTM", "RNN", "SVDF"))]
    without = [code for code in recurrent if not any("weights" in p.name for p in matched(code).parameters)]

    assert (len(recurrent), without) == (9, [])


@pytest.mark.parametrize(
    ("model", "millions"),  # as published beside the models
    [
        ("mobilenet_v1_0.25_128", 14),
        ("mobilenet_v1_0.25_128_quant", 14),
        ("mobilenet_v1_0.75_192_quant", 239),
        ("mobilenet_v2_1.0_224_quant", 301),
    ],
)
def test_a_mobilenet_has_the_multiply_adds_that_it_is_known_for(data_dir: Path, model: str, millions: int) -> None:
    loaded = load(data_dir / "models" / f"{model}.tflite").model
    main, shapes = loaded.main, interpreter.prepare(loaded).shapes
    total = 0
    for operation in main.operations:
        inputs, outputs = ([main.operands[i] for i in indexes] for indexes in (operation.inputs, operation.outputs))
        given = [None if main.operands[i].lifetime == LifeTime.NO_VALUE else shapes[i] for i in operation.inputs]
        made = [shape for index in operation.outputs if (shape := shapes[index]) is not None]
        total += compute_op_cost(match(REGISTRY[operation.type], inputs, outputs), given, made).multiply_adds or 0

    assert round(total / 1e6) == millions
