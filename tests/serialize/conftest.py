"""Burst packets, written by hand from the specification's `struct` formats and by Android's own serializer.

Every test that asks for `codec` or a sample runs on each codec that this run is about.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.hal.timing import HIDL_NO_TIME, Timing
from nnfmq.hal.types import DataLocation, MeasureTiming, OutputShape, RequestArgument
from nnfmq.serialize import codec as codecs
from nnfmq.serialize.packets import RequestPacket, ResultPacket

CODECS = ["python"] if codecs.codec_name == "python" else list(codecs.CORES.available())


@dataclass(frozen=True)
class Sample:
    """A packet as records and as the value that they stand for."""

    records: tuple[bytes, ...]
    value: RequestPacket | ResultPacket
    decode: Callable[[bytes], RequestPacket | ResultPacket]

    @property
    def data(self) -> bytes:
        return b"".join(self.records)

    def rejection_offset(self, data: bytes) -> int | None:
        """Return the offset at which the decoder rejects `data`; None if it accepts it, or reports no offset."""
        try:
            self.decode(data)
        except ProtocolError as error:
            return error.offset
        return None

    def accepted(self, packets: list[bytes]) -> list[bytes]:
        return [packet for packet in packets if self.rejection_offset(packet) is None]


@pytest.fixture(scope="session", params=CODECS)
def codec(request: pytest.FixtureRequest) -> ModuleType:
    return codecs.CORES.load(request.param)


@pytest.fixture(scope="session")
def compiled() -> ModuleType:
    if "compiled" not in CODECS:
        pytest.skip("this run is about the Python core alone, or the compiled codec is not built")
    return codecs.CORES.load("compiled")


@pytest.fixture
def request_sample(codec: ModuleType) -> Sample:
    """Two inputs (one omitted), one output, two pools, timing asked for: 11 records."""
    records = (
        struct.pack("<B3xIIII4x", 0, 11, 2, 1, 2),
        struct.pack("<B3xB3xIIII", 1, 0, 1, 64, 24, 2),
        struct.pack("<B3xI16x", 2, 2),
        struct.pack("<B3xI16x", 2, 3),
        struct.pack("<B3xB3xIIII", 1, 1, 0, 0, 0, 0),
        struct.pack("<B3xB3xIIII", 3, 0, 0, 128, 4, 2),
        struct.pack("<B3xI16x", 4, 1),
        struct.pack("<B3xI16x", 4, 4),
        struct.pack("<B3xi16x", 5, 7),
        struct.pack("<B3xi16x", 5, 0),
        struct.pack("<B3xi16x", 6, 1),
    )
    value = RequestPacket(
        inputs=(RequestArgument(False, DataLocation(1, 64, 24), (2, 3)), RequestArgument(True)),
        outputs=(RequestArgument(False, DataLocation(0, 128, 4), (1, 4)),),
        slots=(7, 0),
        measure=MeasureTiming.YES,
    )
    return Sample(records, value, codec.decode_request)


@pytest.fixture
def result_sample(codec: ModuleType) -> Sample:
    """Two outputs, one too small, and times: 6 records."""
    records = (
        struct.pack("<B7xIiI4x", 0, 6, 3, 2),
        struct.pack("<B7xB3xI8x", 1, 0, 2),
        struct.pack("<B7xI12x", 2, 5),
        struct.pack("<B7xI12x", 2, 6),
        struct.pack("<B7xB3xI8x", 1, 1, 0),
        struct.pack("<B7xQQ", 3, 12, HIDL_NO_TIME),
    )
    shapes = (OutputShape((5, 6), False), OutputShape((), True))
    value = ResultPacket(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes, Timing(12_000, -1))
    return Sample(records, value, codec.decode_result)


@pytest.fixture(params=["request", "result"])
def sample(request: pytest.FixtureRequest, request_sample: Sample, result_sample: Sample) -> Sample:
    """Return each of the two."""
    return request_sample if request.param == "request" else result_sample


def _argument(text: str) -> RequestArgument:
    """Read `hasNoValue:poolIndex:offset:length:dims`."""
    flag, pool, offset, length, dims = text.split(":")
    return RequestArgument(flag == "1", DataLocation(int(pool), int(offset), int(length)), _dims(dims))


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(extent) for extent in text.split("x") if extent)


def _golden_request(entry: dict[str, Any]) -> RequestPacket:
    inputs, outputs = (tuple(map(_argument, entry[side])) for side in ("inputs", "outputs"))
    return RequestPacket(inputs, outputs, tuple(entry["slots"]), MeasureTiming(entry["measure"]))


def _golden_result(entry: dict[str, Any]) -> ResultPacket:
    shapes = tuple(OutputShape(tuple(shape["dims"]), shape["isSufficient"]) for shape in entry["shapes"])
    times = (-1 if time_us == HIDL_NO_TIME else time_us * 1000 for time_us in entry["timing"])
    return ResultPacket(ErrorStatus(entry["status"]), shapes, Timing(*times))


def _sample(entry: dict[str, Any], value: RequestPacket | ResultPacket, decode: Any) -> Sample:
    data = bytes.fromhex(entry["hex"])
    return Sample(tuple(data[at : at + 24] for at in range(0, len(data), 24)), value, decode)


@pytest.fixture(scope="session")
def golden(data_dir: Path) -> dict[str, list[Any]]:
    """Return the file of packets that Android's serializer wrote."""
    packets: dict[str, list[Any]] = json.loads((data_dir / "fmq" / "golden_packets.json").read_text())
    return packets


@pytest.fixture(params=range(17))
def golden_request(request: pytest.FixtureRequest, golden: dict[str, list[Any]], codec: ModuleType) -> Sample:
    """Return each golden request."""
    entry = golden["requests"][request.param]
    return _sample(entry, _golden_request(entry), codec.decode_request)


@pytest.fixture(params=range(15))
def golden_result(request: pytest.FixtureRequest, golden: dict[str, list[Any]], codec: ModuleType) -> Sample:
    """Return each golden result."""
    entry = golden["results"][request.param]
    return _sample(entry, _golden_result(entry), codec.decode_result)
