"""Test models from files: one JSON object per line, `.jsonl` or `.jsonl.gz`.

A line contains the model, the inputs and the expected outputs, built as AOSP's harness builds them: constants in order,
each aligned to 4 bytes, and those by reference in pool 0. Files are read line by line. A line that is not in the
format raises FormatError with file and line. The fields are those of `TestModel` in AOSP's TestHarness.h, and
`criteria`: other criteria for the outputs of a type, as AOSP's AccuracyCriteria.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
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
Line = dict[str, Any]

FORMAT = 1
ENDINGS = (".jsonl", ".jsonl.gz")
DTYPES = {
    "TENSOR_FLOAT32": "<f4", "FLOAT32": "<f4", "TENSOR_FLOAT16": "<f2", "FLOAT16": "<f2", "TENSOR_INT32": "<i4",
    "INT32": "<i4", "UINT32": "<u4", "BOOL": "u1", "TENSOR_BOOL8": "u1", "TENSOR_QUANT8_ASYMM": "u1",
    "TENSOR_QUANT8_ASYMM_SIGNED": "i1", "TENSOR_QUANT8_SYMM": "i1", "TENSOR_QUANT8_SYMM_PER_CHANNEL": "i1",
    "TENSOR_QUANT16_ASYMM": "<u2", "TENSOR_QUANT16_SYMM": "<i2",
}  # fmt: skip
FEATURE_LEVELS = {"V1_0": 1, "V1_1": 2, "V1_2": 3, "V1_3": 4, "AIDL_V2": 6, "AIDL_V3": 7}
"""Feature level of each value of `minSupportedVersion`; UNKNOWN has none."""
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
_MISFIT = (KeyError, TypeError, ValueError, AttributeError, IndexError)


class Criterion(Struct, frozen=True):
    """Criteria for outputs of one type, if a test model specifies them (see `criteria`).

    The defaults set no limit, except the two tolerances and the share of wrong booleans, which are 0.
    """

    atol: float = 0.0
    rtol: float = 0.0
    bias: float = math.inf
    mse: float = math.inf
    skip_above: float = math.inf
    wrong_share: float = 0.0

    def as_json(self) -> dict[str, float]:
        """Return the fields of the format, without those that set no limit."""
        limits = {name: getattr(self, field) for name, field in _CRITERION_FIELDS.items()}
        return {name: limit for name, limit in limits.items() if 0 < limit < math.inf}

    @classmethod
    def from_json(cls, fields: dict[str, float]) -> Criterion:
        """Return the criteria from fields of the format. Raises KeyError or ValueError if a field is invalid."""
        return cls(**{_CRITERION_FIELDS[name]: float(limit) for name, limit in fields.items()})


_CRITERION_FIELDS = {
    "atol": "atol", "rtol": "rtol", "bias": "bias", "mse": "mse",
    "skipAbove": "skip_above", "wrongShare": "wrong_share",
}  # fmt: skip


class FormatError(InvalidArgument):
    """A file is not in the format; the message contains the file and the line."""


class BytesPool(Struct, frozen=True):
    """A memory pool in private memory, for engines in this process."""

    content: bytes

    @property
    def size_bytes(self) -> int:
        """The size in bytes."""
        return len(self.content)

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return memoryview(self.content)


class TestModel(Struct, frozen=True):
    """A line of a file: its JSON, the model, the inputs (None: omitted), the expected outputs and its own criteria.

    `criteria` is by operand type; outputs of other types are compared with the default tolerances.
    """

    __test__ = False  # not a test case of pytest

    line: Line
    model: Model
    inputs: list[Array | None]
    expected: list[Array]
    criteria: dict[str, Criterion]

    @property
    def name(self) -> str:
        """The test's name."""
        return str(self.line["name"])

    @property
    def must_fail(self) -> bool:
        """Whether preparing or executing the model must fail."""
        return bool(self.line["expectFailure"])

    @property
    def output_operands(self) -> list[Line]:
        """The output operands as in the line."""
        return [self.line["main"]["operands"][index] for index in self.model.main.output_indexes]


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files of test models in `paths` without duplicates; directories are searched recursively and sorted.

    Raises:
        FormatError: If a path contains no test models.
    """
    found: dict[Path, None] = {}
    for path in paths:
        inside = sorted(p for p in path.rglob("*") if p.name.endswith(ENDINGS)) if path.is_dir() else [path]
        if not inside:
            raise FormatError(
                f"{path}: no test models below it, which are files {' or '.join('*' + e for e in ENDINGS)}; "
                "`nnfmq conformance --extract CHECKOUT PATH` writes Android's"
            )
        found.update(dict.fromkeys(inside))
    return list(found)


def lines(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield each line of a file with its number, from 1. Raises FormatError for a line that is not a test model."""
    number = 0
    try:
        with _opened(path) as file:
            for number, text in enumerate(file, 1):
                yield number, _parsed(path, number, text)
    except _UNREADABLE as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise FormatError(f"{path}:{number + 1}: cannot be read: {error}") from error
    if not number:
        raise FormatError(f"{path}: no test models in it")


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="ascii") if path.name.endswith(".gz") else path.open(encoding="ascii")


def _parsed(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(line, dict) or line.get("format") != FORMAT or not isinstance(line.get("name"), str):
        raise FormatError(
            f"{path}:{number}: not a test model: an object with `format` {FORMAT} and a `name` is expected"
        )
    return line


def read_at(path: Path, number: int, line: Line) -> TestModel:
    """Return the test model of a line. Raises FormatError, with file and line, if a field is missing or invalid."""
    try:
        return read(line)
    except _MISFIT as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError(f"{path}:{number}: {line['name']}: {what}") from error


def read(line: Line) -> TestModel:
    """Return the test model of a line."""
    blobs = {LifeTime.CONSTANT_COPY: bytearray(), LifeTime.CONSTANT_REFERENCE: bytearray()}
    main = _subgraph(line["main"], blobs)
    referenced = tuple(_subgraph(graph, blobs) for graph in line["referenced"])
    pool = bytes(blobs[LifeTime.CONSTANT_REFERENCE])
    pools = (BytesPool(pool),) if pool else ()
    model = Model(main, referenced, bytes(blobs[LifeTime.CONSTANT_COPY]), pools, line["isRelaxed"])
    operands = line["main"]["operands"]
    inputs = [_array(operands[i]) if operands[i]["data"] else None for i in main.input_indexes]
    criteria = {type: Criterion.from_json(fields) for type, fields in line.get("criteria", {}).items()}
    test = TestModel(line, model, inputs, [_array(operands[i]) for i in main.output_indexes], criteria)
    _ = test.must_fail, line["expectedMultinomialDistributionTolerance"] > 0, line["minSupportedVersion"]
    return test


def operation_types(line: Line) -> set[OperationType]:
    """Return the types of the operations in a test model."""
    return {OperationType[op["type"]] for graph in (line["main"], *line["referenced"]) for op in graph["operations"]}


def _array(operand: Line) -> Array:
    raw = np.frombuffer(base64.b64decode(operand["data"], validate=True), DTYPES[operand["type"]])
    return raw.reshape(operand["dimensions"])


def _subgraph(graph: Line, blobs: dict[LifeTime, bytearray]) -> Subgraph:
    return Subgraph(
        tuple(_operand(operand, blobs) for operand in graph["operands"]),
        tuple(
            Operation(OperationType[op["type"]], tuple(op["inputs"]), tuple(op["outputs"]))
            for op in graph["operations"]
        ),
        tuple(graph["inputIndexes"]),
        tuple(graph["outputIndexes"]),
    )


def _operand(operand: Line, blobs: dict[LifeTime, bytearray]) -> Operand:
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


def _location(operand: Line, lifetime: LifeTime, blobs: dict[LifeTime, bytearray]) -> DataLocation:
    if lifetime not in blobs and lifetime != LifeTime.SUBGRAPH:
        return DataLocation()
    data = base64.b64decode(operand["data"], validate=True)
    if lifetime == LifeTime.SUBGRAPH:
        return DataLocation(0, int.from_bytes(data, "little"), 0)
    _check_length(operand, data)
    blob = blobs[lifetime]
    blob += bytes(-len(blob) % 4)
    offset = len(blob)
    blob += data
    return DataLocation(0, offset, len(data))


def _check_length(operand: Line, data: bytes) -> None:
    wanted = math.prod(operand["dimensions"]) * np.dtype(DTYPES[operand["type"]]).itemsize
    if data and len(data) != wanted:
        raise ValueError(f"operand {operand['name']!r} has {len(data)} bytes of data, its dimensions take {wanted}")
