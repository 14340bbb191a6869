"""Files of recordings: what is written is read; a part at the end does not count; every change is found."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.models import gather_model
from support.recordings import arrays, execution, preparation, tensors, write_recording

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import HalExecutionMode
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder, RecordingWriter, create_recording_file
from nnfmq.serialize.models import decode_model

HEADER, FILE_HEADER = struct.Struct("<IQII"), struct.Struct("<8sII")
SESSION, DATA, MODEL, EXECUTION, END = range(1, 6)


def record(kind: int, payload: bytes) -> bytes:
    """Return a record, as docs/reference/recording-format.md describes it."""
    fields = struct.pack("<IQI", kind, len(payload), zlib.crc32(payload))
    return fields + struct.pack("<I", zlib.crc32(fields)) + payload


def records(data: bytes) -> list[tuple[int, bytes]]:
    """Return kind and payload of each record of a file, by the same description."""
    found, offset = [], FILE_HEADER.size
    while offset < len(data):
        kind, length, checksum, header_checksum = HEADER.unpack_from(data, offset)
        assert header_checksum == zlib.crc32(data[offset : offset + 16])
        payload = data[offset + 20 : offset + 20 + length]
        assert checksum == zlib.crc32(payload)
        found.append((kind, payload))
        offset += 20 + length
    return found


def rebuilt(path: Path, number: int, change: Any) -> Path:
    """Write the file again with the fields of record `number` changed, and right checksums."""
    data = path.read_bytes()
    found = records(data)
    kind, payload = found[number]
    found[number] = (kind, msgspec.msgpack.encode(change(msgspec.msgpack.decode(payload))))
    path.write_bytes(data[: FILE_HEADER.size] + b"".join(record(*each) for each in found))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "a.nnrec", [execution(), execution(4_000_000)])


def test_what_is_written_is_read(path: Path) -> None:
    with RecordingFile(path) as recording:
        assert recording.session.pid == os.getpid()
        assert recording.session.has_tensors
        assert recording.end is not None and (recording.end.executions, recording.end.dropped) == (2, 0)
        assert recording.unfinished_bytes == 0
        (model,) = recording.models
        assert (model.device, model.device_version, [t.shape for t in model.inputs]) == ("reference", "1.0", [(4,)] * 2)
        assert decode_model(recording.read(model.data), ()) == preparation().model
        first = recording.executions[0].row
        assert (first.mode, first.status, first.deadline_ns) == (HalExecutionMode.SYNCHRONOUS, 0, -1)
        assert (first.intended_ns, first.begin_ns, first.end_ns) == (2_999_000, 3_000_000, 3_099_000)
        assert arrays(recording, 1, "inputs") == [[1, 2, 3, 4], [10, 20, 30, 40]]
        assert arrays(recording, 1, "outputs") == [[11, 22, 33, 44]]


def test_the_layout_is_the_documented_one(path: Path) -> None:
    data = path.read_bytes()
    assert FILE_HEADER.unpack_from(data) == (b"NNFMQREC", 1, 0)
    kinds = [kind for kind, _ in records(data)]
    assert kinds == [SESSION, DATA, MODEL, DATA, DATA, DATA, EXECUTION, EXECUTION, END]


def test_equal_models_and_tensors_are_written_once(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a.nnrec", os.O_WRONLY | os.O_CREAT)
    with RecordingWriter(fd) as writer:
        numbers = [writer.add_model(preparation()), writer.add_model(preparation(device="other"))]
        numbers += [writer.add_model(preparation()), writer.add_model(preparation(gather_model()))]
        for _ in range(5):
            writer.add_execution(0, execution())
    assert numbers == [0, 1, 0, 2]
    kinds = [kind for kind, _ in records((tmp_path / "a.nnrec").read_bytes())]
    assert [kinds.count(kind) for kind in (SESSION, DATA, MODEL, EXECUTION, END)] == [1, 5, 3, 5, 1]


def test_a_file_that_was_cut_anywhere_is_read_up_to_the_last_whole_record(path: Path) -> None:
    data = path.read_bytes()
    ends = [FILE_HEADER.size]
    for kind, payload in records(data):
        ends.append(ends[-1] + HEADER.size + len(payload))
        assert kind
    for size in range(ends[1], len(data)):
        os.truncate(path, size)
        with RecordingFile(path) as recording:
            whole = max(end for end in ends if end <= size)
            assert recording.end is None
            assert recording.unfinished_bytes == size - whole
            assert len(recording.executions) == sum(end <= size for end in ends[7:9])
        path.write_bytes(data)


@pytest.mark.parametrize("size", [0, 8, 15, 16, 40])
def test_a_file_without_a_whole_record_is_none(path: Path, size: int) -> None:
    os.truncate(path, size)
    with pytest.raises(InvalidArgument, match=r"a\.nnrec: it (is no recording|has no whole record)"):
        RecordingFile(path)


def test_every_changed_byte_is_found(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for offset in range(len(data)):
        data[offset] ^= 0x41
        path.write_bytes(data)
        with pytest.raises(InvalidArgument, match=r"a\.nnrec: (it is|record \d+ at byte \d+: )"):
            RecordingFile(path)
        data[offset] ^= 0x41


def with_field(index: int, value: Any) -> Any:
    def change(fields: list[Any]) -> list[Any]:
        fields[index] = value
        return fields

    return change


BAD_EXECUTIONS = {
    "an unknown model": (with_field(0, 1), "it is of model 1; 1 models precede it"),
    "a negative model": (with_field(0, -1), "it is no ExecutionRow"),
    "an unknown mode": (with_field(1, 9), "it is no ExecutionRow"),
    "an unknown status": (with_field(2, 77), "it is no ExecutionRow"),
    "an end before the begin": (with_field(5, 5), "are not in order"),
    "a begin before the call": (with_field(4, 5), "are not in order"),
    "a text as time": (with_field(3, "now"), "it is no ExecutionRow"),
    "missing inputs": (with_field(9, [[[4], 1]]), "1 inputs; its model has 2"),
    "DATA that does not exist": (with_field(9, [[[4], 1], [[4], 9]]), "it needs DATA 9; 4 precede it"),
    "another shape": (with_field(9, [[[4], 1], [[2, 2], 2]]), r"has shape \(4,\), not \(2, 2\)"),
    "DATA of another size": (with_field(10, [[[4], 0]]), "has 16 bytes in this shape; its DATA has"),
    "a field too many": (lambda fields: [*fields, 1], "it is no ExecutionRow"),
}


@pytest.mark.parametrize(("change", "text"), BAD_EXECUTIONS.values(), ids=BAD_EXECUTIONS.keys())
def test_a_wrong_execution_is_rejected_by_its_number(path: Path, change: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"a\.nnrec: record 6 at byte \d+: .*{text}"):
        RecordingFile(rebuilt(path, 6, change))


def tensor_with(index: int, value: Any) -> Any:
    def change(fields: list[Any]) -> list[Any]:
        fields[5][0][index] = value
        return fields

    return change


BAD_MODELS = {
    "DATA that does not exist": (with_field(8, 4), "it needs DATA 4; 1 precede it"),
    "a pool that does not exist": (with_field(9, [7]), "it needs DATA 7"),
    "too many states": (with_field(7, 2), "2 states, but 2 inputs, 1 outputs"),
    "an unknown element type": (tensor_with(2, "object"), "element type 'object' of 'input 0' is none"),
    "an infinite scale": (tensor_with(3, float("inf")), "scale or zero point of 'input 0' is out of range"),
    "a huge zero point": (tensor_with(4, 1 << 40), "scale or zero point of 'input 0' is out of range"),
    "a short digest": (with_field(0, b"1234"), "it is no ModelRow"),
}


@pytest.mark.parametrize(("change", "text"), BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_a_wrong_model_is_rejected_by_its_number(path: Path, change: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"a\.nnrec: record 2 at byte \d+: .*{text}"):
        RecordingFile(rebuilt(path, 2, change))


def test_an_input_of_unknown_size_may_have_any(tmp_path: Path) -> None:
    made = write_recording(tmp_path / "a.nnrec", [execution()])
    rebuilt(made, 2, tensor_with(1, [0]))
    with RecordingFile(made) as recording:
        assert recording.models[0].inputs[0].shape == (0,)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (record(9, b""), "kind 9 is unknown; 1 to 5 are allowed"),
        (record(SESSION, b""), "a SESSION as record 9"),
        (record(EXECUTION, b"\xc1"), "a EXECUTION after the END"),
    ],
)
def test_a_record_in_a_wrong_place_is_rejected(path: Path, extra: bytes, text: str) -> None:
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(InvalidArgument, match=f"record 9 at byte .*{text}"):
        RecordingFile(path)


def test_a_struct_has_a_limit(path: Path) -> None:
    fields = struct.pack("<IQI", EXECUTION, (16 << 20) + 1, 0)
    path.write_bytes(path.read_bytes() + fields + struct.pack("<I", zlib.crc32(fields)))
    with pytest.raises(InvalidArgument, match="16777217 bytes; a EXECUTION has at most 16777216"):
        RecordingFile(path)


def test_a_recording_of_another_format_is_rejected(path: Path) -> None:
    path.write_bytes(FILE_HEADER.pack(b"NNFMQREC", 2, 0) + path.read_bytes()[16:])
    with pytest.raises(InvalidArgument, match="it is a recording of format 2; this nnfmq reads format 1"):
        RecordingFile(path)


def test_a_file_that_becomes_shorter_is_an_error_when_it_is_read(path: Path) -> None:
    with RecordingFile(path) as recording:
        os.truncate(path, 100)
        with pytest.raises(InvalidArgument, match="has become shorter"):
            recording.read(recording.models[0].data)


def test_the_limit_holds_and_what_is_beyond_is_counted(tmp_path: Path) -> None:
    executions = [execution(3_000_000 + i, outputs=tensors([i, 0, 0, 0])) for i in range(200)]
    made = write_recording(tmp_path / "a.nnrec", executions, limit_bytes=8192)
    assert 6000 < made.stat().st_size <= 8192
    with RecordingFile(made) as recording:
        assert recording.end is not None
        assert 0 < len(recording.executions) == recording.end.executions
        assert recording.end.executions + recording.end.beyond_limit == 200


def test_a_model_beyond_the_limit_is_left_out(tmp_path: Path) -> None:
    made = write_recording(tmp_path / "a.nnrec", [execution()], limit_bytes=300)
    with RecordingFile(made) as recording:
        assert (recording.models, recording.executions) == ((), ())


def test_a_limit_below_a_page_is_rejected_before_there_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="a recording needs 4096 bytes or more, not 4095"):
        ExecutionRecorder(tmp_path / "a.nnrec", limit_bytes=4095)
    assert list(tmp_path.iterdir()) == []


def test_no_recording_is_overwritten(tmp_path: Path) -> None:
    made = [create_recording_file(tmp_path / "a.nnrec") for _ in range(2)]
    for fd, _ in made:
        os.close(fd)
    assert [path.name for _, path in made] == ["a.nnrec", f"a.nnrec.{os.getpid()}"]
    assert {path.stat().st_mode & 0o777 for _, path in made} == {0o600}
    with pytest.raises(FileExistsError):
        create_recording_file(tmp_path / "a.nnrec")


def test_contents_are_written_again_after_the_writer_has_forgotten_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.recording.writer._DIGESTS_MAX", 1)
    made = write_recording(tmp_path / "a.nnrec", [execution(), execution()])
    assert [kind for kind, _ in records(made.read_bytes())].count(DATA) == 7
    with RecordingFile(made) as recording:
        assert arrays(recording, 1, "inputs") == [[1, 2, 3, 4], [10, 20, 30, 40]]


def test_a_write_that_the_kernel_cuts_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_recording(tmp_path / "a.nnrec", [execution()]).read_bytes()
    write = os.write
    monkeypatch.setattr("nnfmq.recording.writer.os.writev", lambda fd, parts: write(fd, parts[0][:7]))
    cut = write_recording(tmp_path / "b.nnrec", [execution()]).read_bytes()
    assert [payload for _, payload in records(cut)][1:] == [payload for _, payload in records(whole)][1:]


def test_a_closed_writer_writes_no_second_end(tmp_path: Path) -> None:
    writer = RecordingWriter(os.open(tmp_path / "a.nnrec", os.O_WRONLY | os.O_CREAT))
    writer.close()
    writer.close()
    writer.abandon()
    assert [kind for kind, _ in records((tmp_path / "a.nnrec").read_bytes())] == [SESSION, END]


def test_a_source_tree_that_is_not_installed_has_an_unknown_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.recording.writer.installed_version", lambda _package: None)
    with RecordingFile(write_recording(tmp_path / "a.nnrec", [])) as recording:
        assert recording.session.version == "unknown"


def test_of_a_plan_the_steps_are_recorded_and_not_the_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "calls.nnrec"
    with ExecutionRecorder.start(path) as recorder:
        assert recorder.prepared(replace(preparation(), choice="step")) is not None
        assert recorder.prepared(replace(preparation(), plan_devices=(("cpu", "1"), ("gpu", "2")))) is None
    with RecordingFile(path) as recording:
        assert [model.device for model in recording.models] == ["reference"]
