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
from msgspec.structs import replace

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

__all__ = [
    "BytesPool",
    "Criterion",
    "FormatError",
    "TestModel",
    "dump",
    "find_files",
    "is_coupled",
    "is_unsigned",
    "kinds_of",
    "lines",
    "operation_types",
    "read",
    "read_at",
    "signed",
    "with_unknown_output_shapes",
]

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


def dump(line: Line, folder: str) -> str:
    """Write a test model to NAME.jsonl in a folder and return the path; "" without a folder."""
    if not folder:
        return ""
    path = Path(folder) / f"{line['name']}.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="ascii")
    return str(path)


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


# ----------------------------------------------------------------------------------------------------------------------
# Variants: three more kinds of test that are derived from a test model, as AOSP derives them at run time.
#
# unknown_output_shapes  all dimensions of main's outputs are 0 (unknown), with the same rank; shapes must be reported
# insufficient_output    the same, and the first output's buffer is one byte too small
# int8_coupling          uint8 operands become int8: 128 is subtracted from zero points and values; a device supports
#                        both models or neither, and their outputs differ by 128


UNKNOWN_OUTPUT_SHAPES = "unknown_output_shapes"
INT8_COUPLING = "int8_coupling"
INSUFFICIENT_OUTPUT = "insufficient_output"
KINDS = (UNKNOWN_OUTPUT_SHAPES, INT8_COUPLING, INSUFFICIENT_OUTPUT)

_UNSIGNED, _SIGNED = "TENSOR_QUANT8_ASYMM", "TENSOR_QUANT8_ASYMM_SIGNED"
_NOT_COUPLED = {"HASHTABLE_LOOKUP", "LSH_PROJECTION", "PAD_V2", "CAST", "QUANTIZED_16BIT_LSTM"}
_SHAPES_STAY = {OperationType.RANK, OperationType.IF, OperationType.WHILE}


def kinds_of(test: TestModel) -> list[str]:
    """Return the kinds that apply to a test model."""
    return [kind for kind, applies in zip(KINDS, _applicable(test), strict=True) if applies]


def _applicable(test: TestModel) -> tuple[bool, bool, bool]:
    is_dynamic = not test.must_fail and not operation_types(test.line) & _SHAPES_STAY
    can_shrink = bool(test.expected) and test.expected[0].nbytes > 1
    return is_dynamic, is_coupled(test.line), is_dynamic and can_shrink


def with_unknown_output_shapes(model: Model) -> Model:
    """Return the model with all dimensions of its outputs unknown, and their rank unchanged."""
    operands = list(model.main.operands)
    for i in model.main.output_indexes:
        operands[i] = replace(operands[i], dimensions=(0,) * len(operands[i].dimensions))
    return replace(model, main=replace(model.main, operands=tuple(operands)))


def is_unsigned(operand: Line) -> bool:
    """Return whether `signed` converts an operand."""
    return bool(operand["type"] == _UNSIGNED)


def is_coupled(line: Line) -> bool:
    """Return whether AOSP also runs a test model with int8 in place of uint8."""
    graph = line["main"]
    one = len(graph["operations"]) == 1 and graph["operations"][0]["type"] not in _NOT_COUPLED
    return one and not line["expectFailure"] and any(o["type"] == _UNSIGNED for o in graph["operands"])


def signed(line: Line) -> Line:
    """Return the test model with int8 in place of uint8: 128 is subtracted from zero points and values."""
    main, *referenced = map(_signed_subgraph, (line["main"], *line["referenced"]))
    criteria = {_SIGNED if type == _UNSIGNED else type: rule for type, rule in line.get("criteria", {}).items()}
    return {**line, "main": main, "referenced": referenced, "criteria": criteria}


def _signed_subgraph(graph: Line) -> Line:
    return {**graph, "operands": [_signed_operand(operand) for operand in graph["operands"]]}


def _signed_operand(operand: Line) -> Line:
    if operand["type"] != _UNSIGNED:
        return operand
    data = operand["data"]
    if data:
        data = base64.b64encode(bytes(byte ^ 0x80 for byte in base64.b64decode(data))).decode()
    return {**operand, "type": _SIGNED, "zeroPoint": operand["zeroPoint"] - 128, "data": data}
