"""The checks that guard every other test must themselves be able to fail: leaks, the wrong package, the wrong core."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import leaks, under_test
from support.drivers import InThread, Program

from nnfmq.base import watcher

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
        (start_thread, r"thread \d+ lingering"),
        (start_child, r"child process \d+ "),
        (set_variable, r"variable LEFT=7"),
        (unset_variable, r"no variable PYTHONSAFEPATH=1"),
        (stay_on_one_cpu, r"setting CPUs of the thread: \{\d+\}\n.*no setting CPUs of the thread: \{\d+, "),
        (block_a_signal, r"setting blocked signals: \{<Signals.SIGHUP: 1>\}"),
        (handle_a_signal, r"setting handler of signal 1: handle_a_signal"),
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
