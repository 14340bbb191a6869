"""GEMM and depthwise kernels compared with the interpreter, for shapes with remainders in every dimension."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.compiled import assert_kernels_agree, assert_kernels_agree_on, outputs_of, random_inputs
from support.small_models import one_operation

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.kernels import gemm_plan
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.depthwise import DwConvKernel
from nnfmq.engines.compiled.kernels.depthwise_int8 import DwConvInt8Kernel
from nnfmq.engines.compiled.kernels.gemm import row_buffer_of
from nnfmq.engines.compiled.kernels.gemm_plan import plan_gemm
from nnfmq.engines.compiled.kernels.micro_kernels import DotU8S8x4, Float32, HalfWeights, MicroKernel
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION, REQUANT_ROWS
from nnfmq.engines.compiled.lowering import KernelLaunch
from nnfmq.engines.compiled.lowering import products as lowering_products
from nnfmq.engines.compiled.partition import LOWERING_RULES, prepare
from nnfmq.engines.compiled.target import TARGETS, Target, host_target
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import ChannelQuant, Model, Operand, OperandType, OperationType
from nnfmq.operations import packed_matmul
from nnfmq.operations.declaration import NUMPY_TYPES, Tensor
from nnfmq.operations.packed_matmul import PackedMatmul
from nnfmq.operations.shapes import WindowDimension, windows

pytestmark = pytest.mark.instruction_sets

F32, Q8, Q8S = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
PC, I32 = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_INT32
SAME, VALID = 1, 2
FLOAT, UINT8 = np.dtype("<f4"), np.dtype("u1")
FLOAT_TYPES = {"float": F32, "float16": OperandType.TENSOR_FLOAT16}
KINDS = ("float", "uint8", "int8", "uint8 per channel", "int8 per channel")
IMAGES = [  # batch, height, width, channels, output channels
    (1, 8, 8, 8, 16),
    (2, 7, 5, 3, 1),
    (1, 13, 11, 17, 33),
    (3, 1, 1, 64, 100),
    (1, 2, 3, 1, 7),
]
FILTERS = [  # height, width, stride, dilation, padding, activation
    (1, 1, 1, 1, SAME, 0),
    (3, 3, 1, 1, SAME, 1),
    (3, 2, 2, 1, SAME, 3),
    (2, 3, 1, 2, SAME, 2),
    (1, 1, 2, 1, VALID, 0),
]
DEPTHWISE_IMAGES = [(2, 7, 7, 256, 0), (1, 6, 9, 130, 0), (1, 9, 10, 24, 0), (1, 3, 2, 40, 0), (1, 301, 3, 64, 0)]
DEPTHWISE_FILTERS = [(4, 3, 1, 1, SAME, 0), (5, 5, 2, 2, SAME, 3), (11, 9, 1, 1, SAME, 1)]
COLUMN = (2, 43, 1, 17, 33)
COLUMN_FILTERS = [(5, 1, 1, 1, VALID, 0), (3, 1, 2, 1, SAME, 1), (3, 1, 1, 3, SAME, 3), (4, 1, 3, 1, VALID, 2)]


def weights(kind: str, shape: tuple[int, ...], channels: int, axis: int, random: np.random.Generator) -> list[Any]:
    """Return filter and bias as constants of an operation whose input has scale 0.5."""
    if kind in FLOAT_TYPES:
        operand, dtype = FLOAT_TYPES[kind], NUMPY_TYPES[FLOAT_TYPES[kind]]
        floats = [random.normal(size=extents).astype(dtype) for extents in (shape, (channels,))]
        return [(Operand(operand, array.shape), array.tobytes()) for array in floats]
    bias = random.integers(-2000, 2000, channels).astype("<i4")
    if "per channel" in kind:
        scales = tuple(map(float, random.uniform(0.001, 0.02, channels).astype(np.float32)))
        values = random.integers(-127, 128, shape).astype(np.int8)
        filter = Operand(PC, shape, channel_quant=ChannelQuant(scales, axis))
        return [(filter, values.tobytes()), (Operand(I32, (channels,)), bias.tobytes())]
    signed = kind == "int8"
    values = random.integers(-128 if signed else 0, 128 if signed else 256, shape).astype("i1" if signed else "u1")
    filter = Operand(Q8S if signed else Q8, shape, 0.0078125, -3 if signed else 131)
    return [(filter, values.tobytes()), (Operand(I32, (channels,), 0.5 * 0.0078125), bias.tobytes())]


def image(kind: str, shape: tuple[int, ...], scale: float, zero_point: int) -> Operand:
    """Return an input or output; `zero_point` is that of uint8."""
    if kind in FLOAT_TYPES:
        return Operand(FLOAT_TYPES[kind], shape)
    signed = kind.startswith("int8")
    return Operand(Q8S if signed else Q8, shape, scale, zero_point - 128 * signed)


def output_size(size: tuple[int, int], filter: tuple[int, ...]) -> tuple[int, int]:
    rows, columns, stride, dilation, padding, _ = filter
    kernel_sizes = ((rows - 1) * dilation + 1, (columns - 1) * dilation + 1)
    starts = [s if padding == SAME else s - kernel + 1 for s, kernel in zip(size, kernel_sizes, strict=True)]
    return -(-starts[0] // stride), -(-starts[1] // stride)


def convolution(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> Model:
    batch, height, width, channels, filters = size
    rows, columns, stride, dilation, padding, activation = filter
    constants = weights(kind, (filters, rows, columns, channels), filters, 0, np.random.default_rng(1))
    out = image(kind, (batch, *output_size((height, width), filter), filters), 2.0, 120)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, activation, False, dilation, dilation]
    return one_operation(OperationType.CONV_2D, arguments, out)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_match_the_interpreter(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> None:
    assert_kernels_agree(convolution(kind, size, filter))


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize(
    "size", [(1, 9, 7, 3, 8), (2, 6, 5, 4, 6), (1, 3, 2, 5, 3), (1, 5, 33, 9, 4), (2, 4, 18, 1, 2)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_of_few_channels_match_the_interpreter(
    kind: str, size: tuple[int, ...], filter: tuple[int, ...]
) -> None:
    assert_kernels_agree(convolution(kind, size, filter))


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_s_plans_check_convolutions_without_packing_weights(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = []

    def packed(matrix: Any, *rest: Any) -> PackedMatmul:
        matrices.append(matrix)
        return PackedMatmul(matrix, *rest)

    monkeypatch.setattr(packed_matmul, "PackedMatmul", packed)
    prepare(convolution(kind, (1, 4, 3, 5, 6), (1, 1, 1, 1, SAME, 0)))
    assert [(matrix.shape, matrix.strides) for matrix in matrices] == [((5, 6), (0, 0))]


def test_a_compiled_convolution_has_the_constraints_of_the_interpreter_s() -> None:
    constants = weights("per channel", (4, 1, 1, 4), 4, 1, np.random.default_rng(1))  # the dimension 0 is required
    source, out = image("per channel", (1, 2, 2, 4), 0.5, 115), image("per channel", (1, 2, 2, 4), 2.0, 120)
    model = one_operation(OperationType.CONV_2D, [source, *constants, SAME, 1, 1, 0], out)
    for engine in (prepare, interpreter.prepare):
        with pytest.raises(GeneralFailure, match=r"operation 0 .*dimension 1, required is 0 \(C3\)"):
            engine(model)


@pytest.mark.parametrize("channels", range(1, 18))
@pytest.mark.parametrize("micro_kernel", [Float32(-np.inf, np.inf), DotU8S8x4(False, NO_REQUANTIZATION, True)])
def test_two_positions_share_a_vector_of_the_epilogue_if_their_channels_fit(
    micro_kernel: MicroKernel, channels: int
) -> None:
    windows_ = WindowDimension(3, 1, 1, 1, 1, 7)
    shape = ConvShape(1, 7, 7, 3, windows_, windows_, channels)
    kernel = plan_gemm(shape, micro_kernel, TARGETS["avx512vnni"])
    is_shared = channels <= 8
    assert (kernel.lanes, kernel.row_positions) == ((8, 2) if is_shared else (16, 1))
    assert kernel.mr % kernel.row_positions == 0
    lanes = kernel.packed_channel_map
    assert len(lanes) == 16 * kernel.nr_vectors
    expected = [*range(channels)] * kernel.row_positions
    assert lanes[: len(expected)].tolist() == expected[: len(lanes)]
    narrow = plan_gemm(shape, micro_kernel, TARGETS["avx2"])
    assert (narrow.lanes, narrow.row_positions) == (8, 1)


@pytest.mark.parametrize(
    ("channels", "stride", "expected"), [(3, 1, 12), (3, 2, 24), (8, 2, 64), (9, 2, 0), (16, 1, 64), (17, 1, 0)]
)
def test_the_code_of_rows_with_few_bytes_between_positions_is_for_that_stride(
    channels: int, stride: int, expected: int
) -> None:
    windows_ = WindowDimension(3, stride, 1, 1, 1, 32)
    shape = ConvShape(1, 64, 64, channels, windows_, windows_, 8)
    kernel = plan_gemm(shape, Float32(-np.inf, np.inf), TARGETS["avx512vnni"])
    assert kernel.constant_stride == expected
    assert kernel.mr == (16 if expected else 8)
    pointwise = WindowDimension(1, 1, 1, 0, 0, 32)
    shape = ConvShape(1, 32, 32, channels, pointwise, pointwise, 8)
    assert plan_gemm(shape, Float32(-np.inf, np.inf), TARGETS["avx512vnni"]).constant_stride == 0


def depthwise(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> Model:
    batch, height, width, channels, _ = size
    rows, columns, stride, dilation, padding, activation = filter
    constants = weights(kind, (1, rows, columns, channels), channels, 3, np.random.default_rng(2))
    out = image(kind, (batch, *output_size((height, width), filter), channels), 0.25, 110)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, 1, activation, False, dilation, dilation]
    return one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, out)


@pytest.mark.parametrize("filter", [*FILTERS, (5, 7, 1, 1, SAME, 0)])
@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_depthwise_convolutions_match_the_interpreter(
    kind: str, size: tuple[int, ...], filter: tuple[int, ...]
) -> None:
    assert_kernels_agree(depthwise(kind, size, filter))


@pytest.mark.parametrize("filter", [*FILTERS[:4], *DEPTHWISE_FILTERS])
@pytest.mark.parametrize("size", DEPTHWISE_IMAGES)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_depthwise_convolutions_of_many_channels_match_the_interpreter(
    kind: str, size: tuple[int, ...], filter: tuple[int, ...]
) -> None:
    """With several panels, blocks of panels, a last panel that starts early, and pixels taken as one."""
    assert_kernels_agree(depthwise(kind, size, filter))


@pytest.mark.parametrize("image_zero_point", [0, 255])
@pytest.mark.parametrize("zero_point", [0, 1, 122, 128, 255])
def test_extreme_depthwise_sums_match_the_interpreter(zero_point: int, image_zero_point: int) -> None:
    """Weights that int8 holds or not, in channels of extreme, of random and of small ones."""
    shape, random = (1, 3, 3, 200), np.random.default_rng(5)
    values = random.integers(0, 256, shape).astype("u1")
    values[..., 1::5], values[..., 2::5] = 0, 255
    values[..., 64:128] = np.clip(values[..., 64:128], max(zero_point - 9, 0), min(zero_point + 9, 255))
    biases = np.zeros(200, "<i4").tobytes()
    constants = [(Operand(Q8, shape, 0.25, zero_point), values.tobytes()), (Operand(I32, (200,), 0.125), biases)]
    arguments = [image("uint8", (1, 5, 6, 200), 0.5, image_zero_point), *constants, SAME, 1, 1, 1, 0]
    model = one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, image("uint8", (1, 5, 6, 200), 300.0, 120))
    inputs = [np.full((1, 5, 6, 200), value, "u1") for value in (0, 255)]
    inputs.append(random.integers(0, 256, (1, 5, 6, 200)).astype("u1"))
    assert_kernels_agree_on(model, [[array] for array in inputs])


@pytest.mark.parametrize("filter", COLUMN_FILTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [convolution, depthwise])
def test_convolutions_of_one_column_match_the_interpreter(build: Any, kind: str, filter: tuple[int, ...]) -> None:
    assert_kernels_agree(build(kind, COLUMN, filter))


@pytest.mark.parametrize("size", [(1, 8, 8, 8, 16, 2), (2, 7, 5, 9, 3, 3), (1, 13, 11, 14, 66, 2), (1, 4, 6, 5, 85, 5)])
@pytest.mark.parametrize("filter", [filter for filter in FILTERS if filter[3] == 1])
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_convolutions_match_the_interpreter(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> None:
    batch, height, width, channels, filters, groups = size
    rows, columns, stride, _, padding, activation = filter
    constants = weights(kind, (filters, rows, columns, channels // groups), filters, 0, np.random.default_rng(1))
    out = image(kind, (batch, *output_size((height, width), filter), filters), 2.0, 120)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, groups, activation, False]

    assert_kernels_agree(one_operation(OperationType.GROUPED_CONV_2D, arguments, out))


TRANSPOSED = [  # filter height and width, stride, paddings left, right, top, bottom, activation
    (2, 2, 2, (0, 0, 0, 0), 0),
    (3, 3, 2, (0, 1, 0, 1), 1),
    (3, 4, 1, (1, 1, 0, 2), 3),
    (4, 4, 2, (1, 1, 1, 1), 0),
    (1, 2, 3, (0, 0, 0, -2), 0),
    (5, 3, 3, (2, 0, 3, 1), 2),
]


@pytest.mark.parametrize("size", [(1, 8, 8, 8, 16), (2, 4, 5, 3, 1), (1, 5, 3, 17, 13)])
@pytest.mark.parametrize("params", TRANSPOSED)
@pytest.mark.parametrize("kind", KINDS)
def test_transposed_convolutions_match_the_interpreter(
    kind: str, size: tuple[int, ...], params: tuple[int, int, int, tuple[int, int, int, int], int]
) -> None:
    batch, height, width, channels, filters = size
    rows, columns, stride, (left, right, top, bottom), activation = params
    constants = weights(kind, (filters, rows, columns, channels), filters, 0, np.random.default_rng(1))
    tall, wide = (height - 1) * stride + rows - top - bottom, (width - 1) * stride + columns - left - right
    source, out = image(kind, (batch, height, width, channels), 0.5, 115), (batch, tall, wide, filters)
    arguments = [source, *constants, left, right, top, bottom, stride, stride, activation, False]

    assert_kernels_agree(one_operation(OperationType.TRANSPOSE_CONV_2D, arguments, image(kind, out, 1.0, 120)))


@pytest.mark.parametrize("size", [(1, 9, 8, 1, 8), (2, 7, 5, 3, 2), (1, 13, 11, 5, 9), (1, 4, 5, 16, 3)])
@pytest.mark.parametrize("filter", [FILTERS[1], FILTERS[2]])
@pytest.mark.parametrize("kind", KINDS)
def test_depth_multipliers_match_the_interpreter(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> None:
    batch, height, width, channels, multiplier = size
    rows, columns, stride, dilation, padding, activation = filter
    filters = channels * multiplier
    constants = weights(kind, (1, rows, columns, filters), filters, 3, np.random.default_rng(4))
    out = image(kind, (batch, *output_size((height, width), filter), filters), 0.25, 110)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, multiplier, activation, False, dilation, dilation]

    assert_kernels_agree(one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, out))


def fully_connected(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> Model:
    batch, height, width, length, units = size
    constants = weights(kind, (units, length), units, 0, np.random.default_rng(3))
    rows = batch * height * width
    arguments = [image(kind, (rows, length), 0.5, 115), *constants, filter[-1]]
    return one_operation(OperationType.FULLY_CONNECTED, arguments, image(kind, (rows, units), 2.0, 120))


@pytest.mark.parametrize("size", [(1, 16, 8), (1, 1000, 1001), (5, 3, 17), (7, 64, 1)])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_fully_connected_matches_the_interpreter(kind: str, size: tuple[int, int, int]) -> None:
    assert_kernels_agree(fully_connected(kind, (1, 1, *size), (0,)), tolerance=1e-4)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("last", [-0.25, 1 / 3, np.inf])
def test_weights_that_float16_holds_are_read_as_such_with_the_same_bits(
    rows: int, last: float, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Subnormal ones, too, but not all if the last one has more bits or is infinite. SSE4.1 cannot convert them."""
    values = (np.random.default_rng(8).normal(size=(257, 130)) * [[2.0**-15]] * 2).astype(np.float16).astype(FLOAT)
    values[1::2] *= 2**16
    values[-1, -1] = last
    constants = [(Operand(F32, array.shape), array.tobytes()) for array in (values, np.zeros(257, FLOAT))]
    arguments = [Operand(F32, (rows, 130)), *constants, 1]
    model = one_operation(OperationType.FULLY_CONNECTED, arguments, Operand(F32, (rows, 257)))
    monkeypatch.setattr(lowering_products, "_MIN_HALF_WEIGHTS", 1 << 15)
    assert_kernels_agree(model, tolerance=1e-4)
    inputs, program = random_inputs(model, 2), prepare(model)
    monkeypatch.setattr(lowering_products, "_MIN_HALF_WEIGHTS", 1 << 30)
    wide = prepare(model)

    converts = request.node.callspec.params["instruction_set"] not in ("sse4.1", "sse4.1-fma")
    kernel = program.steps[0].function.plan.source_launches[0].kernel
    assert isinstance(kernel.micro_kernel, HalfWeights) is (last == -0.25 and converts)
    assert outputs_of(program, model, inputs)[0].tobytes() == outputs_of(wide, model, inputs)[0].tobytes()


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("build", [convolution, depthwise, fully_connected])
def test_products_of_float16_are_computed_in_float32(
    build: Any, size: tuple[int, ...], filter: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """Sums in another order may be rounded to the next number of float16. SSE4.1 has no instructions for it."""
    model = build("float16", size, filter)
    if request.node.callspec.params["instruction_set"] in ("sse4.1", "sse4.1-fma"):
        assert not prepare(model).compiled_ops
    else:
        assert_kernels_agree(model, tolerance=1 / 1024)


@pytest.mark.parametrize("size", [(33, 70, 100), (9, 31, 17), (60, 128, 33), (17, 26, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_streamed_weights_match_the_interpreter(
    kind: str, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are so small that small weights are streamed, in K blocks of which the last one is shorter."""
    monkeypatch.setattr(gemm_plan, "_MAX_RESIDENT_BYTES", 64)
    monkeypatch.setattr(gemm_plan, "_MAX_K_BLOCK_BYTES", 1200)
    monkeypatch.setattr(gemm_plan, "_STREAMED_MC", 24)
    rows, length, units = size
    constants = weights(kind, (units, 1, 1, length), units, 0, np.random.default_rng(3))
    arguments = [image(kind, (1, 1, rows, length), 0.5, 115), *constants, VALID, 1, 1, 3, False, 1, 1]

    assert_kernels_agree(one_operation(OperationType.CONV_2D, arguments, image(kind, (1, 1, rows, units), 2.0, 120)))


def streams_weights(micro_kernel: MicroKernel, rows: int, length: int, units: int) -> bool:
    pointwise, along = WindowDimension(1, 1, 1, 0, 0, 1), WindowDimension(1, 1, 1, 0, 0, rows)
    shape = ConvShape(1, 1, rows, length, pointwise, along, units)
    kernel = gemm_plan.plan_gemm(shape, micro_kernel, TARGETS["avx512vnni"])
    if kernel.streams_weights:
        assert kernel.mc == min(rows, 128), "each weight is loaded once for many tiles"
        assert kernel.work_items >= 8
        assert kernel.scratch_bytes(TARGETS["avx512vnni"]) <= 1 << 20
    return kernel.streams_weights


def test_weights_that_do_not_fit_the_cache_are_streamed_if_several_tiles_read_them() -> None:
    real, dot4 = Float32(-np.inf, np.inf), DotU8S8x4(True, NO_REQUANTIZATION, has_weight_zero_point=False)
    assert streams_weights(real, 64, 768, 768)
    assert streams_weights(real, 128, 4096, 4096)
    assert streams_weights(real, 512, 4096, 4096)
    assert streams_weights(dot4, 128, 4096, 4096)
    assert not streams_weights(real, 8, 4096, 4096), "one tile"
    assert not streams_weights(real, 128, 256, 256)
    assert not streams_weights(dot4, 128, 768, 768)


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_packed_channel_has_epilogue_constants(target: Target, multiplier: int) -> None:
    for channels in range(multiplier, 70, multiplier):
        shape, window = (1, 5, 5, channels // multiplier), (1, 3, 3, channels)
        bias = np.arange(channels, dtype=np.int32)
        tensors = {
            "float": (Tensor(shape, FLOAT), Tensor(window, FLOAT, value=np.ones(window, FLOAT)), FLOAT),
            "uint8": (
                Tensor(shape, UINT8, 0.5, 1),
                Tensor(window, UINT8, 0.25, 2, value=np.ones(window, UINT8)),
                UINT8,
            ),
        }
        for kind, (input, filter, dtype) in tensors.items():
            lowered = LOWERING_RULES[OperationType.DEPTHWISE_CONV_2D](
                input,
                filter,
                Tensor((channels,), FLOAT if kind == "float" else np.dtype("i4"), 0.125, value=bias),
                output=Tensor((1, 3, 3, channels), dtype, 2.0, 3),
                target=target,
                depth_multiplier=multiplier,
                activation=0,
                stride_width=1,
                stride_height=1,
                padding_scheme=VALID,
            )
            assert isinstance(lowered, KernelLaunch)
            assert isinstance(lowered.kernel, DwConvKernel | DwConvInt8Kernel)
            packed_channels = lowered.kernel.panels * lowered.kernel.nr
            rows, header = (1, 0) if kind == "float" else (REQUANT_ROWS + 1, 9 * 64)
            constant = lowered.constants[1]
            assert len(constant if isinstance(constant, bytes) else constant()) == header + 4 * rows * packed_channels


DILATED_FILTERS = [  # the dilation makes a block of output rows read fewer rows than its buffer would hold, or more
    (3, 1, 1, 7, SAME, 0),
    (3, 2, 1, 6, SAME, 1),
    (2, 2, 2, 5, VALID, 0),
    (3, 3, 1, 2, SAME, 3),
]


@pytest.mark.parametrize("filter", DILATED_FILTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [convolution, depthwise])
def test_dilated_convolutions_match_the_interpreter(build: Any, kind: str, filter: tuple[int, ...]) -> None:
    assert_kernels_agree(build(kind, (2, 24, 9, 5, 7), filter))


def test_of_a_dilated_window_only_the_rows_that_it_reads_are_buffered() -> None:
    rows, columns = windows((128, 62), (7, 1), padding_scheme=SAME, stride_width=1, stride_height=1, dilation_height=17)
    kernel = plan_gemm(ConvShape(1, 128, 62, 12, rows, columns, 12), Float32(-np.inf, np.inf), host_target())

    assert row_buffer_of(kernel.shape, kernel.micro_kernel, kernel.mc).row_count == 7 * kernel.mc
