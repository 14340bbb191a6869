"""The two quantized LSTM operations against the formulas on the real values that their codes stand for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import lstm_definition
from support.by_name import Use

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations.declaration import Tensor
from nnfmq.operations.quantized_lstm import QuantizedLayerNorm

Array = npt.NDArray[Any]
Quantization = tuple[float, int]
INT8, UINT8 = OperandType.TENSOR_QUANT8_ASYMM_SIGNED, OperandType.TENSOR_QUANT8_ASYMM
GATES = ("input", "forget", "cell", "output")

# -- QUANTIZED_LSTM ---------------------------------------------------------------------------------------------------

BATCH, INPUT, CELLS, OUTPUT = 3, 5, 8, 4
WEIGHT, PEEPHOLE, NORM, STATE, SUM = 2.0**-7, 2.0**-14, 2.0**-13, 2.0**-11, 2.0**-12
IN: Quantization = (2.0**-6, 3)
Variant = frozenset[str]
VARIANTS = [
    frozenset(names)
    for n in range(5)
    for names in itertools.combinations(("cifg", "peephole", "projection", "norm"), n)
]


def codes(rng: Any, shape: tuple[int, ...], most: int = 127) -> Array:
    return np.asarray(rng.integers(-most, most + 1, shape))


class Example:
    """Random codes of a whole cell, and how each tensor is quantized."""

    def __init__(self, variant: Variant, seed: int = 0, **attributes: Any) -> None:
        rng = np.random.default_rng(seed)
        self.output: Quantization = (2.0**-6, -5) if "projection" in variant else (2.0**-7, 0)
        self.values: dict[str, Any] = {}
        self._real_scales: dict[str, float] = {}  # those of biases are not in the model
        self.places: dict[str, Quantization] = {
            "input": IN,
            "output_state_in": self.output,
            "cell_state_in": (STATE, 0),
        }
        size = OUTPUT if "projection" in variant else CELLS
        bias = NORM / 1024 if "norm" in variant else IN[0] * WEIGHT
        for gate in GATES:
            here = gate != "input" or "cifg" not in variant
            self._put(f"input_to_{gate}_weights", here, codes(rng, (CELLS, INPUT)), WEIGHT)
            self._put(f"recurrent_to_{gate}_weights", here, codes(rng, (CELLS, size)), WEIGHT)
            self._put(f"{gate}_gate_bias", here, codes(rng, (CELLS,), int(0.8 / bias)), bias)
            self._put(f"{gate}_layer_norm_weights", here and "norm" in variant, codes(rng, (CELLS,), 9000), NORM)
            if gate != "cell":
                self._put(
                    f"cell_to_{gate}_weights", here and "peephole" in variant, codes(rng, (CELLS,), 16000), PEEPHOLE
                )
        self._put("projection_weights", "projection" in variant, codes(rng, (size, CELLS)), WEIGHT)
        self._put("projection_bias", "projection" in variant, codes(rng, (size,), 9000), WEIGHT * 2.0**-7)
        self.values["input"] = codes(rng, (BATCH, INPUT), 60)
        self.values["output_state_in"] = codes(rng, (BATCH, size), 60)
        self.values["cell_state_in"] = codes(rng, (BATCH, CELLS), 3000)
        sums = 2.0**-10 if "norm" in variant else SUM
        self.values |= {f"{gate}_intermediate_scale": sums for gate in GATES}
        self.values |= {"cell_clip": 0.0, "projection_clip": 0.0}
        self.values |= {"hidden_state_zero_point": 0, "hidden_state_scale": 2.0**-7} | attributes

    def _put(self, name: str, present: bool, value: Array, scale: float) -> None:
        self.values[name] = value if present else None
        self.places[name] = (0.0 if "bias" in name else scale, 0)
        self._real_scales[name] = scale

    def use(self) -> Use:
        places = self.places | {"output0": self.output, "output1": (STATE, 0), "output2": self.output}
        return Use(OperationType.QUANTIZED_LSTM, self.values, 3, first_type=INT8, quantization=places)

    def run(self) -> tuple[Array, Array]:
        """Return the output and the cell state as real values."""
        state, cells, output = self.use().run()
        np.testing.assert_array_equal(state, output)
        return (output.astype(float) - self.output[1]) * self.output[0], cells * STATE

    def defined(self, **changes: Any) -> tuple[Array, Array]:
        """Return what the formulas give for the real values."""
        cell = {
            name: None if self.values[name] is None else self.values[name] * s for name, s in self._real_scales.items()
        }
        x, h, c = (self._real(name) for name in ("input", "output_state_in", "cell_state_in"))
        clips = {name: self.values[name] for name in ("cell_clip", "projection_clip")}
        out, _, state = lstm_definition.sequence(cell, x[None], h, c, activation=4, **(clips | changes))
        least = (-128 - self.output[1]) * self.output[0]
        return np.clip(out[0], least, (127 - self.output[1]) * self.output[0]), state

    def _real(self, name: str) -> Array:
        scale, zero_point = self.places[name]
        return np.asarray((self.values[name] - zero_point) * scale)


def close(found: tuple[Array, Array], expected: tuple[Array, Array], unit: float) -> None:
    np.testing.assert_allclose(found[1], expected[1], atol=0.02)
    np.testing.assert_allclose(found[0], expected[0], atol=3 * unit)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(sorted(v)) or "plain")
def test_a_step_is_the_formulas_within_its_precision(variant: Variant, seed: int) -> None:
    example = Example(variant, seed)

    close(example.run(), example.defined(), example.output[0])


def test_peepholes_see_the_previous_state_which_the_reference_reads_from_its_output_buffer() -> None:
    example = Example(frozenset(["peephole"]))
    example.values["cell_state_in"] = np.full((BATCH, CELLS), 8000)
    without = Example(frozenset(["peephole"]))
    without.values |= {"cell_state_in": np.full((BATCH, CELLS), 8000)}
    without.values |= {f"cell_to_{gate}_weights": np.zeros(CELLS, int) for gate in ("input", "forget")}

    close(example.run(), example.defined(), example.output[0])
    assert np.abs(example.defined()[1] - without.defined()[1]).max() > 0.5


def test_biases_count_without_layer_normalization_where_the_reference_drops_them() -> None:
    example, without = Example(frozenset()), Example(frozenset())
    without.values |= {f"{gate}_gate_bias": np.zeros(CELLS, int) for gate in GATES}

    close(example.run(), example.defined(), example.output[0])
    assert np.abs(example.defined()[1] - without.defined()[1]).max() > 0.2


def test_the_projection_is_clipped_in_units_of_the_output_and_not_of_the_weights() -> None:
    example = Example(frozenset(["projection"]), projection_clip=0.25)

    output, _ = example.run()

    assert np.abs(example.defined(projection_clip=0.0)[0]).max() > 0.5
    assert np.abs(output).max() == 0.25
    close((output, example.run()[1]), example.defined(), example.output[0])


def test_the_cell_state_is_clipped() -> None:
    example = Example(frozenset(), cell_clip=0.5)

    _, state = example.run()

    assert np.abs(state).max() == 0.5


@pytest.mark.parametrize("zero_point", [-20, 7])
def test_a_zero_point_of_the_hidden_state_cancels_out_in_the_projection(zero_point: int) -> None:
    plain, moved = (
        Example(frozenset(["projection"]), hidden_state_zero_point=z, hidden_state_scale=2.0**-6)
        for z in (0, zero_point)
    )

    np.testing.assert_allclose(moved.run()[0], plain.run()[0], atol=plain.output[0])


def test_a_projection_bias_may_be_omitted() -> None:
    example = Example(frozenset(["projection"]))
    example.values["projection_bias"] = None

    close(example.run(), example.defined(), example.output[0])


@pytest.mark.parametrize(("scale", "guard"), [(2.0**-15, 1), (2.0**-8, 39)])
def test_a_variance_below_one_is_replaced_by_a_guard_that_grows_with_the_scale(scale: float, guard: int) -> None:
    ones = Tensor((2,), np.dtype("<i2"), scale, 0, None, np.full(2, round(1 / scale) - 1, np.int16))
    bias = Tensor((2,), np.dtype("<i4"), 0.0, 0, None, np.zeros(2, np.int32))

    found = QuantizedLayerNorm.of(ones, bias).apply(np.array([[0, 1]])) / (1 << 12)

    np.testing.assert_allclose(found, [[-0.5 / guard**0.5, 0.5 / guard**0.5]], atol=0.01)


VIOLATIONS: list[tuple[str, dict[str, Any], dict[str, Quantization]]] = [
    ("C1", {"input": np.zeros(INPUT, int)}, {}),
    ("C2", {"input_to_cell_weights": np.zeros((CELLS, INPUT + 1), int)}, {}),
    ("C3", {"recurrent_to_input_weights": None}, {}),
    ("C4", {"cell_to_forget_weights": None}, {}),
    ("C5", {"cell_gate_bias": np.zeros(1, int)}, {}),
    ("C6", {"projection_weights": None}, {}),
    ("C7", {"output_layer_norm_weights": None}, {}),
    ("C8", {"cell_state_in": np.zeros((BATCH, OUTPUT), int)}, {}),
    ("C9", {"cell_clip": -0.5}, {}),
    ("C9", {"projection_clip": -0.5}, {}),
    ("C13", {}, {"cell_state_in": (2.0**-8, 0)}),
    ("C13", {}, {"cell_state_in": (2.0**-16, 0)}),
    ("C13", {}, {"cell_state_in": (0.0007, 0)}),
    ("C14", {"hidden_state_zero_point": 128}, {}),
    ("C14", {"hidden_state_zero_point": -129}, {}),
    ("Q1", {"forget_intermediate_scale": 0.0}, {}),
    ("Q1", {"hidden_state_scale": 0.0}, {}),
    ("Q1", {"hidden_state_scale": float("nan")}, {}),
    ("Q1", {"cell_intermediate_scale": -1.0}, {}),
]


@pytest.mark.parametrize(("rule", "changes", "places"), VIOLATIONS)
def test_quantized_lstm_c1_to_c14_a_violated_constraint_is_named(
    rule: str, changes: dict[str, Any], places: dict[str, Quantization]
) -> None:
    example = Example(frozenset(["peephole", "projection", "norm"]))
    example.values |= changes
    example.places |= places

    with pytest.raises(GeneralFailure, match=rf"operation 0 \(QUANTIZED_LSTM\): .*\({rule}\)$"):
        example.use().run()


def test_S5_the_state_may_not_be_omitted() -> None:
    example = Example(frozenset())
    example.values["cell_state_in"] = None

    with pytest.raises(InvalidArgument, match=r"\(S5\)$"):
        example.use().run()


# -- QUANTIZED_16BIT_LSTM ---------------------------------------------------------------------------------------------

FIXED: Quantization = (1 / 128, 128)
WEIGHTS: Quantization = (1 / 64, 120)
SIXTEEN = OperationType.QUANTIZED_16BIT_LSTM


def sixteen(seed: int = 0) -> tuple[dict[str, Any], dict[str, Quantization]]:
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {f"input_to_{gate}_weights": rng.integers(0, 256, (CELLS, INPUT)) for gate in GATES}
    values |= {f"recurrent_to_{gate}_weights": rng.integers(0, 256, (CELLS, CELLS)) for gate in GATES}
    values |= {f"{gate}_gate_bias": rng.integers(-8000, 8000, CELLS) for gate in GATES}
    values |= {"input": rng.integers(0, 256, (BATCH, INPUT)), "prev_output": rng.integers(0, 256, (BATCH, CELLS))}
    values |= {"prev_cell_state": rng.integers(-6000, 6000, (BATCH, CELLS))}
    places = dict.fromkeys(values, WEIGHTS) | {"input": FIXED, "prev_output": FIXED, "output1": FIXED}
    places |= {f"{gate}_gate_bias": (WEIGHTS[0] / 128, 0) for gate in GATES}
    return values, places | {"prev_cell_state": (2.0**-11, 0), "output0": (2.0**-11, 0)}


def run_sixteen(values: dict[str, Any], places: dict[str, Quantization]) -> list[Array]:
    return Use(SIXTEEN, values, 2, first_type=UINT8, quantization=places).run()


@pytest.mark.parametrize("seed", range(6))
def test_16_bits_are_the_formulas_with_the_columns_in_the_reference_s_order(seed: int) -> None:
    values, places = sixteen(seed)
    real = {name: (value - places[name][1]) * places[name][0] for name, value in values.items()}
    vector = np.concatenate([real["input"], real["prev_output"]], axis=1)

    state, output = run_sixteen(values, places)

    gates = {}
    for gate in GATES:
        matrix = np.concatenate([real[f"recurrent_to_{gate}_weights"], real[f"input_to_{gate}_weights"]], axis=1)
        gates[gate] = np.clip(vector @ matrix.T + real[f"{gate}_gate_bias"], -8, 8)
    sigmoid = lstm_definition.sigmoid
    cells = sigmoid(gates["forget"]) * real["prev_cell_state"] + sigmoid(gates["input"]) * np.tanh(gates["cell"])
    np.testing.assert_allclose(state / 2**11, cells, atol=0.01)
    np.testing.assert_allclose((output - 128.0) / 128, sigmoid(gates["output"]) * np.tanh(cells), atol=2 / 128)


@pytest.mark.parametrize(
    ("rule", "changes", "places"),
    [
        ("C1", {"input": np.zeros(BATCH, int)}, {}),
        ("C1", {"prev_cell_state": np.zeros((BATCH, CELLS + 1), int)}, {}),
        ("C1", dict.fromkeys(("prev_cell_state", "prev_output"), np.zeros(BATCH, int)), {}),
        ("C1", dict.fromkeys(("prev_cell_state", "prev_output"), np.zeros((BATCH + 1, CELLS), int)), {}),
        ("C2", {"input_to_cell_weights": np.zeros((CELLS, CELLS), int)}, {}),
        ("C3", {"cell_gate_bias": np.zeros(CELLS + 1, int)}, {}),
        ("C4", {}, {"recurrent_to_output_weights": (WEIGHTS[0], 121)}),
        ("C5", {}, {"forget_gate_bias": (WEIGHTS[0] / 64, 0)}),
        ("C6", {}, {"prev_cell_state": (2.0**-10, 0)}),
        ("C6", {}, {"output0": (2.0**-12, 0)}),
        ("Q6", {}, {"input": (1 / 128, 127)}),
        ("Q6", {}, {"prev_output": (1 / 64, 128)}),
        ("Q6", {}, {"output1": (1 / 256, 128)}),
    ],
)
def test_16_bits_c1_to_c6_a_violated_constraint_is_named(
    rule: str, changes: dict[str, Any], places: dict[str, Quantization]
) -> None:
    values, all_places = sixteen()

    with pytest.raises(GeneralFailure, match=rf"operation 0 \(QUANTIZED_16BIT_LSTM\): .*\({rule}\)$"):
        run_sixteen(values | changes, all_places | places)


@pytest.mark.parametrize("name", ["input_to_input_weights", "input_gate_bias", "prev_output"])
def test_S5_nothing_of_16_bits_may_be_omitted(name: str) -> None:
    values, places = sixteen()

    with pytest.raises(InvalidArgument, match=r"\(S5\)$"):
        run_sixteen(values | {name: None}, places)
