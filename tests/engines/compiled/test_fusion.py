"""Fusion: which neighbouring operations one kernel computes, with the interpreter's results of the model as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.chains import TYPES, Step, fused_operations, launches_of, model_of, tensor, weights
from support.compiled import assert_kernels_agree
from support.small_models import I32

from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.hal.types import Model, Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

CONV, DEPTHWISE, GROUPED = OperationType.CONV_2D, OperationType.DEPTHWISE_CONV_2D, OperationType.GROUPED_CONV_2D
PAD, PAD_V2 = OperationType.PAD, OperationType.PAD_V2
SAME, VALID = 1, 2
NCHW_AXES = (0, 3, 1, 2)


def assert_fused(model: Model, expected: dict[int, tuple[int, ...]], tolerance: float = 1e-5) -> None:
    assert fused_operations(model) == expected
    assert_kernels_agree(model, tolerance=tolerance)


# -- padding -----------------------------------------------------------------------------------------------------------


def paddings(*pairs: tuple[int, int]) -> tuple[Operand, bytes]:
    return Operand(I32, (len(pairs), 2)), np.array(pairs, "<i4").tobytes()


def convolution(code: OperationType, kind: str, window: Sequence[int], nchw: bool = False) -> tuple[OperationType, Any]:
    """Return a convolution of 12 channels with a filter of 3 x 3; `window` is padding and strides."""
    shape = {CONV: (17, 3, 3, 12), DEPTHWISE: (1, 3, 3, 12), GROUPED: (6, 3, 3, 4)}[code]
    channels = {CONV: 17, DEPTHWISE: 12, GROUPED: 6}[code]
    more = {CONV: [0], DEPTHWISE: [1, 0], GROUPED: [3, 0]}[code]
    return code, (channels, [[0], *weights(kind, shape, channels), *window, *more, nchw])


def padded(
    code: OperationType,
    kind: str,
    pairs: Sequence[tuple[int, int]],
    window: Sequence[int] = (VALID, 2, 2),
    nchw: bool = False,
    value: Any = None,
    size: tuple[int, int] = (4, 4),
) -> list[Step]:
    """Return a PAD of an image (2, 9, 8, 12), and a convolution of it to an image of `size`."""
    code, (channels, arguments) = convolution(code, kind, window, nchw)
    shape = [e + sum(pair) for e, pair in zip((2, 9, 8, 12), pairs, strict=True)]
    result = [shape[0], *size, channels]
    if nchw:
        pairs, shape, result = ([one[axis] for axis in NCHW_AXES] for one in (list(pairs), shape, result))
    pad = (PAD, [[-1], paddings(*pairs)]) if value is None else (PAD_V2, [[-1], paddings(*pairs), value])
    return [(*pad, tensor(kind, *shape)), (code, arguments, tensor(kind, *result))]


def image(kind: str, nchw: bool = False) -> Operand:
    return tensor(kind, *((2, 12, 9, 8) if nchw else (2, 9, 8, 12)))


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("code", [CONV, DEPTHWISE, GROUPED])
def test_a_pad_becomes_the_padding_of_a_convolution(code: OperationType, kind: str, nchw: bool) -> None:
    steps = padded(code, kind, [(0, 0), (0, 1), (1, 0), (0, 0)], nchw=nchw)

    assert_fused(model_of(image(kind, nchw), steps), {1: (0,)})


@pytest.mark.parametrize("kind", TYPES)
def test_a_pad_is_added_to_the_convolution_s_own_padding(kind: str) -> None:
    explicit = padded(CONV, kind, [(0, 0), (1, 0), (1, 1), (0, 0)], (1, 0, 0, 1, 1, 1), size=(9, 9))
    scheme = padded(CONV, kind, [(0, 0), (1, 1), (1, 0), (0, 0)], (SAME, 1, 1), size=(11, 9))

    assert_fused(model_of(image(kind), explicit), {1: (0,)})
    assert_fused(model_of(image(kind), scheme), {1: (0,)})


@pytest.mark.parametrize("kind", TYPES)
def test_pad_v2_is_fused_if_it_pads_with_the_value_of_0(kind: str) -> None:
    pairs = [(0, 0), (1, 1), (1, 1), (0, 0)]
    zero, other = (0.0, 1.0) if kind == "float32" else (TYPES[kind][2], TYPES[kind][2] + 1)

    assert_fused(model_of(image(kind), padded(CONV, kind, pairs, value=zero, size=(5, 4))), {1: (0,)})
    assert_fused(model_of(image(kind), padded(CONV, kind, pairs, value=other, size=(5, 4))), {0: (), 1: ()})


@pytest.mark.parametrize(
    ("pairs", "size"),
    [
        ([(0, 1), (0, 1), (0, 1), (0, 0)], (4, 4)),  # of the batch
        ([(0, 0), (0, 3), (0, 1), (0, 0)], (5, 4)),  # a window in the padding alone
        ([(0, 0), (0, 1), (4, 0), (0, 0)], (4, 5)),
    ],
)
def test_a_pad_that_no_window_can_have_is_computed(pairs: list[tuple[int, int]], size: tuple[int, int]) -> None:
    assert_fused(model_of(image("uint8"), padded(CONV, "uint8", pairs, size=size)), {0: (), 1: ()})


def test_a_pad_of_channels_is_computed() -> None:
    steps = padded(CONV, "float32", [(0, 0), (0, 1), (0, 1), (0, 4)])

    assert_fused(model_of(tensor("float32", 2, 9, 8, 8), [_of_8_channels(steps[0]), steps[1]]), {0: (), 1: ()})


def _of_8_channels(step: Step) -> Step:
    return step[0], step[1], tensor("float32", 2, 10, 9, 12)


def test_a_pad_that_something_else_reads_is_computed() -> None:
    steps = padded(CONV, "uint8", [(0, 0), (0, 1), (0, 1), (0, 0)])
    clamp = (OperationType.RELU, [[0]], steps[0][2])

    assert_fused(model_of(image("uint8"), steps, outputs=[0]), {0: (), 1: ()})
    assert_fused(model_of(image("uint8"), [steps[0], clamp, steps[1]], outputs=[1]), {0: (), 1: (), 2: ()})


# -- activations -------------------------------------------------------------------------------------------------------

CLAMPS = [OperationType.RELU, OperationType.RELU1, OperationType.RELU6]


@pytest.mark.parametrize("code", CLAMPS)
@pytest.mark.parametrize("kind", TYPES)
def test_an_operation_that_clamps_becomes_an_activation(kind: str, code: OperationType) -> None:
    steps = padded(CONV, kind, [(0, 0), (0, 1), (0, 1), (0, 0)])
    last = (code, [[1]], steps[-1][2])

    assert_fused(model_of(image(kind), [*steps, last]), {1: (0, 2)})


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("code", [DEPTHWISE, GROUPED])
def test_clamps_after_other_convolutions_are_fused_in_either_layout(code: OperationType, nchw: bool) -> None:
    steps = padded(code, "uint8", [(0, 0), (0, 1), (0, 1), (0, 0)], nchw=nchw)
    last = (OperationType.RELU6, [[1]], steps[-1][2])

    assert_fused(model_of(image("uint8", nchw), [*steps, last]), {1: (0, 2)})


@pytest.mark.parametrize("code", ["ADD", "SUB", "MUL"])
@pytest.mark.parametrize("kind", TYPES)
def test_clamps_after_arithmetic_are_fused(kind: str, code: str) -> None:
    value = tensor(kind, 3, 50)
    steps: list[Step] = [(OperationType[code], [[-1], [-1], 0], value), (OperationType.RELU, [[0]], value)]

    assert_fused(model_of(value, steps), {0: (1,)})


def test_a_second_activation_is_computed() -> None:
    result = tensor("uint8", 3, 9)
    steps: list[Step] = [fully_connected(result, "uint8", activation=1), (OperationType.RELU6, [[0]], result)]

    assert_fused(model_of(tensor("uint8", 3, 20), steps), {0: (), 1: ()})


def test_a_clamp_of_a_result_that_is_an_output_is_computed() -> None:
    value = tensor("float32", 3, 50)
    steps: list[Step] = [(OperationType.MUL, [[-1], [-1], 0], value), (OperationType.RELU, [[0]], value)]

    assert_fused(model_of(value, steps, outputs=[0]), {0: (), 1: ()})


def floats(shape: tuple[int, ...], seed: int = 1) -> tuple[Operand, bytes]:
    values = np.random.default_rng(seed).normal(size=shape).astype("<f4")
    return tensor("float32", *shape), values.tobytes()


def fully_connected(result: Operand, kind: str = "float32", activation: int = 0) -> Step:
    arguments = [[-1], *weights(kind, (9, 20), 9), activation]
    return OperationType.FULLY_CONNECTED, arguments, result


# -- elementwise operations --------------------------------------------------------------------------------------------

LOGISTIC, MUL, ADD, MAXIMUM = (OperationType[name] for name in ("LOGISTIC", "MUL", "ADD", "MAXIMUM"))


@pytest.mark.parametrize("kind", TYPES)
def test_elementwise_operations_become_one_loop_that_reads_each_operand_once(kind: str) -> None:
    value, factor = (
        tensor(kind, 5, 7, 9),
        (tensor(kind, 1, 9), floats((1, 9))[1][: 9 * (4 if kind == "float32" else 1)]),
    )
    steps: list[Step] = [
        (MAXIMUM, [[-1], factor], value),
        (MUL, [factor, [0], 0], value),
        (ADD, [[-1], [1], 0], value),
    ]
    model = model_of(value, steps)

    assert_fused(model, {2: (0, 1)})
    assert len(launches_of(model)[0].inputs) == 3  # the image, and the constant of each operation


@pytest.mark.parametrize("nchw", [False, True])
def test_a_value_times_its_sigmoid_is_one_loop(nchw: bool) -> None:
    (pad, convolution) = padded(DEPTHWISE, "float32", [(0, 0), (0, 1), (0, 1), (0, 0)], nchw=nchw)
    result = convolution[2]
    steps: list[Step] = [pad, convolution, (LOGISTIC, [[1]], result), (MUL, [[1], [2], 0], result)]

    assert_fused(model_of(image("float32", nchw), steps), {1: (0,), 3: (2,)})


def test_two_branches_and_their_sum_are_one_loop() -> None:
    value = tensor("float32", 3, 50)
    steps: list[Step] = [
        (LOGISTIC, [[-1]], value),
        (OperationType.TANH, [[-1]], value),
        (ADD, [[0], [1], 0], value),
    ]

    assert_fused(model_of(value, steps), {2: (0, 1)})


def test_loops_over_values_of_several_types_are_fused() -> None:
    value, condition = tensor("float32", 3, 50), Operand(OperandType.TENSOR_BOOL8, (3, 50))
    steps: list[Step] = [
        (OperationType.GREATER, [[-1], floats((50,))], condition),
        (OperationType.LOGICAL_NOT, [[0]], condition),
        (OperationType.SELECT, [[1], [-1], floats((3, 50), 2)], value),
    ]

    assert_fused(model_of(value, steps), {2: (0, 1)})


def test_a_loop_over_more_elements_is_another_loop() -> None:
    value, result = tensor("float32", 1, 50), tensor("float32", 3, 50)
    steps: list[Step] = [(LOGISTIC, [[-1]], value), (MUL, [[0], floats((3, 50)), 0], result)]

    assert_fused(model_of(value, steps), {0: (), 1: ()})


def test_loops_have_at_most_four_inputs_and_eight_operators() -> None:
    value = tensor("float32", 3, 50)
    sums: list[Step] = [(ADD, [[n - 1], floats((50,), n), 0], value) for n in range(4)]
    roots: list[Step] = [(OperationType.ABS, [[n - 1]], value) for n in range(9)]

    assert_fused(model_of(value, sums), {2: (0, 1), 3: ()})
    assert_fused(model_of(value, roots), {7: tuple(range(7)), 8: ()})


def test_a_cast_that_computes_nothing_stays_a_view() -> None:
    value = tensor("float32", 3, 50)
    steps: list[Step] = [
        (LOGISTIC, [[-1]], value),
        (OperationType.CAST, [[0]], value),
        (ADD, [[1], floats((50,)), 0], value),
    ]

    assert_fused(model_of(value, steps), {0: (), 2: ()})


# -- epilogues ---------------------------------------------------------------------------------------------------------


def sized(code: OperationType, size: int, channels: int, nchw: bool = False) -> Step:
    """Return a convolution of an image (2, 6, 7, channels) to one of that shape with filters of `size` x `size`."""
    groups = {CONV: 1, GROUPED: 4}[code]
    filter = weights("float32", (channels, size, size, channels // groups), channels)
    return (
        code,
        [[-1], *filter, SAME, 1, 1, *([groups] if code == GROUPED else []), 0, nchw],
        square(channels, nchw),
    )


def square(channels: int, nchw: bool = False) -> Operand:
    return tensor("float32", *((2, channels, 6, 7) if nchw else (2, 6, 7, channels)))


def epilogues(model: Model) -> list[tuple[bool, bool]]:
    """Return of each matrix product whether its kernel has an operator, and whether its panels are whole."""
    kernels = [launch.kernel for launch in launches_of(model)]
    return [(k.operator is not None, not k.nr_remainder) for k in kernels if isinstance(k, GemmKernel)]


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("channels", [4, 8, 20, 32, 64])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("code", [CONV, GROUPED])
def test_a_residual_is_added_in_the_epilogue_if_all_panels_are_whole(
    code: OperationType, size: int, channels: int, nchw: bool
) -> None:
    result = square(channels, nchw)
    steps: list[Step] = [
        sized(code, size, channels, nchw),
        (ADD, [[-1], [0], 0], result),
        (OperationType.RELU, [[1]], result),
    ]
    model = model_of(result, steps)

    ((has_operator, has_whole_panels),) = epilogues(model)
    assert has_operator == has_whole_panels
    assert_fused(model, {0: (1, 2)} if has_operator else {0: (), 1: (2,)}, tolerance=1e-4)


@pytest.mark.parametrize("channels", [5, 8, 32])
@pytest.mark.parametrize("size", [1, 3])
def test_functions_of_results_and_of_single_elements_are_computed_in_the_epilogue(size: int, channels: int) -> None:
    result = square(channels)
    steps: list[Step] = [
        sized(CONV, size, channels),
        (ADD, [[0], floats((1,)), 0], result),
        (OperationType.RELU6, [[1]], result),
        (MUL, [[0], [2], 0], result),
    ]

    assert_fused(model_of(result, steps), {0: (1, 2, 3)}, tolerance=1e-4)


def test_an_epilogue_follows_the_operations_whose_results_it_reads() -> None:
    result = square(32)
    steps: list[Step] = [
        sized(CONV, 1, 32),
        sized(CONV, 3, 32),
        (OperationType.MAX_POOL_2D, [[1], SAME, 1, 1, 2, 2, 0], result),
        (ADD, [[0], [2], 0], result),
    ]
    model = model_of(result, steps)

    if epilogues(model)[-1] == (True, True):
        assert [launch.operation for launch in launches_of(model)] == [1, 2, 0]
    assert_kernels_agree(model, tolerance=1e-4)


def test_a_matrix_product_has_an_epilogue() -> None:
    result = tensor("float32", 3, 9)
    steps: list[Step] = [fully_connected(result), (LOGISTIC, [[0]], result)]

    assert_fused(model_of(tensor("float32", 3, 20), steps), {0: (1,)})


@pytest.mark.parametrize(
    ("code", "arguments", "result"),
    [
        (ADD, [[0], floats((3, 9)), 0], tensor("float32", 3, 9)),  # an array of the shape, but not of whole panels
        (MAXIMUM, [[0], floats((9,))], tensor("float32", 3, 9)),  # neither the shape nor one element
        (MAXIMUM, [[0], floats((2, 3, 9))], tensor("float32", 2, 3, 9)),
        (OperationType.QUANTIZE, [[0]], tensor("uint8", 3, 9)),
    ],
)
def test_other_operations_on_the_result_are_loops(code: OperationType, arguments: list[Any], result: Operand) -> None:
    steps: list[Step] = [fully_connected(tensor("float32", 3, 9)), (code, arguments, result)]

    assert_fused(model_of(tensor("float32", 3, 20), steps), {0: (), 1: ()})


def test_a_view_of_the_result_is_no_epilogue() -> None:
    result = tensor("float32", 3, 9)
    steps: list[Step] = [fully_connected(result), (OperationType.CAST, [[0]], result)]

    assert_fused(model_of(tensor("float32", 3, 20), steps), {0: ()})


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_functions_of_quantized_results_are_loops(kind: str) -> None:
    result = tensor(kind, 3, 9)
    probability = replace(result, scale=1 / 256, zero_point=0 if kind == "uint8" else -128)
    steps: list[Step] = [fully_connected(result, kind), (LOGISTIC, [[0]], probability)]

    assert_fused(model_of(tensor(kind, 3, 20), steps), {0: (), 1: ()})
