"""Foreign programs at named queues: docs/c's header and example, compiled as C11 and as C++17, against this process.

The program obeys what it is told over a pipe (foreign_peer.c), so each test says the order in which the two sides act;
where it must be asleep before this process acts, the kernel says so (/proc/PID/wchan).
"""

from __future__ import annotations

import errno
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.named import fresh_name
from support.places import ROOT

from nnfmq.base import posix_shm
from nnfmq.queue import NOT_EMPTY, NOT_FULL, UNSYNCHRONIZED, MessageQueue, create_named, named_queues, remove_named
from nnfmq.queue import core as cores

FOLDER = ROOT / "docs" / "c"
PEER = ROOT / "tests" / "queue" / "foreign_peer.c"
STRICT = ["-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{FOLDER}"]
LANGUAGES = {"c11": ("cc", "-std=c11"), "c++17": ("c++", "-xc++", "-std=c++17")}
LIMIT_S = 60
SOON_MS, LONG_MS = 30, 20_000


@pytest.fixture(scope="module", params=LANGUAGES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    compiler, *flags = LANGUAGES[request.param]
    if shutil.which(compiler) is None:
        pytest.skip(f"no compiler for {request.param} ({compiler})")
    folder = tmp_path_factory.mktemp("foreign")

    def compile_once(source: Path) -> Path:
        program = folder / source.stem
        if not program.exists():
            command = [compiler, *flags, *STRICT, str(source), "-o", str(program)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            assert done.returncode == 0, done.stderr
        return program

    return compile_once


@pytest.fixture
def name() -> Iterator[str]:
    with fresh_name() as made:
        yield made


@pytest.fixture
def queue(name: str, core: cores.Core) -> Iterator[MessageQueue]:
    with create_named(name, 8, 4, core=core) as made:
        yield made


@pytest.fixture
def unsynchronized_queue(name: str, core: cores.Core) -> Iterator[MessageQueue]:
    with create_named(name, 8, 4, flavor=UNSYNCHRONIZED, core=core) as made:
        yield made


class Peer:
    """The foreign program, attached to the queue of this name."""

    def __init__(self, program: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [str(program), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.opened = int(self.reply())

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def reply(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.reply()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def attach(compiled: Callable[[Path], Path]) -> Iterator[Callable[[str], Peer]]:
    """Start foreign programs; ends them."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(closing(Peer(compiled(PEER), name)))


Attach = Callable[[str], Peer]
Start = Callable[..., Future[Any]]
Until = Callable[[Callable[[], object]], None]


def records(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def bits(queue: MessageQueue) -> int:
    at = queue.descriptor.grantors[3].offset
    return int(queue.memory.view[at : at + 4].cast("I")[0])


def is_asleep(peer: Peer) -> bool:
    """Return True once the program's one thread sleeps in the kernel on something else than its stdin."""
    return "futex" in Path(f"/proc/{peer.process.pid}/wchan").read_text()


# ---- one try, both directions ----


@pytest.mark.usefixtures("queue")
def test_a_c_program_attaches_by_name(name: str, attach: Attach) -> None:
    assert attach(name).opened == 0


def test_records_cross_the_end_of_the_ring_in_both_directions(queue: MessageQueue, name: str, attach: Attach) -> None:
    peer = attach(name)
    for first in range(0, 30, 3):
        values = (first, first + 1, first + 2)
        assert queue.write(records(*values))
        assert peer.ask("r 3") == f"1 {values[0]} {values[1]} {values[2]}"
        assert peer.ask(f"w {values[0]} {values[1]} {values[2]}") == "1"
        assert queue.read(3) == records(*values)


def test_a_full_or_empty_queue_is_reported_and_no_batch_is_split(
    queue: MessageQueue, name: str, attach: Attach
) -> None:
    peer = attach(name)
    assert peer.ask("r 1") == "0"
    assert peer.ask("w 1 2 3") == "1"
    assert peer.ask("w 4 5") == "0"
    assert peer.ask("r 4") == "0"
    assert queue.counters() == (24, 0)


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("line", ["r 5", "w 1 2 3 4 5", "R 1 5", "W 1 1 2 3 4 5"])
def test_more_records_than_the_ring_holds_are_rejected_immediately(name: str, attach: Attach, line: str) -> None:
    assert attach(name).ask(line) == str(-errno.EMSGSIZE)


def set_counters(queue: MessageQueue, read: int, write: int) -> None:
    queue.memory.view[:16] = records(read, write)


@pytest.mark.parametrize("read", ["r 1", f"R {LONG_MS} 1"])
@pytest.mark.parametrize(("r", "w"), [(8, 0), (0, 80), (2**64 - 8, 2**63)])
def test_a_read_rejects_impossible_counters_once_and_recovers_as_in_libfmq(
    queue: MessageQueue, name: str, attach: Attach, r: int, w: int, read: str
) -> None:
    peer = attach(name)
    set_counters(queue, r, w)
    assert peer.ask(read) == str(-errno.EBADMSG)
    assert queue.counters() == (w, w)
    assert peer.ask("r 1") == "0"
    assert queue.write(records(7))
    assert peer.ask(read) == "1 7"


@pytest.mark.parametrize("write", ["w 9", f"W {LONG_MS} 9"])
@pytest.mark.parametrize(("r", "w"), [(8, 0), (32, 8)])
def test_a_write_with_the_read_counter_ahead_succeeds_as_in_libfmq(
    queue: MessageQueue, name: str, attach: Attach, r: int, w: int, write: str
) -> None:
    peer = attach(name)
    set_counters(queue, r, w)
    assert queue.write(records(9)) is True  # as here
    set_counters(queue, r, w)
    assert peer.ask(write) == "1"
    assert queue.counters() == (w + 8, r)


def test_a_write_with_the_read_counter_more_than_a_ring_behind_fails_until_the_next_read(
    queue: MessageQueue, name: str, attach: Attach
) -> None:
    peer = attach(name)
    set_counters(queue, 0, 80)
    assert peer.ask("w 9") == peer.ask("w 9") == str(-errno.EBADMSG)
    assert queue.read(1) is None
    assert peer.ask("w 9") == "1"
    assert queue.read(1) == records(9)


@pytest.mark.parametrize(("r", "w"), [(0, 12), (4, 16), (4, 12)])
def test_counters_that_are_no_multiple_of_the_quantum_are_rejected_and_stay(
    queue: MessageQueue, name: str, attach: Attach, r: int, w: int
) -> None:
    peer = attach(name)
    set_counters(queue, r, w)
    assert peer.ask("r 1") == peer.ask(f"R {LONG_MS} 1") == str(-errno.EBADMSG)
    assert peer.ask("w 1") == ("1" if w % 8 == 0 else str(-errno.EBADMSG))
    assert queue.counters()[1] == r


# ---- waiting ----


def test_a_c_reader_sleeps_until_this_process_writes(
    queue: MessageQueue, name: str, attach: Attach, until: Until, limit_ns: int
) -> None:
    peer = attach(name)
    peer.tell(f"R {LONG_MS} 2")
    until(lambda: is_asleep(peer))
    assert queue.write_blocking(records(7, 8), limit_ns)
    assert peer.reply() == "1 7 8"


def test_a_stale_bit_does_not_keep_a_c_reader_awake(
    queue: MessageQueue, name: str, attach: Attach, until: Until
) -> None:
    peer = attach(name)
    assert queue.event_flag is not None
    queue.event_flag.wake(NOT_EMPTY)
    peer.tell(f"R {LONG_MS} 1")
    until(lambda: is_asleep(peer))
    assert queue.send(records(7))
    assert peer.reply() == "1 7"


def test_a_c_writer_sleeps_until_this_process_frees_space(
    queue: MessageQueue, name: str, attach: Attach, until: Until, limit_ns: int
) -> None:
    peer = attach(name)
    assert queue.write(records(1, 2, 3, 4))
    peer.tell(f"W {LONG_MS} 5")
    until(lambda: is_asleep(peer))
    assert queue.receive(limit_ns, 0) == records(1, 2, 3, 4)
    assert peer.reply() == "1"
    assert queue.read(1) == records(5)


def test_a_c_writer_wakes_this_process_that_waits_for_records(
    queue: MessageQueue, name: str, attach: Attach, start: Start, until: Until, limit_ns: int
) -> None:
    peer = attach(name)
    waiting = start(queue.receive, limit_ns, 0)
    until(lambda: queue.waiters)
    assert peer.ask("W 1 7 8") == "1"
    assert waiting.result(LIMIT_S / 10) == records(7, 8)  # long before its deadline, when it would look once more


def test_a_c_reader_wakes_this_process_that_waits_for_space(
    queue: MessageQueue, name: str, attach: Attach, start: Start, until: Until, limit_ns: int
) -> None:
    peer = attach(name)
    assert queue.write(records(1, 2, 3, 4))
    waiting = start(queue.write_blocking, records(5, 6), limit_ns)
    until(lambda: queue.waiters)
    assert peer.ask("R 1 4") == "1 1 2 3 4"
    assert waiting.result(LIMIT_S / 10) is True
    assert peer.ask("r 2") == "1 5 6"


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("line", [f"R {SOON_MS} 1", f"x {SOON_MS} 4"])
def test_a_c_wait_ends_at_its_timeout(name: str, attach: Attach, line: str) -> None:
    peer = attach(name)
    begin = time.monotonic_ns()
    assert peer.ask(line) == str(-errno.ETIMEDOUT)
    assert time.monotonic_ns() - begin >= SOON_MS * 10**6


def test_timeout_0_waits_indefinitely_as_in_libfmq(
    queue: MessageQueue, name: str, attach: Attach, until: Until
) -> None:
    peer = attach(name)
    peer.tell("R 0 1")
    until(lambda: is_asleep(peer))
    assert queue.send(records(9))
    assert peer.reply() == "1 9"


def test_event_bits_are_set_and_received_in_both_directions(
    queue: MessageQueue, name: str, attach: Attach, until: Until, limit_ns: int
) -> None:
    peer, flag = attach(name), queue.event_flag
    assert flag is not None
    assert peer.ask("k 48") == "0"
    assert flag.wait(0x30, limit_ns) == 48
    peer.tell(f"x {LONG_MS} 12")
    until(lambda: is_asleep(peer))
    assert flag.wake(4) == 1
    assert (peer.reply(), peer.reply()) == ("1", "4")


@pytest.mark.parametrize("count", [20_000])
def test_a_stream_through_a_small_ring_arrives_in_order(
    queue: MessageQueue, name: str, attach: Attach, limit_ns: int, count: int
) -> None:
    peer = attach(name)
    peer.tell(f"T {LONG_MS} {count}")
    assert all(queue.write_blocking(records(i), limit_ns) for i in range(count))
    assert peer.reply() == str(count)
    peer.tell(f"S {LONG_MS} {count}")
    assert all(queue.read_blocking(1, limit_ns) == records(i) for i in range(count))
    assert peer.reply() == str(count)


# ---- unsynchronized ----


def test_several_readers_each_get_all_records(unsynchronized_queue: MessageQueue, name: str, attach: Attach) -> None:
    peers = [attach(name), attach(name)]
    assert unsynchronized_queue.write(records(1, 2))
    assert [peer.ask("r 2") for peer in peers] == ["1 1 2", "1 1 2"]


def test_a_reader_gets_an_error_after_an_overflow_and_continues(
    unsynchronized_queue: MessageQueue, name: str, attach: Attach
) -> None:
    peer = attach(name)
    assert unsynchronized_queue.write(records(1, 2, 3, 4)) and unsynchronized_queue.write(records(5))
    assert peer.ask("a") == "5"
    assert peer.ask("r 1") == str(-errno.EOVERFLOW)
    assert unsynchronized_queue.write(records(6))
    assert peer.ask("r 1") == "1 6"


def test_a_c_writer_overwrites_records_that_this_process_has_not_read(
    unsynchronized_queue: MessageQueue, name: str, attach: Attach
) -> None:
    peer = attach(name)
    assert [peer.ask("w 1 2 3"), peer.ask("w 4 5 6")] == ["1", "1"]
    assert unsynchronized_queue.read(1) is None
    assert peer.ask("w 7") == "1"
    assert unsynchronized_queue.read(1) == records(7)


@pytest.mark.usefixtures("unsynchronized_queue")
@pytest.mark.parametrize("line", ["R 1 1", "W 1 1"])
def test_an_unsynchronized_queue_has_no_blocking_calls(name: str, attach: Attach, line: str) -> None:
    assert attach(name).ask(line) == str(-errno.EINVAL)


# ---- what is no queue ----


def test_what_does_not_exist_is_rejected(name: str, attach: Attach) -> None:
    assert attach(name).opened == -errno.ENOENT


@pytest.mark.parametrize(
    ("size_bytes", "at", "data", "expected"),
    [
        (4096, 0, b"", errno.EAGAIN),
        (4096, 4096 - 128, b"nf", errno.EAGAIN),
        (4096, 4096 - 128, b"else", errno.EPROTO),
        (100, 0, b"", errno.EPROTO),
    ],
    ids=["half-made", "bit by bit", "another's", "short"],
)
def test_what_is_no_queue_is_rejected(
    name: str, attach: Attach, size_bytes: int, at: int, data: bytes, expected: int
) -> None:
    with posix_shm.create(name, size_bytes) as memory:
        memory.view[at : at + len(data)] = data
    assert attach(name).opened == -expected


@pytest.mark.parametrize(
    ("at", "value"),
    [(12, 0), (16, 5), (16, 2**64 - 1), (24, 4), (32, 4), (40, 4096), (56, 2**64 - 8), (56, 4096 - 128), (72, 4092)],
)
def test_a_record_that_points_outside_its_memory_is_rejected(
    queue: MessageQueue, name: str, attach: Attach, at: int, value: int
) -> None:
    size = 4 if at == 12 else 8
    queue.memory.view[4096 - 128 + at :][:size] = value.to_bytes(size, "little")
    assert attach(name).opened == -errno.EPROTO


# ---- death of either side ----


def test_this_process_can_exit_after_the_c_program_is_killed(
    queue: MessageQueue, name: str, attach: Attach, until: Until
) -> None:
    peer = attach(name)
    peer.tell(f"S {LONG_MS} 1000")
    until(lambda: is_asleep(peer))
    peer.close()
    assert queue.receive(time.monotonic_ns() + LONG_MS * 10**6, 0) == records(0, 1, 2, 3)
    assert queue.receive(time.monotonic_ns() + SOON_MS * 10**6, 0) is None
    remove_named(name)
    assert name not in named_queues()


WRITER = """
import sys
from nnfmq.queue import open_named

queue = open_named(sys.argv[1])
for i in range(10**9):
    queue.write_blocking(i.to_bytes(8, "little"), None)
"""


@pytest.mark.usefixtures("queue")
def test_the_c_program_can_exit_after_python_is_killed(name: str, attach: Attach) -> None:
    peer = attach(name)
    with subprocess.Popen([sys.executable, "-c", WRITER, name]) as writer:
        try:
            assert peer.ask(f"T {LONG_MS} 100") == "100"
        finally:
            writer.kill()
    last = peer.ask(f"T {SOON_MS} {10**9}")  # its own numbers begin at 0 again: it stops at the first, or at none
    assert last == "0"
    peer.ask("r 4")
    assert peer.ask(f"R {SOON_MS} 4") == str(-errno.ETIMEDOUT)
    remove_named(name)
    assert name not in named_queues()


# ---- the example ----


@pytest.fixture
def example(
    compiled: Callable[[Path], Path], name: str, core: cores.Core
) -> Iterator[tuple[MessageQueue, MessageQueue, subprocess.Popen[str]]]:
    """The example between two queues, with a timeout of 20 seconds."""
    with (
        fresh_name() as other, create_named(name, 8, 4, core=core) as requests,
        create_named(other, 8, 4, core=core) as results,
        subprocess.Popen(
            [str(compiled(FOLDER / "exchange.c")), name, other, "20"], stderr=subprocess.PIPE, text=True
        ) as process,
    ):  # fmt: skip
        yield requests, results, process
        process.kill()


def test_the_example_returns_records_until_it_receives_zeros(example: Any, limit_ns: int) -> None:
    requests, results, process = example
    for _ in range(300):
        assert requests.write_blocking(b"abcdefgh", limit_ns)
        assert results.read_blocking(1, limit_ns) == b"hgfedcba"
    assert requests.write_blocking(bytes(8), limit_ns)
    assert process.communicate(timeout=LIMIT_S)[1] == ""
    assert process.returncode == 0


def test_the_example_reports_a_missing_queue(compiled: Callable[[Path], Path], name: str) -> None:
    program = str(compiled(FOLDER / "exchange.c"))
    done = subprocess.run([program, name, name], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (1, f"exchange: {name}: No such file or directory\n")


def test_the_header_s_bits_equal_nnfmq_s(queue: MessageQueue, name: str, attach: Attach) -> None:
    peer = attach(name)
    assert peer.ask("W 1 1") == "1"
    assert bits(queue) == NOT_EMPTY
    assert peer.ask("R 1 1") == "1 1"
    assert bits(queue) == NOT_EMPTY | NOT_FULL
