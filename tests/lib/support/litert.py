"""One operator of TFLite, computed by LiteRT's reference kernels.

LiteRT is an optional dependency: without it the tests that import this module are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from nnfmq.hal.types import Operand, OperandType, OperationType
from support.one_result import results_of
from support.oracles import Argument, Array, Case
from support.tflite_files import Operator, Tensor, writer

litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

Feed: TypeAlias = Argument | tuple[Operand, bytes] | None  # an input of the model, a constant, or omitted

# ELU has no reference kernel; that of LOCAL_RESPONSE_NORMALIZATION leaves the window's last channel out.
_OPTIMIZED = ("ELU", "LOCAL_RESPONSE_NORMALIZATION")
_KINDS = {
    OperandType.TENSOR_FLOAT32: "FLOAT32",
    OperandType.TENSOR_INT32: "INT32",
    OperandType.INT32: "INT32",
    OperandType.TENSOR_BOOL8: "BOOL",
    OperandType.TENSOR_QUANT8_ASYMM: "UINT8",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "INT8",
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: "INT8",
    OperandType.TENSOR_QUANT16_SYMM: "INT16",
}


def shared(
    name: str,
    operation: OperationType,
    data: Sequence[Argument],
    output: Operand | Sequence[Operand],
    rest: Sequence[Any] = (),
    constants: Sequence[Feed] = (),
    table: str = "",
    options: Mapping[str, Any] | None = None,
) -> Case:
    """Return a case with common first arguments, followed by the HAL's `rest` and by TFLite's constants."""
    outputs = [output] if isinstance(output, Operand) else list(output)
    return Case(
        lambda: results_of(operation, [*data, *rest], outputs),
        lambda: by_litert(name, [*data, *constants], outputs, table, options),
    )


def by_litert(
    name: str,
    feeds: Sequence[Feed],
    outputs: Sequence[Operand],
    table: str = "",
    options: Mapping[str, Any] | None = None,
    states: Sequence[int] = (),
    *,
    custom: bytes = b"",
    intermediates: Sequence[Operand] = (),
) -> list[Array]:
    """Return the outputs, then the feeds at `states`, which the operator changes in place.

    A custom operator has its options in `custom`; of `intermediates` only scales and zero points count.
    """
    given = [(place, feed) for place, feed in enumerate(feeds) if feed is not None]
    places = {place: index for index, (place, _) in enumerate(given)}
    tensors = [_tensor(f"i{place}", feed[0], feed[1], place in states) for place, feed in given]
    tensors += [_tensor(f"o{n}", output, None, False) for n, output in enumerate(outputs)]
    results = range(len(given), len(tensors))
    tensors += [_tensor(f"m{n}", operand, None, False) for n, operand in enumerate(intermediates)]
    inner = range(results.stop, len(tensors))
    taken = [places.get(place, -1) for place in range(len(feeds))]
    operator = Operator(name, taken, results, table, options or {}, custom, inner)
    arrays = {places[place]: feed[1] for place, feed in given if isinstance(feed[1], np.ndarray)}
    inputs = [index for place, index in places.items() if index in arrays and place not in states]
    content = writer.write(tensors, [operator], inputs, results)
    resolvers = litert.OpResolverType
    resolver = resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES if name in _OPTIMIZED else resolvers.BUILTIN_REF
    return _run(content, resolver, arrays, [*results, *(places[place] for place in states)])


def _tensor(name: str, operand: Operand, value: Array | bytes | None, variable: bool) -> Any:
    shape = value.shape if isinstance(value, np.ndarray) else operand.dimensions
    scales: Sequence[float] = (operand.scale,) if operand.scale else ()
    zero_points, dimension = [operand.zero_point] * len(scales), 0
    if operand.channel_quant:
        scales, dimension = operand.channel_quant.scales, operand.channel_quant.channel_dim
        zero_points = [0] * len(scales)
    data = value if isinstance(value, bytes) else None
    extra = {"IsVariable": 1} if variable else {}
    return Tensor(name, shape, _KINDS[operand.type], data, scales, zero_points, dimension, extra)


def _run(content: bytes, resolver: Any, arrays: Mapping[int, Array], wanted: Sequence[int]) -> list[Array]:
    runner = litert.Interpreter(model_content=content, experimental_op_resolver_type=resolver, num_threads=1)
    runner.allocate_tensors()
    kinds = {detail["index"]: detail["dtype"] for detail in runner.get_tensor_details()}
    for index, array in arrays.items():
        runner.set_tensor(index, array.astype(kinds[index]))
    runner.invoke()
    return [runner.get_tensor(index) for index in wanted]
