"""The trace points of a process: names, slices, samples of waits, and fork."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnfmq.observe import trace_points
from nnfmq.observe.trace_files import RingReader, Trace
from nnfmq.observe.trace_layout import ring_bytes
from nnfmq.observe.trace_points import TRACING, TraceRecorder, recorded


@pytest.fixture
def memory() -> bytearray:
    return bytearray(ring_bytes(16))


@pytest.fixture
def recorder(memory: bytearray) -> Iterator[TraceRecorder]:
    made = TraceRecorder(memory, "a test")
    TRACING.start(made)
    yield made
    TRACING.stop()


def trace_in(memory: bytearray) -> Trace:
    reader = RingReader(memoryview(memory))
    reader.poll()
    return reader.trace()


def test_a_block_is_recorded_with_its_name(memory: bytearray, recorder: TraceRecorder) -> None:
    with recorded("[NN_LR_PP]load", 9):
        pass
    (one,) = trace_in(memory).slices
    assert (one.pid, one.name, one.request) == (os.getpid(), "[NN_LR_PP]load", 9)
    assert trace_in(memory).processes == {os.getpid(): "a test"}


def test_a_block_is_recorded_if_it_raises(memory: bytearray, recorder: TraceRecorder) -> None:
    with pytest.raises(KeyError), recorded("[NN_LR_PP]load"):
        raise KeyError
    assert len(trace_in(memory).slices) == 1


def test_nothing_is_recorded_without_a_recorder(memory: bytearray, recorder: TraceRecorder) -> None:
    TRACING.stop()
    TRACING.stop()
    with recorded("[NN_LR_PP]load"):
        pass
    assert trace_in(memory).slices == []
    memory.extend(b"")  # raises BufferError while a ring uses the memory


def test_another_recorder_replaces_the_first(memory: bytearray, recorder: TraceRecorder) -> None:
    other = bytearray(ring_bytes(4))
    TRACING.start(TraceRecorder(other, "another"))
    with recorded("x"):
        pass
    assert (len(trace_in(memory).slices), len(trace_in(other).slices)) == (0, 1)
    memory.extend(b"")


def test_a_name_keeps_its_id_and_an_empty_one_records_nothing(memory: bytearray, recorder: TraceRecorder) -> None:
    assert recorder.id_of("a") == recorder.id_of("a") != recorder.id_of("b")
    assert struct.unpack("<3I", recorder.ids_of(["a", "", "b"])) == (recorder.id_of("a"), 0, recorder.id_of("b"))
    assert recorder.id_of("[NN_LD_PE]request") == 1


def test_a_forked_child_records_nothing(memory: bytearray, recorder: TraceRecorder) -> None:
    child = os.fork()
    if not child:
        os._exit(0 if TRACING.recorder is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert TRACING.recorder is recorder


def test_the_times_of_a_thread_are_the_differences_of_two_samples(
    memory: bytearray, recorder: TraceRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedstat = tmp_path / "schedstat"
    monkeypatch.setattr(trace_points, "_SCHEDSTAT", str(schedstat))
    clock = iter((100, 700, 800))
    monkeypatch.setattr(trace_points, "thread_time_ns", lambda: next(clock))
    for text in ("5000 1000 3\n", "6000 1450 4\n", "7000 1450 5\n"):
        schedstat.write_text(text)
        recorder.sample_times()
    first, second = trace_in(memory).times
    assert [(one.waited_ns, one.ran_ns) for one in (first, second)] == [(450, 600), (0, 100)]
    assert first.begin_ns < first.end_ns == second.begin_ns < second.end_ns


@pytest.mark.parametrize("text", [None, "", "1 x 3"])
def test_a_kernel_without_schedstat_has_no_waits(
    memory: bytearray, recorder: TraceRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(trace_points, "_SCHEDSTAT", str(tmp_path / "s"))
    if text is not None:
        (tmp_path / "s").write_text(text)
    recorder.sample_times()
    recorder.sample_times()
    assert trace_in(memory).times == []


def test_this_kernel_has_schedstat(memory: bytearray, recorder: TraceRecorder) -> None:
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("the kernel has no /proc/thread-self/schedstat")
    recorder.sample_times()
    assert recorder._times
