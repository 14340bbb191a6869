"""Short descriptions of models and tensors, however large or hostile they are."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace
from support import models

import nnfmq
from nnfmq.hal.capabilities import PerformanceInfo, uniform_capabilities
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Request,
    RequestArgument,
    Subgraph,
)
from nnfmq.importers import LoadedModel

LONGEST = 320
F32 = OperandType.TENSOR_FLOAT32
HOSTILE = "<script>alert('x')</script>\x00\N{RIGHT-TO-LEFT OVERRIDE}" * 100
MANY = tuple(TensorInfo(HOSTILE, (2**31 - 1,) * 100, "float32", 0.1, -128) for _ in range(100))
LARGE = Model(
    Subgraph(
        tuple(
            Operand(OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, (2**32 - 1,) * 9, lifetime=LifeTime.CONSTANT_REFERENCE)
            for _ in range(1000)
        ),
        (Operation(OperationType.CONCATENATION, tuple(range(1000)), tuple(range(1000))),) * 1000,
        tuple(range(1000)),
        tuple(range(1000)),
    ),
    referenced=(models.add_model().main,) * 10,
    operand_values=bytes(1_000_000),
)
OBJECTS: dict[str, Any] = {
    "tensor": MANY[0],
    "model": LARGE,
    "subgraph": LARGE.main,
    "operation": LARGE.main.operations[0],
    "operand": replace(
        LARGE.main.operands[0],
        scale=1e-300,
        zero_point=-(2**31),
        location=DataLocation(2**31, 2**63, 2**63),
        channel_quant=ChannelQuant((0.5,) * 5000, 3),
        extension_data=bytes(5000),
    ),
    "scales": ChannelQuant((0.5,) * 5000, 0),
    "request": Request((RequestArgument(),) * 1000, (RequestArgument(),) * 1000),
    "capabilities": uniform_capabilities(PerformanceInfo(1.0, 1.0)),
    "loaded model": LoadedModel(LARGE, MANY, MANY),
}


@pytest.mark.parametrize("described", OBJECTS.values(), ids=OBJECTS)
def test_a_description_is_short_and_printable(described: object) -> None:
    assert len(repr(described)) <= LONGEST
    assert repr(described).isprintable()


def test_a_model_is_described_by_its_types_shapes_and_sizes() -> None:
    loaded = nnfmq.load(nnfmq.example_path("digits.tflite"))
    assert repr(loaded) == "<LoadedModel: 'image' (float32 1x8x8x1) → 'probabilities' (float32 1x10); 6 operations>"
    assert repr(loaded.model).startswith("<Model: TENSOR_FLOAT32 1x8x8x1 → TENSOR_FLOAT32 1x10; 6 operations, ")
    assert repr(loaded.inputs[0]) == "<TensorInfo: 'image', float32 1x8x8x1>"


def test_a_tensor_is_described_with_its_quantization() -> None:
    info = TensorInfo("x", (0, 3), "int8", 0.5, -3)
    assert repr(info) == "<TensorInfo: 'x', int8 ?x3, scale 0.5, zero point -3>"


def test_an_operand_is_described_by_type_shape_lifetime_and_place() -> None:
    operand = Operand(F32, (2, 3), lifetime=LifeTime.CONSTANT_REFERENCE, location=DataLocation(1, 64, 24))
    assert repr(operand) == "<Operand: TENSOR_FLOAT32 2x3, CONSTANT_REFERENCE, pool 1, 24 bytes from 64 on>"
    assert repr(Operand(OperandType.INT32)) == "<Operand: INT32, TEMPORARY_VARIABLE>"


def test_models_that_nobody_has_validated_are_described_too() -> None:
    wrong: Any = Operand(99, (1,), lifetime=77)  # type: ignore[arg-type]
    model = Model(Subgraph((wrong,), (Operation(12345, (9,), ()),), (0, 9), (-1,)))  # type: ignore[arg-type]
    assert repr(model).startswith("<Model: 99 1, nothing → nothing; 1 operations")
    assert "12345" in model._repr_html_()
    assert repr(wrong) == "<Operand: 99 1, 77>"


class Texts(HTMLParser):
    """The texts and the tags of an HTML fragment."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_notebook_shows_inputs_outputs_and_operations() -> None:
    shown = Texts(nnfmq.load(nnfmq.example_path("digits_quant.tflite"))._repr_html_()).texts
    assert shown[shown.index("input 0") :][:5] == ["input 0", "image", "int8", "1x8x8x1", "0.00392157 × (q − -128)"]
    assert shown[shown.index("output 0") :][:2] == ["output 0", "probabilities"]
    assert shown[shown.index("CONV_2D") + 1].isdigit()


@pytest.mark.parametrize("model", [LARGE, LoadedModel(LARGE, MANY, MANY)], ids=["model", "loaded model"])
def test_html_is_escaped_and_limited(model: Any) -> None:
    html = model._repr_html_()
    assert Texts(html).tags <= {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert "… " in html
    assert len(html) < 60_000
