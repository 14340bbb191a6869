"""The HAL's test vectors ($NNFMQ_DATA/vts) as models, requests and expected outputs, and what passes.

The format and the criteria are those of that folder's README; nothing here knows an engine.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.hal.types import (
    ChannelQuant,
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)

Array = npt.NDArray[Any]

DTYPES = {
    "TENSOR_FLOAT32": "<f4", "FLOAT32": "<f4", "TENSOR_FLOAT16": "<f2", "FLOAT16": "<f2", "TENSOR_INT32": "<i4",
    "INT32": "<i4", "UINT32": "<u4", "BOOL": "u1", "TENSOR_BOOL8": "u1", "TENSOR_QUANT8_ASYMM": "u1",
    "TENSOR_QUANT8_ASYMM_SIGNED": "i1", "TENSOR_QUANT8_SYMM": "i1", "TENSOR_QUANT8_SYMM_PER_CHANNEL": "i1",
    "TENSOR_QUANT16_ASYMM": "<u2", "TENSOR_QUANT16_SYMM": "<i2",
}  # fmt: skip
FEATURE_LEVELS = {"V1_0": 1, "V1_1": 2, "V1_2": 3, "V1_3": 4, "AIDL_V2": 6, "AIDL_V3": 7}


@dataclass(frozen=True)
class BytesPool:
    """A pool that is only bytes."""

    content: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    @property
    def view(self) -> memoryview:
        return memoryview(self.content)


@dataclass(frozen=True)
class TestModel:
    """One line of a file: its JSON, the model, the inputs (None: omitted) and the expected outputs."""

    __test__ = False
    line: dict[str, Any]
    model: Model
    inputs: list[Array | None]
    expected: list[Array]

    @property
    def name(self) -> str:
        return str(self.line["name"])

    @property
    def must_fail(self) -> bool:
        return bool(self.line["expectFailure"])

    @property
    def ignored(self) -> list[bool]:
        operands = self.line["main"]["operands"]
        return [operands[index]["isIgnored"] for index in self.line["main"]["outputIndexes"]]


@cache
def index(folder: Path) -> dict[str, Any]:
    """Return the index of all files."""
    content: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return content


def lines(folder: Path, spec: str) -> Iterator[dict[str, Any]]:
    """Yield the test models of one file as JSON."""
    with gzip.open(folder / f"{spec}.jsonl.gz", "rt", encoding="ascii") as file:
        yield from map(json.loads, file)


def operation_types(line: dict[str, Any]) -> set[OperationType]:
    """Return the operations that a test model uses."""
    return {OperationType[op["type"]] for graph in (line["main"], *line["referenced"]) for op in graph["operations"]}


def read(line: dict[str, Any]) -> TestModel:
    """Build what one line describes."""
    blobs = {LifeTime.CONSTANT_COPY: bytearray(), LifeTime.CONSTANT_REFERENCE: bytearray()}
    main = _subgraph(line["main"], blobs)
    referenced = tuple(_subgraph(graph, blobs) for graph in line["referenced"])
    pool = bytes(blobs[LifeTime.CONSTANT_REFERENCE])
    model = Model(
        main,
        referenced,
        bytes(blobs[LifeTime.CONSTANT_COPY]),
        (BytesPool(pool),) if pool else (),
        line["isRelaxed"],
    )
    operands = line["main"]["operands"]
    inputs = [_array(operands[i]) if operands[i]["data"] else None for i in line["main"]["inputIndexes"]]
    return TestModel(line, model, inputs, [_array(operands[i]) for i in line["main"]["outputIndexes"]])


def _array(operand: dict[str, Any]) -> Array:
    raw = np.frombuffer(base64.b64decode(operand["data"]), DTYPES[operand["type"]])
    return raw.reshape(operand["dimensions"])


def _subgraph(graph: dict[str, Any], blobs: dict[LifeTime, bytearray]) -> Subgraph:
    return Subgraph(
        tuple(_operand(operand, blobs) for operand in graph["operands"]),
        tuple(
            Operation(OperationType[op["type"]], tuple(op["inputs"]), tuple(op["outputs"]))
            for op in graph["operations"]
        ),
        tuple(graph["inputIndexes"]),
        tuple(graph["outputIndexes"]),
    )


def _operand(operand: dict[str, Any], blobs: dict[LifeTime, bytearray]) -> Operand:
    quant = (operand["extraParams"] or {}).get("channelQuant")
    lifetime = LifeTime[operand["lifetime"]]
    return Operand(
        OperandType[operand["type"]],
        tuple(operand["dimensions"]),
        operand["scale"],
        operand["zeroPoint"],
        lifetime,
        _location(operand, lifetime, blobs),
        ChannelQuant(tuple(quant["scales"]), quant["channelDim"]) if quant else None,
    )


def _location(operand: dict[str, Any], lifetime: LifeTime, blobs: dict[LifeTime, bytearray]) -> DataLocation:
    if lifetime not in blobs and lifetime != LifeTime.SUBGRAPH:
        return DataLocation()
    data = base64.b64decode(operand["data"])
    if lifetime == LifeTime.SUBGRAPH:
        return DataLocation(0, int.from_bytes(data, "little"), 0)
    blob = blobs[lifetime]
    blob += bytes(-len(blob) % 4)
    offset = len(blob)
    blob += data
    return DataLocation(0, offset, len(data))


def with_unknown_output_shapes(model: Model) -> Model:
    """Return the model with all extents of its outputs unknown; the rank is kept."""
    operands = list(model.main.operands)
    for i in model.main.output_indexes:
        operands[i] = replace(operands[i], dimensions=(0,) * len(operands[i].dimensions))
    return replace(model, main=replace(model.main, operands=tuple(operands)))


_COUPLED_NOT = {"HASHTABLE_LOOKUP", "LSH_PROJECTION", "PAD_V2", "CAST", "QUANTIZED_16BIT_LSTM"}


def is_coupled(line: dict[str, Any]) -> bool:
    """Return True for test models that AOSP also runs with int8 in place of uint8."""
    graph = line["main"]
    one = len(graph["operations"]) == 1 and graph["operations"][0]["type"] not in _COUPLED_NOT
    return one and not line["expectFailure"] and any(o["type"] == "TENSOR_QUANT8_ASYMM" for o in graph["operands"])


def signed(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line with int8 in place of uint8: 128 is taken from zero points and values."""
    main, *referenced = map(_signed_subgraph, (line["main"], *line["referenced"]))
    return {**line, "main": main, "referenced": referenced}


def _signed_subgraph(graph: dict[str, Any]) -> dict[str, Any]:
    return {**graph, "operands": [_signed_operand(operand) for operand in graph["operands"]]}


def _signed_operand(operand: dict[str, Any]) -> dict[str, Any]:
    if operand["type"] != "TENSOR_QUANT8_ASYMM":
        return operand
    data = operand["data"]
    if data:
        data = base64.b64encode(bytes(byte ^ 0x80 for byte in base64.b64decode(data))).decode()
    return {**operand, "type": "TENSOR_QUANT8_ASYMM_SIGNED", "zeroPoint": operand["zeroPoint"] - 128, "data": data}


def mismatches(test: TestModel, actual: list[Array]) -> list[str]:
    """Return what is wrong with the outputs; empty = passed."""
    problems = []
    for number, (expected, found, ignored) in enumerate(zip(test.expected, actual, test.ignored, strict=True)):
        if not ignored and expected.size:
            wrong = _wrong_elements(test, number, expected, found)
            if wrong.any():
                problems.append(f"{test.name}: output {number}, {int(wrong.sum())} of {wrong.size} elements are wrong")
    return problems


def _wrong_elements(test: TestModel, number: int, expected: Array, found: Array) -> Array:
    operand = test.line["main"]["operands"][test.line["main"]["outputIndexes"][number]]
    if operand["type"] == "TENSOR_BOOL8":
        return np.asarray((expected != 0) != (found != 0))
    atol, rtol = _tolerances(test, operand["type"])
    want, got = expected.astype(np.float64), found.astype(np.float64)
    return np.asarray(~(np.abs(got - want) <= atol + rtol * np.abs(want)))


def _tolerances(test: TestModel, operand_type: str) -> tuple[float, float]:
    coarse = (5 * 2**-10, 5 * 2**-10)
    if operand_type == "TENSOR_FLOAT16":
        return coarse
    if operand_type == "TENSOR_FLOAT32":
        return coarse if test.line["isRelaxed"] or _has_half(test.line) else (1e-5, 5 * 2**-23)
    return (3 if "mobilenet" in test.name and "QUANT8" in operand_type else 1), 0


def _has_half(line: dict[str, Any]) -> bool:
    graphs = (line["main"], *line["referenced"])
    return any(operand["type"] == "TENSOR_FLOAT16" for graph in graphs for operand in graph["operands"])
