"""TFLite files of one operator with a float input and weights of 8 or 4 bits ("hybrid", dynamic-range quantization)."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.sixteen_bit_cases import channels, filter
from support.tflite_cases import Case, x
from support.tflite_files import CONV, Tensor

ASYMMETRIC = {"AsymmetricQuantizeInputs": True}


def real_bias(count: int) -> Any:
    return Tensor("bias", (count,), data=np.random.default_rng(4).uniform(-3, 3, count).astype(np.float32).tobytes())


def four_bits(*shape: int, scales: tuple[float, ...] = (0.02,)) -> Any:
    """A constant of INT4: two elements in each byte, the first in the lower half."""
    values = np.random.default_rng(6).integers(-8, 8, int(np.prod(shape))).astype(np.uint8) & 15
    padded = np.append(values, [0] * (values.size % 2)).astype(np.uint8)
    data = (padded[::2] | padded[1::2] << 4).tobytes()
    return Tensor(f"h{shape}", shape, "INT4", data, scales, (0,) * len(scales), 0)


def products() -> list[Case]:
    rows, out = x(3, 33), x(3, 7)
    connected = ("FULLY_CONNECTED", "FullyConnectedOptions")
    cases = []
    for note, weights in (
        ("tensor", filter(7, 33)),
        ("units", filter(7, 33, scales=channels(7))),
        ("int4", four_bits(7, 33)),
        ("int4-units", four_bits(7, 33, scales=channels(7))),
    ):
        for kind, options in (("", {}), ("-asymmetric", ASYMMETRIC)):
            given = [rows, weights, real_bias(7)]
            cases.append(Case(connected[0], given, [out], connected[1], options, note=note + kind))
    keep = {"KeepNumDims": 1, "FusedActivationFunction": 1}
    cases.append(Case(connected[0], [x(2, 3, 33), filter(7, 33)], [x(2, 3, 7)], connected[1], keep, note="rank-3"))
    image, result = x(2, 7, 6, 4), x(2, 7, 6, 6)
    conv = ("CONV_2D", "Conv2DOptions")
    filters = {
        "channels": filter(6, 3, 2, 4, scales=channels(6)),
        "equal": filter(6, 3, 2, 4, scales=(0.02,) * 6),
        "tensor": filter(6, 3, 2, 4),
        "int4": four_bits(6, 3, 2, 4, scales=channels(6)),
    }
    for note, weights in filters.items():
        for one, made, several in ((image, result, "-images"), (x(1, 7, 6, 4), x(1, 7, 6, 6), "")):
            cases.append(Case(conv[0], [one, weights, real_bias(6)], [made], conv[1], CONV, note=note + several))
    taps = filter(1, 3, 2, 8, scales=channels(8), dimension=3)
    depthwise = CONV | {"DepthMultiplier": 2, "FusedActivationFunction": 1}
    given = [image, taps, real_bias(8)]
    cases.append(Case("DEPTHWISE_CONV_2D", given, [x(2, 7, 6, 8)], "DepthwiseConv2DOptions", depthwise))
    left, product = x(2, 3, 9), x(2, 3, 5)
    for options in ({}, ASYMMETRIC):
        note = "-".join(options)
        right, turned = filter(2, 9, 5), filter(2, 5, 9)
        cases.append(Case("BATCH_MATMUL", [left, right], [product], "BatchMatMulOptions", options, note=note))
        adjoint = options | {"AdjY": 1}
        cases.append(
            Case("BATCH_MATMUL", [left, turned], [product], "BatchMatMulOptions", adjoint, note=note + "adjoint")
        )
        one = [left, filter(9, 5)]
        cases.append(Case("BATCH_MATMUL", one, [product], "BatchMatMulOptions", options, note=note + "broadcast"))
    lookups = x(3, kind="INT32")
    cases.append(Case("EMBEDDING_LOOKUP", [lookups, filter(6, 5)], [x(3, 5)], low=0, high=5, note="tensor"))
    rows_of = filter(6, 5, scales=channels(6))
    return [*cases, Case("EMBEDDING_LOOKUP", [lookups, rows_of], [x(3, 5)], low=0, high=5, note="rows")]


def state(*shape: int, name: str) -> Any:
    return Tensor(name, shape, extra={"IsVariable": 1})


def eight_bits(*shape: int, seed: int = 1, scale: float = 0.01) -> Any:
    data = np.random.default_rng(seed).integers(-127, 128, shape).astype(np.int8).tobytes()
    return Tensor(f"w{shape}{seed}", shape, "INT8", data, (scale,), (0,))


def floats(*shape: int, seed: int = 1) -> Any:
    data = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32).tobytes()
    return Tensor(f"f{shape}{seed}", shape, data=data)


def lstm_inputs(rows: Any, outputs: int, form: str) -> list[Any]:
    """The 24 inputs of an LSTM of 4 cells."""
    size, units = rows.shape[-1], 4
    given: list[Any] = [rows, *[None] * 23]
    for gate in range(1 if "coupled" in form else 0, 4):
        given[1 + gate] = eight_bits(units, size, seed=gate)
        given[5 + gate] = eight_bits(units, outputs, seed=4 + gate)
        given[12 + gate] = floats(units, seed=gate)
        if "peephole" in form and gate != 2:
            given[9 + (0, 1, 0, 2)[gate]] = eight_bits(units, seed=8 + gate)
        if "normalized" in form:
            given[20 + gate] = floats(units, seed=12 + gate)
    if "projection" in form:
        given[16], given[17] = eight_bits(outputs, units, seed=20), floats(outputs, seed=21)
    return given


def recurrent() -> list[Case]:
    cases = []
    for options in ({}, ASYMMETRIC):
        note = "-".join(options)
        tanh = options | {"FusedActivationFunction": 4}
        cell = [eight_bits(4, 3), eight_bits(4, 4, seed=2), floats(4), state(2, 4, name="hidden")]
        cases.append(Case("RNN", [x(2, 3), *cell], [x(2, 4)], "RNNOptions", tanh, note=note))
        sequence = [x(2, 5, 3), *cell]
        name = "UNIDIRECTIONAL_SEQUENCE_RNN"
        cases.append(Case(name, sequence, [x(2, 5, 4)], "SequenceRNNOptions", tanh, note=note))
        weights = [eight_bits(6, 5), eight_bits(6, 4, seed=2), floats(3), state(2, 24, name="memory")]
        svdf = options | {"Rank": 2, "FusedActivationFunction": 1}
        cases.append(Case("SVDF", [x(2, 5), *weights], [x(2, 3)], "SVDFOptions", svdf, note=note))
        for form, outputs in (("plain", 4), ("coupled-peephole", 4), ("normalized-projection", 3)):
            given = lstm_inputs(x(2, 5, 3), outputs, form)
            given[18:20] = [state(2, outputs, name="h"), state(2, 4, name="c")]
            name, table = "UNIDIRECTIONAL_SEQUENCE_LSTM", "UnidirectionalSequenceLSTMOptions"
            cases.append(Case(name, given, [x(2, 5, outputs)], table, tanh, note=form + note))
            given = [x(2, 3), *given[1:]]
            cases.append(Case("LSTM", given, [x(2, outputs)], "LSTMOptions", tanh, note=form + note))
    return cases


HYBRID_CASES = [*products(), *recurrent()]
