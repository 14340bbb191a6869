"""Calibration: execute a model with all intermediate results as outputs, for the ranges and the errors of its tensors.

nnfmq returns only a model's outputs. The model is therefore rewritten with the results of all operators as outputs, and
loaded with `nnfmq.load` like any file, then validated; so a quantized model that breaks the HAL's rules is rejected
here. The reference interpreter executes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from quant_params import Array, QuantParams, Range, sqnr_db
from tflite_reader import Graph

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument
from nnfmq.validation.model_validation import validate_model

Sample = tuple[Array, ...]
"""The inputs of one execution, in the model's order."""
GraphExecutor = Callable[[Sample], dict[int, Array]]
"""Executes a graph and returns its inputs and all results, by tensor index."""


@dataclass(frozen=True, slots=True)
class Calibrator:
    """A method to compute the range of a tensor from its values in many executions.

    With `percentile` p, the lower and the upper p-th percentile of each execution's values, averaged over executions.
    With `momentum`, a moving average of each execution's minimum and maximum: old · momentum + new · (1 − momentum).
    With neither, the minimum and the maximum over all executions.
    """

    percentile: float | None = None
    momentum: float | None = None

    def observe(self, values: Array) -> tuple[float, float]:
        """Return the lower and the upper bound for the values of one execution."""
        if self.percentile is None:
            return float(values.min()), float(values.max())
        low, high = np.percentile(values, (100.0 - self.percentile, self.percentile))
        return float(low), float(high)

    def combine(self, bounds: Sequence[tuple[float, float]]) -> Range:
        """Return the range over all executions, from the bounds of each in order."""
        lows, highs = zip(*bounds, strict=True)
        if self.percentile is not None:
            return Range.from_min_max(float(np.mean(lows)), float(np.mean(highs)))
        if self.momentum is None:
            return Range.from_min_max(float(np.min(lows)), float(np.max(highs)))  # unlike min(), these propagate NaN
        return Range.from_min_max(self._moving_average(lows), self._moving_average(highs))

    def _moving_average(self, values: Iterable[float]) -> float:
        assert self.momentum is not None
        average, *others = values
        for value in others:
            average = self.momentum * average + (1.0 - self.momentum) * value
        return average


def calibration_samples(arrays: Mapping[str, Array], graph: Graph) -> list[Sample]:
    """Return the inputs of each calibration execution of `graph`.

    `arrays` contains one float array for each input, by the input's name (any name if there is only one input). The
    first axis counts executions; the others are the input's shape, whose leading 1 may be missing.

    Raises:
        InvalidArgument: If an array is missing, or the type, shape or number of executions of one does not match.
    """
    tensors = [graph.tensors[index] for index in graph.inputs]
    if len(arrays) == len(tensors) == 1:
        arrays = {tensors[0].name: next(iter(arrays.values()))}
    missing = [tensor.name for tensor in tensors if tensor.name not in arrays]
    if missing:
        raise InvalidArgument(f"no calibration values for {', '.join(missing)}; there are {', '.join(arrays)}")
    inputs = [_check_input(arrays[tensor.name], tensor.name, tuple(tensor.shape)) for tensor in tensors]
    counts = [len(values) for values in inputs]
    if len(set(counts)) != 1 or not counts[0]:
        raise InvalidArgument(
            f"calibration inputs of {counts} executions: each input needs the same number, and at least one"
        )
    return list(zip(*inputs, strict=True))


def _check_input(array: Array, name: str, shape: tuple[int, ...]) -> Array:
    """Return the calibration values of one input as float32 in the shape (executions, *shape)."""
    if array.dtype.kind != "f":
        raise InvalidArgument(f"calibration values of {name} are {array.dtype}: they must be floats")
    if array.shape[1:] != shape and (1, *array.shape[1:]) != shape:
        raise InvalidArgument(
            f"calibration values of {name} have shape {array.shape}, but must have (n, {str(shape)[1:]}"
        )
    return np.ascontiguousarray(array, np.float32).reshape(-1, *shape)


def expose_intermediates(graph: Graph) -> Graph:
    """Return `graph` with the results of all operators, in execution order, as its outputs."""
    results = tuple(index for operator in graph.operators for index in operator.outputs)
    return replace(graph, outputs=results).without_unused_tensors()


def make_executor(graph: Graph) -> GraphExecutor:
    """Prepare `graph` for execution in the reference interpreter.

    Raises:
        InvalidArgument: If the model breaks the HAL's rules.
        GeneralFailure: If the interpreter cannot execute it.
    """
    result_indexes = tuple(index for operator in graph.operators for index in operator.outputs)
    loaded = nnfmq.load(expose_intermediates(graph).to_bytes())
    validate_model(loaded.model)
    program = interpreter.prepare(loaded.model)

    def execute(inputs: Sample) -> dict[int, Array]:
        results = [np.empty(info.shape, info.dtype) for info in loaded.outputs]
        program.execute(inputs, results)
        return dict(zip((*graph.inputs, *result_indexes), (*inputs, *results), strict=True))

    return execute


def calibrate(graph: Graph, samples: Sequence[Sample], calibrator: Calibrator) -> dict[int, Range]:
    """Execute the float model with all `samples`; return the range of each input and result, by tensor index.

    Raises:
        InvalidArgument: If a tensor contains an infinity or NaN.
    """
    execute = make_executor(graph)
    bounds: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for index, array in execute(sample).items():
            bounds[index].append(calibrator.observe(array))
    ranges = {}
    for index, tensor_bounds in bounds.items():
        try:
            ranges[index] = calibrator.combine(tensor_bounds)
        except InvalidArgument as error:
            raise InvalidArgument(f"{graph.tensors[index].name!r}: {error}") from None
    return ranges


def measure_sqnr(
    graph: Graph, quantized: Graph, params: Mapping[int, QuantParams], samples: Sequence[Sample]
) -> dict[int, float | None]:
    """Return the signal-to-quantization-noise ratio in dB of each input and result, by tensor index.

    A ratio is None if the tensor is equal in both models or is all zeros. The quantized model receives the quantized
    `samples`, so the noise of a tensor includes that of the operators before it.
    """
    execute_float, execute_quantized = make_executor(graph), make_executor(quantized)
    sums: dict[int, Array] = defaultdict(lambda: np.zeros(2))  # of squares: signal, noise
    for sample in samples:
        inputs = tuple(params[index].quantize(array) for index, array in zip(graph.inputs, sample, strict=True))
        results = execute_quantized(inputs)
        for index, values in execute_float(sample).items():
            values = values.astype(np.float64)
            noise = values - params[index].dequantize(results[index])
            sums[index] += (np.square(values).sum(), np.square(noise).sum())
    return {index: sqnr_db(float(signal), float(noise)) for index, (signal, noise) in sums.items()}
