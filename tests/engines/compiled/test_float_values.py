"""Values of ONNX's operators over the whole range of float16 and float32, from both engines, compared with float64.

Where the engine is the compiling one, kernels must have computed everything but operations on float16 itself, and the
operations that have no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.compiled import outputs_of
from support.float_values import FUNCTIONS, NEWER, UNDEFINED, assert_right, numbers
from support.onnx_files import OnnxCase
from support.oracles import Array

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.engines.compiled import partition
from nnfmq.engines.compiled.target import host_target
from nnfmq.hal.types import OperandType, OperationType

WITHOUT_KERNEL = {  # or beside such a one
    "REDUCE_PROD",
    "RESHAPE",
    "nnfmq.tflite.BITCAST",
    "nnfmq.tflite.FLOOR_MOD",
    "nnfmq.tflite.ONE_HOT",
}
ENGINES = pytest.mark.parametrize("engine", ["reference", "compiled"])
TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda dtype: dtype.__name__)
OF_HALVES_WITH_KERNEL = (
    *(OperationType.CAST, OperationType.CONV_2D, OperationType.DEPTHWISE_CONV_2D),
    *(OperationType.GROUPED_CONV_2D, OperationType.FULLY_CONNECTED),
)
OF_HALVES = (OperandType.TENSOR_FLOAT16, OperandType.FLOAT16)


def computed(case: OnnxCase, engine: str) -> list[Array]:
    """Return the outputs of a model; with the compiling engine, by kernels wherever there are any."""
    model = nnfmq.load(case.content()).model
    program = (interpreter if engine == "reference" else partition).prepare(model)
    if engine == "compiled":
        steps = [each for at, each in enumerate(model.main.operations) if at not in program.compiled_ops]
        for step in steps:
            types = [model.main.operands[index].type for index in (*step.inputs, *step.outputs)]
            has_kernel = step.type in OF_HALVES_WITH_KERNEL and host_target().has_half
            is_of_halves = any(kind in OF_HALVES for kind in types) and not has_kernel
            assert step.type.name in WITHOUT_KERNEL or is_of_halves, step.type.name
    given = [np.ascontiguousarray(array).reshape(array.shape or (1,)) for array in case.fed().values()]
    return outputs_of(program, model, given)


OF_ONE = [(name, dtype) for name in FUNCTIONS for dtype in (np.float32, np.float16) if (name, dtype) not in UNDEFINED]


@ENGINES
@pytest.mark.parametrize(("operator", "dtype"), OF_ONE)
def test_a_function_of_one_number_is_right_over_the_whole_range(operator: str, dtype: Any, engine: str) -> None:
    x = numbers(dtype)
    (found,) = computed(OnnxCase(operator, [x], opset=NEWER.get(operator, 18)), engine)
    with np.errstate(all="ignore"):
        real = FUNCTIONS[operator](x.astype(np.float64))
    assert_right(x, found, real)


# -- two numbers -------------------------------------------------------------------------------------------------------

OF_TWO: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Max": np.maximum,
    "Min": np.minimum, "Mod": np.fmod, "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal, "Equal": np.equal, "Mean": lambda a, b: (a + b) / 2,
    "PRelu": lambda a, b: np.where(a < 0, a * b, a),
}  # fmt: skip
SPECIAL = [0, 1, 2, 3, 0.5, 1.5, 2.5, 7, 0.1, 1 / 3, 8, 5, np.inf, 1e-7, 300]


@ENGINES
@TYPES
@pytest.mark.parametrize("operator", OF_TWO)
def test_a_function_of_two_numbers_is_right_for_extreme_infinite_and_undefined_ones(
    operator: str, dtype: Any, engine: str
) -> None:
    positive = np.array([*SPECIAL, float(np.finfo(dtype).max), float(np.finfo(dtype).tiny)]).astype(dtype)
    values = np.concatenate([positive, -positive, np.array([np.nan], dtype)])
    a, b = (np.ascontiguousarray(grid.reshape(-1)) for grid in np.meshgrid(values, values))
    (found,) = computed(OnnxCase(operator, [a, b], {"fmod": 1} if operator == "Mod" else {}), engine)
    with np.errstate(all="ignore"):
        real = OF_TWO[operator](a.astype(np.float64), b.astype(np.float64))
    assert_right(a, found, real)


@ENGINES
@TYPES
@pytest.mark.parametrize("limits", [(-1.0, 2.0), (2.0, -1.0), (0.0, 6.0), (-np.inf, np.inf)])
def test_clip_keeps_nan_and_returns_the_maximum_if_it_is_below_the_minimum(
    limits: tuple[float, float], dtype: Any, engine: str
) -> None:
    x = np.array([-np.inf, -3, -1, -0.5, 0, 1, 5, 7, np.inf, np.nan], dtype)
    case = OnnxCase("Clip", [x, *(np.array(limit, dtype) for limit in limits)], constants=frozenset((1, 2)))
    (found,) = computed(case, engine)
    assert_right(x, found, np.minimum(np.maximum(x.astype(np.float64), limits[0]), limits[1]))


# -- reductions and normalizations -------------------------------------------------------------------------------------


def rows(dtype: Any) -> Array:
    """Return rows of eight elements: of all magnitudes, with an outlier, equal, infinite and undefined ones."""
    random, most, inf, nan = np.random.default_rng(0), float(np.finfo(dtype).max), np.inf, np.nan
    scales = [1e-4, 1.0, 100.0, 3e4] if dtype == np.float16 else [1e-20, 1e-5, 1.0, 1e5, 1e18, 1e25, 3e37]
    special = [
        [300, 1, -1, 1, -1, 1, -1, 0], [6e4, 1, -1, 1, -1, 1, -1, 0], [inf] * 8, [-inf] * 8, [inf, *[1] * 7],
        [-inf, *[1] * 7], [inf, 0, *[1] * 6], [nan, *[1] * 7], [*[1] * 7, nan], [nan] * 8, [0] * 8, [-0.0] * 8,
        [inf, -inf, *[0] * 6], [most / 8] * 8, [most, 0, 0, 0, 0, 0, 0, 0], [1e-3, -1e-3] * 4,
    ]  # fmt: skip
    normal = [random.normal(size=8) * scale for scale in scales]
    return np.array([*normal, *map(np.abs, normal), *special]).astype(dtype)


def log_sum_exp(x: Array) -> Array:
    most = np.clip(x.max(axis=1, keepdims=True), np.finfo(np.float64).min, np.finfo(np.float64).max)
    found: Array = (np.log(np.exp(x - most).sum(axis=1, keepdims=True)) + most)[:, 0]
    return found


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]


def log_softmax(x: Array) -> Array:
    distances = x - x.max(axis=1, keepdims=True)
    return distances - np.log(np.exp(distances).sum(axis=1, keepdims=True))  # type: ignore[no-any-return]


def by_norm(p: int) -> Callable[[Array], Array]:
    def normalized(x: Array) -> Array:
        norm = (np.abs(x) ** p).sum(axis=1, keepdims=True) ** (1 / p)
        return np.where(norm == 0, x, x / np.where(norm == 0, 1, norm))

    return normalized


REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "ReduceL1": lambda x: np.abs(x).sum(axis=1), "ReduceL2": lambda x: np.sqrt(np.square(x).sum(axis=1)),
    "ReduceLogSum": lambda x: np.log(x.sum(axis=1)), "ReduceLogSumExp": log_sum_exp,
    "ReduceMax": lambda x: x.max(axis=1), "ReduceMean": lambda x: x.mean(axis=1),
    "ReduceMin": lambda x: x.min(axis=1), "ReduceProd": lambda x: x.prod(axis=1),
    "ReduceSum": lambda x: x.sum(axis=1), "ReduceSumSquare": lambda x: np.square(x).sum(axis=1),
}  # fmt: skip
ALONG_ROWS: dict[str, tuple[Callable[[Array], Array], dict[str, Any]]] = {
    "ArgMax": (lambda x: x.argmax(axis=1), {"keepdims": 0}), "ArgMin": (lambda x: x.argmin(axis=1), {"keepdims": 0}),
    "Hardmax": (lambda x: np.eye(8)[x.argmax(axis=1)], {}), "LogSoftmax": (log_softmax, {}),
    "LpNormalization": (by_norm(2), {}), "Softmax": (softmax, {}),
}  # fmt: skip


@ENGINES
@TYPES
@pytest.mark.parametrize("operator", REDUCTIONS)
def test_a_reduction_neither_overflows_inside_nor_hides_nan_and_infinities(
    operator: str, dtype: Any, engine: str
) -> None:
    x = rows(dtype)
    axes = np.array([1])
    (found,) = computed(OnnxCase(operator, [x, axes], {"keepdims": 0}, frozenset((1,)), opset=18), engine)
    with np.errstate(all="ignore"):
        assert_right(x[:, :1], found, REDUCTIONS[operator](x.astype(np.float64)))


@ENGINES
@pytest.mark.parametrize("axes", [(1, 2), (2, 3)], ids=["kept lanes", "reduced lanes"])
@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceSum"])
def test_the_rounding_errors_of_a_sum_do_not_add_up(operator: str, axes: tuple[int, int], engine: str) -> None:
    x = np.random.default_rng(0).uniform(0, 1, (4, 24, 40, 24)).astype(np.float32)
    (found,) = computed(OnnxCase(operator, [x, np.array(axes)], {"keepdims": 0}, frozenset((1,)), opset=18), engine)
    real = (np.mean if operator == "ReduceMean" else np.sum)(x.astype(np.float64), axis=axes)
    assert np.abs(found - real).max() <= np.spacing(real.astype(np.float32).max())


@ENGINES
@TYPES
@pytest.mark.parametrize("operator", [*ALONG_ROWS, "L1"])
def test_an_operator_along_rows_neither_overflows_inside_nor_hides_nan_and_infinities(
    operator: str, dtype: Any, engine: str
) -> None:
    x = rows(dtype)
    function, attributes = (by_norm(1), {"p": 1}) if operator == "L1" else ALONG_ROWS[operator]
    case = OnnxCase("LpNormalization" if operator == "L1" else operator, [x], {"axis": 1, **attributes}, opset=18)
    if operator == "LogSoftmax":  # NaN minus infinity
        x = x[~np.isposinf(x).any(axis=1)]
        case = OnnxCase(operator, [x], {"axis": 1, **attributes}, opset=18)
    (found,) = computed(case, engine)
    with np.errstate(all="ignore"):
        assert_right(np.broadcast_to(x, found.shape) if found.ndim == 2 else x[:, 0], found, function(x.astype(float)))


IMAGE = (2, 4, 6, 6)


def halves(*shape: int, scale: float = 1.0, seed: int = 1) -> Array:
    """Return float16 numbers, the fourth of which is far from the others if it is no scale or bias."""
    found = (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float16)
    if found.size > 100:
        found.reshape(-1)[3] = 6000
    return found


def standardized(x: Array, axes: int | tuple[int, ...], epsilon: float = 1e-5) -> Array:
    centered = x - x.mean(axis=axes, keepdims=True)
    return centered / np.sqrt(np.square(centered).mean(axis=axes, keepdims=True) + epsilon)  # type: ignore[no-any-return]


def over_root_mean_square(x: Array, epsilon: float) -> Array:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon)  # type: ignore[no-any-return]


def norm(x: Array) -> Array:
    return np.sqrt(np.square(x).sum(axis=-1))  # type: ignore[no-any-return]


ROWS, PIXELS = halves(3, 256), halves(*IMAGE)
SCALE, BIAS = halves(64, seed=2).repeat(4), halves(64, seed=3).repeat(4)
OTHER = halves(3, 256, seed=4).clip(-3, 3)
S4, B4 = halves(4, seed=5), halves(4, seed=6)
MEANS, VARIANCES = halves(4, scale=500, seed=7), np.abs(halves(4, seed=8))
ALONG = (1, -1, 1, 1)
OF_HALVES_ALONE: list[tuple[OnnxCase, Callable[[], Array]]] = [
    (
        OnnxCase("LayerNormalization", [ROWS, SCALE, BIAS], constants=frozenset((1, 2))),
        lambda: standardized(ROWS.astype(float), -1) * SCALE + BIAS.astype(float),
    ),
    (
        OnnxCase("LayerNormalization", [ROWS, SCALE], {"epsilon": 1e-12}),
        lambda: standardized(ROWS.astype(float), -1, 1e-12) * SCALE,
    ),
    (
        OnnxCase("RMSNormalization", [ROWS, SCALE], constants=frozenset((1,)), opset=23),
        lambda: over_root_mean_square(ROWS.astype(float), 1e-5) * SCALE,
    ),
    (
        OnnxCase("SimplifiedLayerNormalization", [ROWS, SCALE], {"epsilon": 1e-6}, frozenset((1,))),
        lambda: over_root_mean_square(ROWS.astype(float), 1e-6) * SCALE,
    ),
    (
        OnnxCase("InstanceNormalization", [PIXELS, S4, B4], constants=frozenset((1, 2))),
        lambda: standardized(PIXELS.astype(float), (2, 3)) * S4.reshape(ALONG) + B4.reshape(ALONG).astype(float),
    ),
    (
        OnnxCase("BatchNormalization", [PIXELS, S4, B4, MEANS, VARIANCES], constants=frozenset(range(1, 5))),
        lambda: (
            (PIXELS.astype(float) - MEANS.reshape(ALONG)) / np.sqrt(VARIANCES.reshape(ALONG).astype(float) + 1e-5)
        ) * S4.reshape(ALONG) + B4.reshape(ALONG),
    ),
    (OnnxCase("MeanVarianceNormalization", [PIXELS]), lambda: standardized(PIXELS.astype(float), (0, 2, 3), 0.0)),
    (OnnxCase("GlobalLpPool", [PIXELS], opset=18), lambda: norm(PIXELS.astype(float).reshape(2, 4, 36))),
    (
        OnnxCase("LpPool", [PIXELS], {"kernel_shape": [6, 6]}, opset=18),
        lambda: norm(PIXELS.astype(float).reshape(2, 4, 36)),
    ),
    (
        OnnxCase("Gemm", [PIXELS.reshape(8, 36), halves(36, 3)], {"alpha": 0.001}),
        lambda: 0.001 * (PIXELS.reshape(8, 36).astype(float) @ halves(36, 3).astype(float)),
    ),
]  # fmt: skip


@ENGINES
@pytest.mark.parametrize(("case", "real"), OF_HALVES_ALONE, ids=lambda value: getattr(value, "operator", ""))
def test_an_operator_of_float16_is_computed_in_float32_and_rounded_once(
    case: OnnxCase, real: Callable[[], Array], engine: str
) -> None:
    (found,) = computed(case, engine)
    assert found.dtype == np.float16
    assert_right(found, found, real())
