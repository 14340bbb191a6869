"""Deterministic programs: what may be in one, and that threads do not change bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.compiled import outputs_of, random_inputs
from support.linked import undefined_symbols
from support.onnx_files import OnnxCase
from support.oracles import Array
from support.small_models import one_operation

import nnfmq
from nnfmq.engines.compiled import partition
from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.ir_builder import F32 as FLOAT
from nnfmq.engines.compiled.ir_builder import KernelBuilder, Module, vector
from nnfmq.engines.compiled.kernels import float_ops
from nnfmq.engines.compiled.kernels.float_ops import FloatBinary, FloatUnary
from nnfmq.engines.compiled.target import host_target
from nnfmq.engines.compiled.thread_pool import core_name, default_thread_pool
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model, Operand, OperandType, OperationType

RANDOM = np.random.default_rng(0)


def drawn(*shape: int) -> Array:
    return RANDOM.normal(size=shape).astype(np.float32)


def drawn_bytes(*shape: int) -> Array:
    return RANDOM.integers(0, 256, shape, np.uint8)


def loaded(operator: str, *inputs: Array | None, constants: int = 0, opset: int = 17, **attributes: object) -> Model:
    """Return a model of one ONNX operator; the last `constants` inputs are constants."""
    places = frozenset(range(len(inputs) - constants, len(inputs)))
    return nnfmq.load(OnnxCase(operator, inputs, attributes, places, opset=opset).content()).model


def by_blocks(**attributes: Any) -> Model:
    """Return a product with weights of 4 bits, each 32 of which have a scale."""
    options: dict[str, Any] = {"K": 512, "N": 768, "bits": 4, "block_size": 32, "domain": "com.microsoft", **attributes}
    return loaded("MatMulNBits", drawn(4, 512), drawn_bytes(768, 16, 16), drawn(768, 16), constants=2, **options)


def quantized_lstm() -> Model:
    """Return an LSTM that quantizes its inputs and hidden states when it runs."""
    weights, parameters = drawn_bytes(1, 64, 256), (np.full(1, 0.01, np.float32), np.full(1, 128, np.uint8))
    arguments = (weights, weights, None, None, None, None, None, *parameters, *parameters)
    options: dict[str, Any] = {"hidden_size": 64, "domain": "com.microsoft"}
    return loaded("DynamicQuantizeLSTM", drawn(9, 12, 64), *arguments, constants=11, **options)


LARGE: dict[str, Callable[[], Model]] = {
    "convolution": lambda: loaded("Conv", drawn(1, 24, 40, 40), drawn(48, 24, 3, 3), drawn(48), constants=2),
    "grouped convolution": lambda: loaded("Conv", drawn(1, 24, 40, 40), drawn(48, 6, 3, 3), constants=1, group=4),
    "transposed convolution": lambda: loaded(
        "ConvTranspose", drawn(1, 24, 40, 40), drawn(24, 16, 3, 3), constants=1, strides=[2, 2]
    ),
    "depthwise convolution": lambda: loaded("Conv", drawn(1, 96, 40, 40), drawn(96, 1, 3, 3), constants=1, group=96),
    "streamed weights": lambda: loaded("MatMul", drawn(40, 512), drawn(512, 768), constants=1),
    "weights that float16 holds": lambda: loaded(
        "MatMul", drawn(2, 512), drawn(512, 768).astype(np.float16).astype(np.float32), constants=1
    ),
    "weights of 4 bits": by_blocks,
    "weights of 4 bits, rounded input": lambda: by_blocks(accuracy_level=4),
    "quantized at run time": lambda: loaded(
        "DynamicQuantizeMatMul",
        drawn(40, 512),
        drawn_bytes(512, 768),
        np.full((), 0.01, np.float32),
        constants=2,
        domain="com.microsoft",
    ),
    "batch of products": lambda: loaded("MatMul", drawn(8, 100, 64), drawn(8, 64, 100)),
    "attention": lambda: loaded("Attention", *(drawn(1, 8, 200, 64) for _ in range(3)), opset=23),
    "LSTM": lambda: loaded("LSTM", drawn(9, 12, 64), drawn(1, 256, 64), drawn(1, 256, 64), constants=2, hidden_size=64),
    "LSTM quantized at run time": quantized_lstm,
    "resize": lambda: loaded(
        "Resize", drawn(1, 16, 60, 60), None, np.array([1, 1, 2, 2], np.float32), constants=2, mode="linear"
    ),
    "softmax": lambda: loaded("Softmax", drawn(300, 301), axis=1),
    "mean": lambda: loaded("ReduceMean", drawn(300, 301), axes=[1]),
    "mean of columns": lambda: loaded("ReduceMean", drawn(60, 30, 301), axes=[1]),
    "average pooling": lambda: loaded("AveragePool", drawn(1, 64, 40, 40), kernel_shape=[5, 5], strides=[2, 2]),
    "function": lambda: loaded("Tanh", drawn(100_000)),
}


@pytest.mark.skipif(core_name != "compiled", reason="only the compiled core has a thread pool")
@pytest.mark.parametrize("name", LARGE)
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    model, pool = LARGE[name](), default_thread_pool()
    program, workers, found = partition.prepare(model, is_deterministic=True), pool.worker_count, set[bytes]()
    inputs = random_inputs(model, 0)
    try:
        for count in (0, 1, 2):
            pool.set_worker_count(count)
            for _ in range(3):
                found.add(b"".join(output.tobytes() for output in outputs_of(program, model, inputs)))
    finally:
        pool.set_worker_count(workers)
        pool.stop()
    assert len(found) == 1


OPERATORS = [*map(FloatUnary, float_ops._FLOAT_UNARY), *map(FloatBinary, float_ops._FLOAT_BINARY)]


@pytest.mark.parametrize("operator", OPERATORS)
def test_functions_of_the_c_library_are_known(operator: FloatUnary | FloatBinary) -> None:
    module = Module()
    kb = KernelBuilder(module, "kernel", host_target())
    values = [kb.load(vector(FLOAT, 4), kb.argument(number)) for number in range(len(operator.input_types))]
    kb.store(operator.emit(kb, values, []), kb.argument(2))
    kb.return_void()
    called = undefined_symbols(compile_ir(str(module), host_target()))
    assert bool(called) == (operator.name in (*float_ops.LIBRARY_NAMES, "pow"))


@pytest.mark.parametrize("operator", [name.title() for name in float_ops.LIBRARY_NAMES])
def test_a_function_of_the_c_library_is_refused(operator: str) -> None:
    with pytest.raises(GeneralFailure, match="C library"):
        partition.prepare(loaded(operator, drawn(3)), is_deterministic=True)


def test_a_power_is_refused() -> None:
    with pytest.raises(GeneralFailure, match=r"POW.*C library"):
        partition.prepare(loaded("Pow", drawn(3), drawn(3)), is_deterministic=True)


def test_what_numpy_computes_is_refused_unless_it_is_exact() -> None:
    with pytest.raises(GeneralFailure, match=r"REDUCE_PROD.*NumPy"):
        partition.prepare(loaded("ReduceProd", drawn(3, 4), axes=[1]), is_deterministic=True)
    half = Operand(OperandType.TENSOR_FLOAT16, (3,))
    for code, is_exact in ((OperationType.ADD, True), (OperationType.LOGISTIC, False)):
        arguments = [half, half, 0] if is_exact else [half]
        model = one_operation(code, arguments, half)
        if is_exact:
            assert not partition.prepare(model, is_deterministic=True).compiled_ops
        else:
            with pytest.raises(GeneralFailure, match=r"LOGISTIC.*NumPy"):
                partition.prepare(model, is_deterministic=True)


def test_what_has_no_floats_is_not_refused() -> None:
    numbers = np.arange(6, dtype=np.int64).reshape(2, 3)
    partition.prepare(loaded("ReduceProd", numbers, axes=[1]), is_deterministic=True)
