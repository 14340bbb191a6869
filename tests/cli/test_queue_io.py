"""`nnfmq queue write` and `read`: bytes in and out, whole records, waiting or not, and how each ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import LIMIT_S, started
from support.named import fresh_name

from nnfmq.cli import main
from nnfmq.queue import UNSYNCHRONIZED, MessageQueue, create_named

Capture = pytest.CaptureFixture[bytes]


@pytest.fixture
def name() -> Iterator[str]:
    with fresh_name() as made:
        yield made


@pytest.fixture
def queue(name: str) -> Iterator[MessageQueue]:
    with create_named(name, 8, 4) as made:
        yield made


@pytest.fixture
def lossy_queue(name: str) -> Iterator[MessageQueue]:
    with create_named(name, 8, 4, flavor=UNSYNCHRONIZED) as made:
        yield made


@pytest.fixture
def limit_ns() -> int:
    """A deadline that only a hang reaches."""
    return time.monotonic_ns() + LIMIT_S * 10**9


def complaint(capsys: Capture) -> str:
    """Return what stderr has: one line."""
    line = capsys.readouterr().err.decode()
    assert line.startswith("nnfmq: error: ") and line.count("\n") == 1
    return line.removeprefix("nnfmq: error: ").rstrip()


# ---- write ----


def test_words_are_records(queue: MessageQueue, name: str) -> None:
    assert main(["queue", "write", name, "abcdefgh", "12345678"]) == 0
    assert queue.receive(None, 0) == b"abcdefgh12345678"


@pytest.mark.parametrize(
    "words",
    [["--hex", "00ff", "010203040506"], ["00ff 0102 0304 0506", "--hex"], ["00FF010203040506", "--hex", "--no-wait"]],
)
def test_hexadecimal_words_are_bytes(queue: MessageQueue, name: str, words: list[str]) -> None:
    assert main(["queue", "write", name, *words]) == 0
    assert queue.read(1) == b"\x00\xff\x01\x02\x03\x04\x05\x06"


@pytest.mark.parametrize("words", [["0g"], ["123"], ["ß0"]])
def test_text_that_is_not_hexadecimal_is_rejected(
    queue: MessageQueue, name: str, words: list[str], capsysbinary: Capture
) -> None:
    assert main(["queue", "write", name, "--hex", *words]) == 1
    assert "not hexadecimal" in complaint(capsysbinary)
    assert queue.available_to_read() == 0


def test_a_file_is_written_whole(queue: MessageQueue, name: str, tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b"\n\0\xff45678abcdefgh")
    assert main(["queue", "write", name, "--file", str(tmp_path / "records")]) == 0
    assert queue.read(2) == b"\n\0\xff45678abcdefgh"


def test_a_file_that_is_missing_is_named(name: str, queue: MessageQueue, capsysbinary: Capture) -> None:
    assert main(["queue", "write", name, "--file", "/nowhere/records"]) == 1
    assert complaint(capsysbinary) == "/nowhere/records: No such file or directory"


def test_words_together_with_a_file_are_rejected(name: str, queue: MessageQueue, capsysbinary: Capture) -> None:
    assert main(["queue", "write", name, "abcdefgh", "--file", "x"]) == 1
    assert "DATA and --file" in complaint(capsysbinary)


@pytest.mark.parametrize("words", [["abc"], ["abcdefgh", "i"]])
def test_a_part_of_a_record_is_rejected_and_nothing_is_written(
    queue: MessageQueue, name: str, words: list[str], capsysbinary: Capture
) -> None:
    size = len("".join(words))
    assert main(["queue", "write", name, *words]) == 1
    assert complaint(capsysbinary) == (
        f"got {size} bytes; records have 8 bytes, so give a multiple of 8 (nothing was written)"
    )
    assert queue.available_to_read() == 0


@pytest.mark.parametrize("limit", [["--no-wait"], ["--wait", "0.01"]])
def test_a_full_queue_is_status_1_and_one_line(
    queue: MessageQueue, name: str, limit: list[str], capsysbinary: Capture
) -> None:
    queue.write(bytes(24))
    assert main(["queue", "write", name, "abcdefgh12345678", *limit]) == 1
    assert complaint(capsysbinary).startswith("no space for 2 records within 0")
    assert queue.available_to_read() == 3


def test_write_waits_for_space(queue: MessageQueue, name: str, limit_ns: int) -> None:
    with started("queue", "write", name, "0" * 8 + "1" * 8 + "2" * 8 + "3" * 8 + "4" * 8) as process:
        taken = b"".join(queue.read_blocking(1, limit_ns) or b"" for _ in range(5))
    assert taken == b"".join(digit * 8 for digit in (b"0", b"1", b"2", b"3", b"4"))
    assert process.returncode == 0


def test_stdin_is_written_as_it_arrives(queue: MessageQueue, name: str, limit_ns: int) -> None:
    with started("queue", "write", name) as process:
        assert process.stdin is not None
        for piece in (b"\0\n\xff\r", b"5678ab", b"cdefgh"):
            process.stdin.write(piece)
            process.stdin.flush()
        first = queue.read_blocking(2, limit_ns)
        process.stdin.close()
    assert first == b"\0\n\xff\r5678abcdefgh"
    assert process.returncode == 0


def test_stdin_that_ends_within_a_record_is_reported_with_the_rest(queue: MessageQueue, name: str) -> None:
    with started("queue", "write", name) as process:
        _, errors = process.communicate(b"abcdefghijk", timeout=LIMIT_S)
    assert process.returncode == 1
    assert errors == b"nnfmq: error: got 11 bytes; records have 8 bytes, so give a multiple of 8 (3 were not written)\n"
    assert queue.read(1) == b"abcdefgh"


def test_hexadecimal_stdin_has_lines(queue: MessageQueue, name: str) -> None:
    with started("queue", "write", name, "--hex") as process:
        process.communicate(b"00 01 02 03\n04050607\n", timeout=LIMIT_S)
    assert queue.read(1) == bytes(range(8))


def test_an_unsynchronized_queue_takes_more_than_it_holds(lossy_queue: MessageQueue, name: str) -> None:
    assert main(["queue", "write", name, *(f"{i:08}" for i in range(6))]) == 0
    assert lossy_queue.counters()[0] == 48


def test_a_corrupted_counter_is_named(lossy_queue: MessageQueue, name: str, capsysbinary: Capture) -> None:
    lossy_queue.memory.view[8:16] = (4).to_bytes(8, "little")
    assert main(["queue", "write", name, "abcdefgh"]) == 1
    assert "write counter 4" in complaint(capsysbinary)


# ---- read ----


def test_records_are_printed_unchanged(queue: MessageQueue, name: str, capsysbinary: Capture) -> None:
    queue.write(b"\0\n\xff\r5678abcdefgh")
    assert main(["queue", "read", name, "-n", "2"]) == 0
    assert capsysbinary.readouterr().out == b"\0\n\xff\r5678abcdefgh"


def test_hexadecimal_is_a_line_for_each_record(queue: MessageQueue, name: str, capsysbinary: Capture) -> None:
    queue.write(b"\0\n\xff\r5678abcdefgh")
    assert main(["queue", "read", name, "-n", "2", "--hex"]) == 0
    assert capsysbinary.readouterr().out == b"000aff0d35363738\n6162636465666768\n"


def test_one_record_is_read_and_the_writer_is_woken(queue: MessageQueue, name: str, capsysbinary: Capture) -> None:
    queue.write(bytes(24))
    assert main(["queue", "read", name]) == 0
    assert queue.counters() == (24, 8)
    assert queue.event_flag is not None and queue.event_flag.wait(1, 0) == 1


@pytest.mark.parametrize("limit", [["--no-wait"], ["--wait", "0.01"]])
def test_nothing_to_read_is_status_1(queue: MessageQueue, name: str, limit: list[str], capsysbinary: Capture) -> None:
    assert main(["queue", "read", name, *limit]) == 1
    assert complaint(capsysbinary).startswith("no record arrived within 0")


def test_fewer_records_than_requested_are_printed_with_status_1(
    queue: MessageQueue, name: str, capsysbinary: Capture
) -> None:
    queue.write(b"abcdefgh" * 3)
    assert main(["queue", "read", name, "-n", "5", "--no-wait"]) == 1
    printed = capsysbinary.readouterr()
    assert printed.out == b"abcdefgh" * 3
    assert printed.err == b"nnfmq: error: only 3 of 5 records arrived within 0 s\n"


def test_more_records_than_the_ring_holds_can_be_requested(queue: MessageQueue, name: str, limit_ns: int) -> None:
    with started("queue", "read", name, "-n", "10") as process:
        assert all(queue.write_blocking(f"{i:08}".encode(), limit_ns) for i in range(10))
        printed, _ = process.communicate(timeout=LIMIT_S)
    assert printed == b"".join(f"{i:08}".encode() for i in range(10))
    assert process.returncode == 0


def test_follow_prints_each_record_immediately_until_control_c(queue: MessageQueue, name: str, limit_ns: int) -> None:
    with started("queue", "read", name, "--follow", "--hex") as process:
        assert process.stdout is not None and process.stderr is not None
        for i in range(3):
            assert queue.write_blocking(bytes([i] * 8), limit_ns)
            assert process.stdout.readline() == bytes([i] * 8).hex().encode() + b"\n"
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
        assert (process.returncode, process.stderr.read()) == (130, b"")


def test_follow_with_a_limit_ends_when_no_more_records_arrive(
    queue: MessageQueue, name: str, capsysbinary: Capture
) -> None:
    queue.write(b"abcdefgh" * 3)
    assert main(["queue", "read", name, "--follow", "--wait", "0.01"]) == 0
    assert capsysbinary.readouterr().out == b"abcdefgh" * 3
    assert main(["queue", "read", name, "--follow", "--wait", "0.01"]) == 1


def test_a_closed_output_pipe_ends_read_without_a_traceback(queue: MessageQueue, name: str, limit_ns: int) -> None:
    reading, writing = os.pipe()
    with started("queue", "read", name, "--follow", stdout=writing) as process:
        os.close(writing)
        os.close(reading)
        assert queue.write_blocking(bytes(8), limit_ns)
        assert process.communicate(timeout=LIMIT_S)[1] == b""
    assert process.returncode == 1


def test_impossible_counters_are_one_line(queue: MessageQueue, name: str, capsysbinary: Capture) -> None:
    queue.memory.view[8:16] = (4).to_bytes(8, "little")
    assert main(["queue", "read", name, "--wait", "5"]) == 1
    assert "write counter 4, read counter 0: impossible" in complaint(capsysbinary)


# ---- read, unsynchronized ----


def test_every_reader_gets_all_records_of_an_unsynchronized_queue(
    lossy_queue: MessageQueue, name: str, capsysbinary: Capture
) -> None:
    lossy_queue.write(b"abcdefgh12345678")
    assert [main(["queue", "read", name, "-n", "2"]) for _ in range(2)] == [0, 0]
    assert capsysbinary.readouterr().out == b"abcdefgh12345678" * 2


def test_after_an_overflow_the_newest_half_is_read(lossy_queue: MessageQueue, name: str, capsysbinary: Capture) -> None:
    for i in range(6):
        lossy_queue.write(f"{i:08}".encode())
    assert main(["queue", "read", name, "-n", "2"]) == 0
    printed = capsysbinary.readouterr()
    assert printed.out == b"0000000400000005"
    assert printed.err == b"nnfmq: 4 records were overwritten before this read\n"


def test_an_empty_unsynchronized_queue_is_status_1(lossy_queue: MessageQueue, name: str, capsysbinary: Capture) -> None:
    assert main(["queue", "read", name]) == 1
    assert complaint(capsysbinary) == "no record available"


@pytest.mark.parametrize("words", [["--follow"], ["--wait", "1"]])
def test_an_unsynchronized_queue_cannot_be_waited_for(
    lossy_queue: MessageQueue, name: str, words: list[str], capsysbinary: Capture
) -> None:
    assert main(["queue", "read", name, *words]) == 1
    assert "its writer wakes no reader" in complaint(capsysbinary)
