"""The thread pool alone: every work item is computed once, and a worker that wakes late takes part of the rest."""

from __future__ import annotations

import gc
import os
import platform
import signal
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from support.drivers import InThread, at_least_once, until

from nnfmq.base.sandbox.filter_program import ALLOW, KILL
from nnfmq.base.sandbox.kernel import forbid_new_privileges, install_filter, supports_filter
from nnfmq.engines.compiled import thread_pool
from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.memory_plan import ArraySpec, PartitionLaunch, plan_partition
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.target import host_target
from nnfmq.engines.compiled.thread_pool import RECORD_WORDS, CoreDivision, CorePauses, Parallelism, ThreadPool
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import MissedDeadlineTransient
from nnfmq.lab.roofline import CopyBandwidth
from nnfmq.operations.declaration import Array
from nnfmq.queue.futex import ALL_BITS, futex_wake

MAX_ITEMS = 1000
SPINS = 1 << 31  # some seconds

KERNELS = f"""
define void @count(ptr %args, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  br label %item
item:
  %number = phi i64 [ %begin, %entry ], [ %next, %item ]
  %at = getelementptr i64, ptr %args, i64 %number
  %before = atomicrmw add ptr %at, i64 1 seq_cst
  %next = add i64 %number, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %item, label %done
done:
  ret void
}}

; Item 0 waits until another thread has begun the last item, whose number is in word 0, and sets word 1 when it has.
define void @meet(ptr %args, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %met.at = getelementptr i64, ptr %args, i64 1
  %begun.at = getelementptr i64, ptr %args, i64 2
  %last = load i64, ptr %args
  %first = icmp eq i64 %begin, 0
  br i1 %first, label %look, label %other
look:
  %spins = phi i64 [ 0, %entry ], [ %more, %again ]
  %begun = load atomic i64, ptr %begun.at seq_cst, align 8
  %seen = icmp ne i64 %begun, 0
  br i1 %seen, label %met, label %again
again:
  %more = add i64 %spins, 1
  %long = icmp sgt i64 %more, {SPINS}
  br i1 %long, label %done, label %look
met:
  store atomic i64 1, ptr %met.at seq_cst, align 8
  br label %done
other:
  %is.last = icmp eq i64 %end, %last
  br i1 %is.last, label %begin.last, label %done
begin.last:
  store atomic i64 1, ptr %begun.at seq_cst, align 8
  br label %done
done:
  ret void
}}

; Word 0 has the address of a busy byte, which goes to word 1.
define void @observe(ptr %args, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %byte.at = load ptr, ptr %args
  %byte = load atomic i8, ptr %byte.at monotonic, align 1
  %word = zext i8 %byte to i64
  %seen.at = getelementptr i64, ptr %args, i64 1
  store i64 %word, ptr %seen.at
  ret void
}}

; Sets the byte at the address in word 0, and adds the number of items to word 1.
define void @interrupt(ptr %args, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %byte.at = load ptr, ptr %args
  store atomic i8 1, ptr %byte.at monotonic, align 1
  %items = sub i64 %end, %begin
  %sum.at = getelementptr i64, ptr %args, i64 1
  %before = atomicrmw add ptr %sum.at, i64 %items seq_cst
  ret void
}}

; Halves the float in the first half of each word from 1 on, then sets the second half. Word 0 is not used.
define void @halve(ptr %args, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  br label %item
item:
  %number = phi i64 [ %begin, %entry ], [ %next, %item ]
  %next = add i64 %number, 1
  %at = getelementptr i64, ptr %args, i64 %next
  %whole = load float, ptr %at
  %half = fmul float %whole, 5.0e-01
  %done.at = getelementptr float, ptr %at, i64 1
  store float %half, ptr %at
  store float 1.0, ptr %done.at
  %more = icmp slt i64 %next, %end
  br i1 %more, label %item, label %done
done:
  ret void
}}
"""


@pytest.fixture(scope="module")
def kernels() -> LoadedCode:
    return LoadedCode([compile_ir(KERNELS, host_target())])


def with_workers(count: int) -> ThreadPool:
    """Return a pool with the compiled core, whichever is active."""
    if find_spec("nnfmq.engines.compiled._pool") is None:
        pytest.skip("the compiled core is not built")
    return ThreadPool(count, thread_pool.load("compiled"))


@pytest.fixture
def make_pool() -> Iterator[Callable[[int], ThreadPool]]:
    pools: list[ThreadPool] = []

    def make(worker_count: int) -> ThreadPool:
        pools.append(with_workers(worker_count))
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop()


def run_launches(
    pool: ThreadPool,
    kernel: int,
    args: list[Array],
    work_items: int,
    parallelism: int = Parallelism.PARALLEL_WAKE,
) -> None:
    """Run a launch for each array of `args`, which is its argument array."""
    records = np.array([[kernel, array.ctypes.data, work_items, parallelism] for array in args], np.int64)
    assert records.shape[1] == RECORD_WORDS
    scratch = np.zeros(64 * pool.scratch_slots, np.uint8)
    pool.run(records.ctypes.data, 0, len(args), scratch.ctypes.data, 64)


@pytest.mark.parametrize("parallelism", Parallelism, ids=lambda parallelism: parallelism.name)
@pytest.mark.parametrize("worker_count", [0, 1, 3])
@pytest.mark.parametrize("work_items", [1, 2, 7, 16, 17, 100, MAX_ITEMS])
def test_every_work_item_is_computed_once(
    kernels: LoadedCode,
    make_pool: Callable[[int], ThreadPool],
    work_items: int,
    worker_count: int,
    parallelism: Parallelism,
) -> None:
    pool = make_pool(worker_count)
    counts = [np.zeros(MAX_ITEMS + 1, np.int64) for _ in range(20)]
    for _ in range(50):
        run_launches(pool, kernels.address("count"), counts, work_items, parallelism)
    for count in counts:
        assert set(count[:work_items]) == {50}
        assert not count[work_items:].any()


def test_a_sleeping_worker_joins_a_launch_in_progress(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool = make_pool(1)
    run_launches(pool, kernels.address("count"), [np.zeros(8, np.int64)], 8)
    until(lambda: pool.sleepers >= 1, "the worker sleeps")
    args = np.array([8, 0, 0], np.int64)
    run_launches(pool, kernels.address("meet"), [args], 8)
    assert args[1] == 1


def test_a_sleeping_worker_is_not_woken_for_little_work(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool, count = make_pool(1), np.zeros(8, np.int64)
    run_launches(pool, kernels.address("count"), [count], 8)
    until(lambda: pool.sleepers >= 1, "the worker sleeps")
    before = pool.sleepers
    run_launches(pool, kernels.address("count"), [count], 8, Parallelism.PARALLEL)
    assert pool.sleepers == before, "a wake-up resets the count"
    assert (count == 2).all()


def test_runs_in_quick_succession_wake_a_sleeping_worker_for_little_work(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool, count = make_pool(1), np.zeros(8, np.int64)
    run_launches(pool, kernels.address("count"), [count], 8)
    until(lambda: pool.sleepers >= 1, "the worker sleeps")

    def run_twice() -> bool:
        for _ in range(2):
            run_launches(pool, kernels.address("count"), [count], 8, Parallelism.PARALLEL)
        return pool.sleepers == 0

    until(run_twice, "a wake-up resets the count")


def test_a_worker_takes_part_in_every_launch(kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]) -> None:
    pool = make_pool(1)
    args = [np.array([8, 0, 0], np.int64) for _ in range(100)]
    run_launches(pool, kernels.address("meet"), args, 8)
    assert all(array[1] == 1 for array in args)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("others", [0, 1, 2, 7, 15])
def test_every_work_item_is_computed_once_with_each_share_of_the_cores(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool], others: int, cores: int
) -> None:
    pool, busy = make_pool(3), np.zeros(16, np.uint8)
    busy[:others] = 1
    pool.divide(CoreDivision(busy, np.zeros_like(busy), 15), cores)
    counts = [np.zeros(41, np.int64) for _ in range(20)]
    for _ in range(20):
        run_launches(pool, kernels.address("count"), counts, 40)
    assert all((count[:40] == 20).all() and count[40] == 0 for count in counts)


def test_a_pool_uses_its_share_of_the_cores_and_looks_again_before_each_launch(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool, busy, count = make_pool(1), np.zeros(8, np.uint8), np.zeros(8, np.int64)
    pool.divide(CoreDivision(busy, np.zeros_like(busy), 3), 2)
    run_launches(pool, kernels.address("count"), [count], 8)
    until(lambda: pool.sleepers >= 1, "the worker sleeps")
    busy[7] = 1
    before = pool.sleepers
    run_launches(pool, kernels.address("count"), [count] * 50, 8)
    assert pool.sleepers == before, "a wake-up resets the count"
    busy[7] = 0
    args = np.array([8, 0, 0], np.int64)
    run_launches(pool, kernels.address("meet"), [args], 8)
    assert args[1] == 1
    assert (count == 51).all()


def test_a_pool_is_busy_during_its_runs_also_after_it_was_stopped(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool, busy = make_pool(1), np.zeros(8, np.uint8)
    pool.divide(CoreDivision(busy, np.zeros_like(busy), 3), 2)
    for _ in range(2):
        args = np.array([busy.ctypes.data + 3, 9], np.int64)
        run_launches(pool, kernels.address("observe"), [args], 1)
        assert (args[1], busy.tolist()) == (1, [0] * 8)
        pool.stop()


BATCH, NORMAL, INTERACTIVE = ClientClass.BATCH, ClientClass.NORMAL, ClientClass.INTERACTIVE
OWN, OTHER = 3, 12


class Shared:
    """What processes share, with another one that is busy. `own` is the class of the pool's client."""

    def __init__(self, own: int, other: int, uses: int) -> None:
        self.busy, self.claims, self.classes, self.uses, self.paused = np.zeros((5, 16), np.uint8)
        self.resumed = np.zeros(1, np.uint32)
        self.classes[[OWN, OTHER]], self.uses[OTHER], self.busy[OTHER] = (own, other), uses, 1

    def division(self) -> CoreDivision:
        return CoreDivision(self.busy, self.claims, OWN, CorePauses(self.classes, self.uses, self.paused, self.resumed))

    def end_other(self) -> None:
        """Let the other process end its run and wake those that pause."""
        self.busy[OTHER] = 0
        self.resumed[0] += 1
        futex_wake(int(self.resumed.ctypes.data), ALL_BITS)


def run_beside(kernels: LoadedCode, pool: ThreadPool, shared: Shared, cores: int = 2) -> tuple[InThread, Array]:
    """Start a run of 20 launches of 8 items, each of which counts itself."""
    pool.divide(shared.division(), cores)
    count = np.zeros(8, np.int64)
    return InThread.start(lambda: run_launches(pool, kernels.address("count"), [count] * 20, 8)), count


@pytest.mark.parametrize(("own", "other"), [(BATCH, INTERACTIVE), (BATCH, NORMAL), (NORMAL, INTERACTIVE)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pool_pauses_while_a_process_of_a_higher_class_uses_all_cores(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool], workers: int, own: int, other: int
) -> None:
    def pauses() -> bool:
        shared = Shared(own, other, 2)
        running, count = run_beside(kernels, make_pool(workers), shared)
        until(lambda: shared.paused[OWN] == 1 or not running.is_running, "it pauses")
        is_paused = not count.any()
        shared.end_other()
        running.wait()
        assert (count == 20).all() and not shared.paused.any() and not shared.busy.any()
        return is_paused

    at_least_once(pauses, "it pauses before it counts")  # for at most 1 s


@pytest.mark.parametrize(
    ("own", "other", "uses", "cores"),
    [
        (INTERACTIVE, BATCH, 2, 2),
        (BATCH, BATCH, 2, 2),
        (0, NORMAL, 2, 2),
        (NORMAL, 0, 2, 2),
        (BATCH, INTERACTIVE, 1, 2),
    ],
)
def test_a_pool_goes_on_beside_equals_and_lower_classes_and_if_a_core_is_left(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool], own: int, other: int, uses: int, cores: int
) -> None:
    running, count = run_beside(kernels, make_pool(1), Shared(own, other, uses), cores)
    running.wait(5)
    assert (count == 20).all()


def test_a_pool_whose_class_rises_while_it_pauses_goes_on(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    shared = Shared(BATCH, NORMAL, 2)
    running, count = run_beside(kernels, make_pool(1), shared)
    until(lambda: shared.paused[OWN] == 1, "it pauses")
    shared.classes[OWN] = NORMAL
    running.wait(5)
    assert (count == 20).all()


def test_a_pool_does_not_pause_forever_for_a_process_that_was_stopped(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    begin = time.monotonic()
    running, count = run_beside(kernels, make_pool(1), Shared(BATCH, INTERACTIVE, 2))
    running.wait(10)
    assert (count == 20).all() and time.monotonic() - begin > 0.5


def test_the_threads_of_a_run_are_known_to_others_and_those_that_pause_are_woken_at_its_end(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool, shared = make_pool(1), Shared(INTERACTIVE, BATCH, 2)
    shared.busy[OTHER], shared.paused[OTHER] = 0, 1
    pool.divide(shared.division(), 2)
    run_launches(pool, kernels.address("count"), [np.zeros(8, np.int64)], 8)
    assert (shared.uses[OWN], shared.resumed[0]) == (2, 1)
    shared.claims[OWN] = 1  # its execution goes on
    run_launches(pool, kernels.address("count"), [np.zeros(8, np.int64)], 8)
    assert shared.resumed[0] == 1


def test_a_batch_pool_pauses_within_a_launch(kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]) -> None:
    shared = Shared(BATCH, INTERACTIVE, 1)
    shared.busy[OTHER] = 0
    pool = make_pool(0)
    pool.divide(shared.division(), 1)
    args = np.array([shared.busy.ctypes.data + OTHER, 0], np.int64)  # word 1: how many items have been computed
    running = InThread.start(lambda: run_launches(pool, kernels.address("interrupt"), [args], 80))
    until(lambda: shared.paused[OWN] == 1, "it pauses")
    assert args[1] == 10  # an eighth of the items
    shared.busy[OTHER] = 0
    args[0] = shared.busy.ctypes.data  # another byte
    running.wait(5)
    assert args[1] == 80


def test_other_work_pauses_no_longer_than_until_its_own_deadline_while_another_thread_s_pauses(
    make_pool: Callable[[int], ThreadPool],
) -> None:
    def pauses_until_its_deadline() -> bool:
        pool, shared = make_pool(0), Shared(NORMAL, INTERACTIVE, 2)
        pool.divide(shared.division(), 2)
        first = InThread.start(lambda: pool.begin_work(time.monotonic_ns() + 60_000_000_000))
        until(lambda: shared.paused[OWN] == 1 or not first.is_running, "the first one pauses")
        begin_ns = time.monotonic_ns()
        with pytest.raises(MissedDeadlineTransient, match="higher classes used all cores"):
            pool.begin_work(begin_ns + 10_000_000)
        is_paused = shared.paused[OWN] == 1 and time.monotonic_ns() - begin_ns < 500_000_000  # a pause may take 1 s
        shared.end_other()
        ((_, _, for_class),) = first.wait().value
        assert (for_class, shared.busy[OWN]) == (INTERACTIVE, 1)
        assert pool.begin_work(None) == [], "the first one has begun"
        for is_busy in (1, 0):
            pool.end_work(1)
            assert shared.busy[OWN] == is_busy
        return is_paused

    at_least_once(pauses_until_its_deadline, "the second one pauses until its deadline, and the first one goes on")


@pytest.mark.skipif(not supports_filter(), reason="the kernel has no filter of system calls, which shows the yield")
@pytest.mark.parametrize(
    ("own", "other", "yields"),
    [
        (BATCH, INTERACTIVE, True),
        (NORMAL, INTERACTIVE, True),
        (0, INTERACTIVE, True),
        (INTERACTIVE, INTERACTIVE, False),
        (BATCH, NORMAL, False),
    ],
)
def test_a_pool_yields_to_what_waits_for_its_cpu_while_another_client_is_interactive(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool], own: int, other: int, yields: bool
) -> None:
    shared = Shared(own, other, 1)
    shared.busy[OTHER] = 0  # it is there, and does nothing
    pool = make_pool(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on: a fork with threads
        child = os.fork()
    if not child:
        pool.divide(shared.division(), 2)
        _exit_at_a_yield()
        run_launches(pool, kernels.address("count"), [np.zeros(8, np.int64)] * 2, 8)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGSYS if yields else 0)


def _exit_at_a_yield() -> None:
    """Let the kernel end this process when it calls sched_yield(2)."""
    number = {"x86_64": 24, "aarch64": 124}[platform.machine()]
    load, if_equal, result = 0x20, 0x15, 0x06  # of classic BPF; the number of the call is at offset 0
    program = ((load, 0, 0, 0), (if_equal, 0, 1, number), (result, 0, 0, KILL), (result, 0, 0, ALLOW))
    forbid_new_privileges()
    install_filter(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))


def test_busy_bytes_that_are_no_whole_words_are_rejected(make_pool: Callable[[int], ThreadPool]) -> None:
    for count, own in ((4, 0), (8, 8), (8, -1)):
        with pytest.raises(ValueError, match="multiple of 8"):
            make_pool(1).divide(CoreDivision(np.zeros(count, np.uint8), np.zeros(count, np.uint8), own), 2)


def test_a_caller_that_finds_the_pool_in_use_computes_alone(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool = make_pool(1)
    all_counts = [[np.zeros(64, np.int64) for _ in range(100)] for _ in range(4)]

    def call(counts: list[Array]) -> None:
        for _ in range(20):
            run_launches(pool, kernels.address("count"), counts, 64)

    callers = [threading.Thread(target=call, args=(counts,)) for counts in all_counts]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((count == 20).all() for counts in all_counts for count in counts)


def test_a_stopped_pool_starts_again(kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]) -> None:
    pool = make_pool(2)
    count = np.zeros(16, np.int64)
    for _ in range(10):
        run_launches(pool, kernels.address("count"), [count], 16)
        pool.stop()
    run_launches(pool, kernels.address("count"), [count], 16)
    assert (count == 11).all()


def test_a_pool_works_with_the_threads_that_could_be_started(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, count = make_pool(3), np.zeros(64, np.int64)
    start = threading.Thread.start

    def fail_to_start(thread: threading.Thread) -> None:
        if thread.name != "nnfmq-pool-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_to_start)
        run_launches(pool, kernels.address("count"), [count], 64)
    run_launches(pool, kernels.address("count"), [count], 64)
    assert (count == 2).all()
    assert len(pool._threads) == 1


def test_scratch_slots_do_not_depend_on_the_worker_count(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool = make_pool(3)
    pool.set_worker_count(1)
    assert (pool.worker_count, pool.scratch_slots) == (1, 4)
    count = np.zeros(64, np.int64)
    run_launches(pool, kernels.address("count"), [count], 64)
    assert len(pool._threads) == 1
    pool.set_worker_count(3)
    run_launches(pool, kernels.address("count"), [count], 64)
    assert len(pool._threads) == 3
    assert (count == 2).all()


def test_every_work_item_is_computed_once_while_the_worker_count_changes(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]
) -> None:
    pool, counts = make_pool(3), [np.zeros(64, np.int64) for _ in range(10)]

    def change() -> None:
        for worker_count in (1, 3, 0, 2) * 10:
            pool.set_worker_count(worker_count)

    changer = threading.Thread(target=change)
    changer.start()
    runs = 0
    while changer.is_alive() or runs < 10:
        run_launches(pool, kernels.address("count"), counts, 64)
        runs += 1
    changer.join()
    assert all((count == runs).all() for count in counts)


def test_worker_threads_keep_the_memory_that_they_use(kernels: LoadedCode) -> None:
    pool = with_workers(1)
    run_launches(pool, kernels.address("count"), [np.zeros(8, np.int64)], 8)
    reference = weakref.ref(pool)
    del pool
    gc.collect()
    running = reference()
    assert running is not None
    running.stop()
    del running
    gc.collect()
    assert reference() is None


def test_without_the_compiled_core_the_calling_thread_computes_alone(kernels: LoadedCode) -> None:
    pool, counts = ThreadPool(3, thread_pool.load("python")), [np.zeros(9, np.int64) for _ in range(3)]
    assert (pool.worker_count, pool.scratch_slots) == (0, 1)
    run_launches(pool, kernels.address("count"), counts, 8)
    assert [count.tolist() for count in counts] == [[1] * 8 + [0]] * 3
    assert not pool._threads


def test_a_core_runs_the_records_of_a_range(kernels: LoadedCode) -> None:
    for name in thread_pool.available():
        counts = [np.zeros(8, np.int64) for _ in range(4)]
        records = np.array([[kernels.address("count"), count.ctypes.data, 8, 0] for count in counts], np.int64)
        thread_pool.load(name).LaunchCore().run(records.ctypes.data, 1, 3, 0, 0)
        assert [int(count.sum()) for count in counts] == [0, 8, 8, 0]


def test_a_core_notes_the_times_before_and_after_each_launch(kernels: LoadedCode) -> None:
    for name in thread_pool.available():
        counts = [np.zeros(8, np.int64) for _ in range(4)]
        records = np.array([[kernels.address("count"), count.ctypes.data, 8, 0] for count in counts], np.int64)
        core, times = thread_pool.load(name).LaunchCore(), np.zeros(5, np.int64)
        begin_ns = time.monotonic_ns()
        core.run(records.ctypes.data, 0, 2, 0, 0, times.ctypes.data)
        middle = times.copy()
        core.run_serially(records.ctypes.data, 2, 4, 0, times.ctypes.data)
        assert begin_ns <= middle[0] <= middle[1] <= middle[2]
        assert (middle[3:] == 0).all()
        assert (times[:3] == middle[:3]).all()
        assert times[2] <= times[3] <= times[4] <= time.monotonic_ns()


def test_impossible_workers_are_rejected() -> None:
    for name in thread_pool.available():
        module = thread_pool.load(name)
        core = module.LaunchCore()
        with pytest.raises(ValueError, match="workers"):
            core.set_workers(module.MAX_WORKERS + 1)
        for number in (0, module.MAX_WORKERS + 1):
            with pytest.raises(ValueError, match="worker"):
                core.work(number)


def test_a_forked_child_has_workers_of_its_own(kernels: LoadedCode, make_pool: Callable[[int], ThreadPool]) -> None:
    pool, count = make_pool(2), np.zeros(64, np.int64)
    run_launches(pool, kernels.address("count"), [count], 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on: a fork with threads
        child = os.fork()
    if not child:
        status = 1
        try:
            assert not pool._threads
            run_launches(pool, kernels.address("count"), [count], 64)
            assert len(pool._threads) == 2
            pool.stop()
            status = 0 if (count == 2).all() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run_launches(pool, kernels.address("count"), [count], 64)
    assert (count == 2).all()


def test_workers_are_not_woken_near_the_end_of_a_partition() -> None:
    kernel, estimates_ns = CopyBandwidth(64, 1, 8), (100_000, 1000, 50_000, 40_000, 39_000)
    launches = [PartitionLaunch(kernel, (n,), (n + 1,), (), estimated) for n, estimated in enumerate(estimates_ns)]
    specs = {n + 1: ArraySpec(np.dtype(np.uint8), (512,)) for n in range(len(estimates_ns))}
    plan = plan_partition(launches, specs, {}, [0], [len(estimates_ns)], host_target())
    assert [launch.parallelism for launch in plan.launches] == [
        Parallelism.PARALLEL_WAKE,
        Parallelism.SERIAL,
        Parallelism.PARALLEL_WAKE,
        Parallelism.PARALLEL,
        Parallelism.PARALLEL,
    ]


@pytest.mark.parametrize("parallelism", Parallelism, ids=lambda parallelism: parallelism.name)
@pytest.mark.parametrize("worker_count", [0, 1])
def test_every_thread_computes_with_subnormal_numbers(
    kernels: LoadedCode, make_pool: Callable[[int], ThreadPool], worker_count: int, parallelism: Parallelism
) -> None:
    smallest_normal = np.finfo(np.float32).tiny
    for number in (smallest_normal, smallest_normal / 4):  # as a result, as an operand
        numbers = np.full((MAX_ITEMS + 1, 2), [number, 0], np.float32)
        run_launches(make_pool(worker_count), kernels.address("halve"), [numbers], MAX_ITEMS, parallelism)
        assert (numbers[1:] == [number / 2, 1]).all()


@pytest.mark.skipif(thread_pool.core_name != "compiled", reason="only the compiled core has a thread pool")
def test_the_process_s_pool_has_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool._Process, "pool", None)
    monkeypatch.setattr(thread_pool, "allowed_cores", lambda: 3)
    assert thread_pool.default_thread_pool().worker_count == 2
