"""Runs of a model with every intermediate value in sight, by nnfmq's own interpreter: ranges and errors.

A model shows a value that is among its outputs, so the model that runs here is the same with all results as outputs,
written as a file and read by `nnfmq.load` as any other. A quantized model that the HAL's rules forbid is found so too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from quant_params import Affine, Array, Range, sqnr_db
from tflite_reader import Graph

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.hal.errors import InvalidArgument
from nnfmq.validation.model import validate_model

Sample = tuple[Array, ...]  # one execution's inputs, in the model's order
Run = Callable[[Sample], dict[int, Array]]


@dataclass(frozen=True, slots=True)
class Estimator:
    """How a range is made of many executions' values.

    `percentile`: of each execution's values, p from below and from above instead of the extremes, averaged over
    executions. `momentum`: a moving average of the extremes, old × momentum + new × (1 − momentum). Neither: the least
    and the largest value of all.
    """

    percentile: float | None = None
    momentum: float | None = None

    def ends(self, values: Array) -> tuple[float, float]:
        """Return the ends of one execution's values."""
        if self.percentile is None:
            return float(values.min()), float(values.max())
        low, high = np.percentile(values, (100.0 - self.percentile, self.percentile))
        return float(low), float(high)

    def combined(self, ends: Sequence[tuple[float, float]]) -> Range:
        """Return the range of all executions, from the ends of each in their order."""
        lows, highs = zip(*ends, strict=True)
        if self.percentile is not None:
            return Range.holding(float(np.mean(lows)), float(np.mean(highs)))
        if self.momentum is None:
            return Range.holding(float(np.min(lows)), float(np.max(highs)))  # unlike min(), these see a NaN
        return Range.holding(self._moving(lows), self._moving(highs))

    def _moving(self, numbers: Iterable[float]) -> float:
        assert self.momentum is not None
        first, *others = numbers
        for number in others:
            first = self.momentum * first + (1.0 - self.momentum) * number
        return first


def samples(arrays: Mapping[str, Array], graph: Graph) -> list[Sample]:
    """Return the calibration inputs of `graph`, one for each execution.

    `arrays` has one array for each input, by its name (any name where there is one of each): float, n executions along
    the first axis, then the input's shape, whose leading 1 may be missing. Raises InvalidArgument.
    """
    tensors = [graph.tensors[index] for index in graph.inputs]
    if len(arrays) == len(tensors) == 1:
        arrays = {tensors[0].name: next(iter(arrays.values()))}
    missing = [tensor.name for tensor in tensors if tensor.name not in arrays]
    if missing:
        raise InvalidArgument(f"no calibration values for {', '.join(missing)}; there are {', '.join(arrays)}")
    columns = [_column(arrays[tensor.name], tensor.name, tuple(tensor.shape)) for tensor in tensors]
    if len({len(column) for column in columns}) != 1 or not len(columns[0]):
        raise InvalidArgument(
            f"calibration inputs of {[len(column) for column in columns]} executions: as many of each, and one at least"
        )
    return list(zip(*columns, strict=True))


def _column(array: Array, name: str, shape: tuple[int, ...]) -> Array:
    if array.dtype.kind != "f":
        raise InvalidArgument(
            f"calibration values of {name} are {array.dtype}: floats, as the model gets them, are needed"
        )
    if array.shape[1:] != shape and (1, *array.shape[1:]) != shape:
        raise InvalidArgument(f"calibration values of {name} have shape {array.shape}: needed is (n, {str(shape)[1:]}")
    return np.ascontiguousarray(array, np.float32).reshape(-1, *shape)


def shown(graph: Graph) -> Graph:
    """Return `graph` with the results of all its operators as outputs, in their order; nothing else is kept."""
    results = tuple(index for operator in graph.operators for index in operator.outputs)
    return replace(graph, outputs=results).compacted()


def runner(graph: Graph) -> Run:
    """Return what executes `graph` and gives its inputs and the result of each operator, by their tensors' indexes.

    Raises InvalidArgument or GeneralFailure where nnfmq cannot execute it.
    """
    results_of = tuple(index for operator in graph.operators for index in operator.outputs)
    loaded = nnfmq.load(shown(graph).written())
    validate_model(loaded.model)
    program = interpreter.prepare(loaded.model)

    def run(inputs: Sample) -> dict[int, Array]:
        results = [np.empty(info.shape, info.dtype) for info in loaded.outputs]
        program.execute(inputs, results)
        return dict(zip((*graph.inputs, *results_of), (*inputs, *results), strict=True))

    return run


def measured(graph: Graph, inputs: Sequence[Sample], estimator: Estimator) -> dict[int, Range]:
    """Return the range of each of the float model's inputs and results over `inputs`."""
    run = runner(graph)
    ends: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in inputs:
        for index, array in run(sample).items():
            ends[index].append(estimator.ends(array))
    return {index: _range(graph, index, pairs, estimator) for index, pairs in ends.items()}


def _range(graph: Graph, index: int, ends: Sequence[tuple[float, float]], estimator: Estimator) -> Range:
    try:
        return estimator.combined(ends)
    except InvalidArgument as error:
        raise InvalidArgument(f"{graph.tensors[index].name!r}: {error}") from None


def errors(
    graph: Graph, quantized: Graph, how: Mapping[int, Affine], inputs: Sequence[Sample]
) -> dict[int, float | None]:
    """Return for each input and result how near the quantized model's is to the float one's: signal to noise in dB.

    None where the two are equal, or the signal is 0. The quantized model gets the quantized `inputs`, so errors add up
    from layer to layer.
    """
    exact, coarse = runner(graph), runner(quantized)
    sums: dict[int, Array] = defaultdict(lambda: np.zeros(2))
    for sample in inputs:
        codes = tuple(how[index].codes(array) for index, array in zip(graph.inputs, sample, strict=True))
        found = coarse(codes)
        for index, values in exact(sample).items():
            values = values.astype(np.float64)
            sums[index] += (np.square(values).sum(), np.square(values - how[index].reals(found[index])).sum())
    return {index: sqnr_db(float(signal), float(noise)) for index, (signal, noise) in sums.items()}
