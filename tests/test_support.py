"""The checks that guard every other test must themselves be able to fail: leaks, the wrong package, the wrong core."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support import leaks, under_test
from support.drivers import InThread, Program

from nnfmq.base import watcher
from nnfmq.observe import executions
from nnfmq.queue import futex

SHORT_NS = 20_000_000


@pytest.fixture
def after() -> Iterator[ExitStack]:
    """Undo, when the test ends, what it left behind on purpose."""
    with ExitStack() as stack:
        yield stack


def open_descriptor(after: ExitStack) -> None:
    after.callback(os.close, os.open("/dev/null", os.O_RDONLY))


def map_memfd(after: ExitStack) -> None:
    fd = os.memfd_create("left")
    os.ftruncate(fd, mmap.PAGESIZE)
    after.callback(mmap.mmap(fd, mmap.PAGESIZE).close)
    os.close(fd)


def map_memfd_without_descriptor(after: ExitStack) -> None:
    library, fd = ctypes.CDLL(None), os.memfd_create("left")
    library.mmap.restype, pointer, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    library.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.munmap.argtypes = (pointer, size)
    os.ftruncate(fd, mmap.PAGESIZE)
    mapped = library.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
    after.callback(library.munmap, mapped, mmap.PAGESIZE)
    os.close(fd)


def start_thread(after: ExitStack) -> None:
    enough = threading.Event()
    thread = threading.Thread(target=enough.wait, name="lingering")
    thread.start()
    after.callback(thread.join)
    after.callback(enough.set)


def start_child(after: ExitStack) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    after.callback(child.communicate)


def set_variable(after: ExitStack) -> None:
    os.environ["LEFT"] = "7"
    after.callback(os.environ.pop, "LEFT")


def unset_variable(after: ExitStack) -> None:
    after.callback(os.environ.update, PYTHONSAFEPATH=os.environ.pop("PYTHONSAFEPATH"))


def stay_on_one_cpu(after: ExitStack) -> None:
    allowed = os.sched_getaffinity(0)
    after.callback(os.sched_setaffinity, 0, allowed)
    os.sched_setaffinity(0, {min(allowed)} if len(allowed) > 1 else allowed)


def block_a_signal(after: ExitStack) -> None:
    after.callback(
        signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    )


def handle_a_signal(after: ExitStack) -> None:
    after.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, lambda *_: None))


def lower_a_limit(after: ExitStack) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    after.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def ignore_a_signal(after: ExitStack) -> None:
    after.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_IGN))


def replace_a_handler(after: ExitStack) -> None:
    after.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, lambda *_: None))


def leave_a_zombie(after: ExitStack) -> None:
    child = subprocess.Popen(["true"])
    after.callback(child.wait)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def start_a_child_in_a_thread(after: ExitStack) -> None:
    start_thread(after)
    InThread.start(lambda: start_child(after)).wait()


def lengthen_the_timer_slack(after: ExitStack) -> None:
    after.callback(futex.set_timer_slack, futex.timer_slack())
    futex.set_timer_slack(futex.timer_slack() + 1000)


def go_elsewhere(after: ExitStack) -> None:
    after.callback(os.chdir, os.getcwd())
    os.chdir("/")


def extend_the_import_path(after: ExitStack) -> None:
    sys.path.append("/left")
    after.callback(sys.path.remove, "/left")


def switch_threads_often(after: ExitStack) -> None:
    after.callback(sys.setswitchinterval, sys.getswitchinterval())
    sys.setswitchinterval(0.001)


def recur_less(after: ExitStack) -> None:
    after.callback(sys.setrecursionlimit, sys.getrecursionlimit())
    sys.setrecursionlimit(sys.getrecursionlimit() - 1)


def trace_allocations(after: ExitStack) -> None:
    tracemalloc.start()
    after.callback(tracemalloc.stop)


def raise_numpy_s_errors(after: ExitStack) -> None:
    before = np.seterr(divide="raise")
    after.callback(lambda: np.seterr(**before))


def observe_preparations(after: ExitStack) -> None:
    executions._observers.append(print)
    after.callback(executions._observers.remove, print)


def change_the_umask(after: ExitStack) -> None:
    after.callback(os.umask, os.umask(0o12))


def set_a_level(after: ExitStack) -> None:
    log = logging.getLogger("nnfmq")
    after.callback(log.setLevel, log.level)
    log.setLevel(logging.CRITICAL)


def disable_the_collector(after: ExitStack) -> None:
    after.callback(gc.enable)
    gc.disable()


def end_a_shared_thread(after: ExitStack) -> None:
    dead = threading.Thread(target=int, name="left")
    dead.start()
    dead.join()
    after.callback(setattr, watcher._watcher, "_thread", watcher.thread())
    watcher._watcher._thread = dead


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (open_descriptor, r"descriptor \d+ -> /dev/null"),
        (map_memfd, r"mapping .*/memfd:left"),
        (map_memfd_without_descriptor, r"behind:\n  mapping .*/memfd:left"),
        (start_thread, r"thread \d+ lingering"),
        (start_child, r"child process \d+ cat"),
        (start_a_child_in_a_thread, r"child process \d+ cat"),
        (leave_a_zombie, r"child process \d+ \(ended, not waited for\)"),
        (set_variable, r"variable LEFT=7"),
        (unset_variable, r"no variable PYTHONSAFEPATH=1"),
        (stay_on_one_cpu, r"setting CPUs of the thread: \{\d+\}\n.*no setting CPUs of the thread: \{\d+, "),
        (block_a_signal, r"setting blocked signals: \{<Signals.SIGHUP: 1>\}"),
        (handle_a_signal, r"setting handler of signal 1: handle_a_signal"),
        (ignore_a_signal, r"setting handler of signal 10: "),
        (replace_a_handler, r"setting handler of signal 2: replace_a_handler.*\n.*no setting handler of signal 2: "),
        (lengthen_the_timer_slack, r"setting timer slack of the thread: "),
        (go_elsewhere, r"setting working directory: /\n"),
        (extend_the_import_path, r"setting import path: .*/left"),
        (switch_threads_often, r"setting switch interval: 0.001"),
        (recur_less, r"setting recursion limit: \d+"),
        (trace_allocations, r"setting tracing of allocations: True"),
        (raise_numpy_s_errors, r"setting NumPy's errors: .*raise"),
        (observe_preparations, r"setting number of observers of preparations: 1"),
        (lower_a_limit, r"setting RLIMIT_NOFILE: \("),
        (change_the_umask, r"setting umask: .*012"),
        (set_a_level, r"setting log nnfmq: \(50, "),
        (disable_the_collector, r"setting garbage collector: \(False, "),
        (end_a_shared_thread, r"dead thread left"),
    ],
)
def test_a_leak_is_named(leave: object, said: str, after: ExitStack) -> None:
    assert callable(leave)
    with pytest.raises(pytest.fail.Exception, match=said), leaks.watch(SHORT_NS):
        leave(after)


def test_existing_resources_are_no_leak(after: ExitStack) -> None:
    start_child(after)
    open_descriptor(after)
    with leaks.watch(SHORT_NS):
        pass


def test_a_watcher_finds_what_one_test_after_another_leaves(after: ExitStack) -> None:
    watcher = leaks.Watcher()
    with watcher.watch(SHORT_NS):
        pass
    open_descriptor(after)  # what a fixture of several tests opens, and has not told
    with pytest.raises(pytest.fail.Exception, match=r"descriptor \d+ -> /dev/null"), watcher.watch(SHORT_NS):
        pass
    with watcher.watch(SHORT_NS):
        pass


def test_a_mapping_in_place_of_one_of_its_size_is_found_by_the_check_around_the_session(
    after: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the size of the address space tells the check around a test that it has to read the mappings."""
    status, watcher, session = leaks._Status.read(), leaks.Watcher(), leaks.watch(SHORT_NS)
    monkeypatch.setattr(leaks._Status, "read", lambda: status)
    session.__enter__()
    with watcher.watch(SHORT_NS):
        map_memfd_without_descriptor(after)
    with pytest.raises(pytest.fail.Exception, match=r"mapping .*/memfd:left"):
        session.__exit__(None, None, None)
    monkeypatch.setattr(leaks._Status, "read", lambda: status._replace(size="another"))
    with pytest.raises(pytest.fail.Exception, match=r"mapping .*/memfd:left"), watcher.watch(SHORT_NS):
        pass


def test_an_object_in_a_reference_cycle_is_no_leak() -> None:
    with leaks.watch(SHORT_NS):
        descriptor = os.memfd_create("cycle")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        cycle: list[object] = [mmap.mmap(descriptor, mmap.PAGESIZE)]
        cycle.append(cycle)
        os.close(descriptor)
        del cycle


def test_a_source_tree_that_shadows_the_installed_package_is_rejected() -> None:
    complaint = under_test.shadowing(Path("/tree/nnfmq/__init__.py"), [Path("/site/nnfmq/__init__.py")])
    assert complaint is not None
    assert "/tree/nnfmq" in complaint
    assert "/site/nnfmq" in complaint


@pytest.mark.parametrize("owned", [[], [Path("/site/nnfmq/__init__.py")]], ids=["editable", "installed"])
def test_the_package_that_is_installed_may_be_tested(owned: list[Path]) -> None:
    assert under_test.shadowing(Path("/site/nnfmq/__init__.py"), owned) is None


@pytest.mark.parametrize(
    ("wanted", "active", "fine"),
    [("python", "python", True), ("python", "compiled", False), ("compiled", "none", False), (None, "python", True)],
)
def test_the_active_core_must_be_the_named_one(wanted: str | None, active: str, fine: bool) -> None:
    assert (under_test.wrong_core(wanted, active) is None) is fine


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("import sys; print('half', end=''); sys.exit('why')", 30.0, "has exited with status 1 .*'half'.*why"),
        ("input()", 0.0, "has printed no line within 0 s and still runs"),
    ],
)
def test_a_program_that_prints_no_line_has_exited_or_still_runs(code: str, limit_s: float, said: str) -> None:
    with Program.start(["-c", code]) as program, pytest.raises(pytest.fail.Exception, match=f"(?s){said}"):
        program.line(limit_s)


def test_a_call_that_returns_instead_of_waiting_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match="has returned: 7"):
        InThread.start(lambda: 7).wait().wait_until_asleep()
