"""Functions in processes of their own: what they get, return and report, and that their end is noticed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Process

from nnfmq.base.processes import children
from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab import child_processes
from nnfmq.lab.child_processes import (
    BenchmarkFailed,
    ChildEnded,
    FunctionProcess,
    RunnerUnavailable,
    call_in_child,
    set_time_limit,
    started_child,
)


@pytest.fixture
def echoing() -> Iterator[FunctionProcess]:
    """A process that sends what it gets. The function is a closure: a child cannot import modules of tests."""

    def serve(connection: Any) -> None:
        while True:
            connection.send(connection.recv())

    with started_child(serve, name="an echo") as child:
        yield child


# ---- what goes in and comes out


def test_a_closure_gets_its_arguments_and_returns_its_result() -> None:
    factor = 3

    def scaled(array: np.ndarray[Any, Any], *, offset: int) -> tuple[int, np.ndarray[Any, Any]]:
        return os.getpid(), array * factor + offset

    pid, found = call_in_child(lambda array: scaled(array, offset=1), np.arange(4, dtype=np.int16))
    assert pid != os.getpid()
    np.testing.assert_array_equal(found, np.array([1, 4, 7, 10], np.int16))
    assert found.dtype == np.int16


def test_objects_arrive_in_both_directions_as_they_were_sent(echoing: FunctionProcess) -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    echoing.send({"array": array, "text": "µ"})
    found = echoing.receive(30.0)
    np.testing.assert_array_equal(found["array"], array)
    assert found["text"] == "µ"


def test_the_environment_and_one_thread_of_BLAS_are_the_child_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    names = ("OPENBLAS_NUM_THREADS", "NNFMQ_A_VARIABLE", "PYTHONSAFEPATH")
    found = call_in_child(lambda: [os.environ[name] for name in names], environment={"NNFMQ_A_VARIABLE": "x"})
    assert found == ["1", "x", "1"]
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7" and "NNFMQ_A_VARIABLE" not in os.environ


def test_a_child_leads_a_session_and_takes_interrupts_that_are_meant_for_it() -> None:
    def state() -> tuple[bool, bool, bool]:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return os.getsid(0) == os.getpid(), signal.SIGINT in blocked, signal.getsignal(signal.SIGINT) is not None

    assert call_in_child(state) == (True, False, True)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_child_keeps_no_descriptor_for_programs_that_it_starts() -> None:
    def inheritable() -> list[int]:
        numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
        return [number for number in numbers if os.get_inheritable(number)]

    assert call_in_child(inheritable) == [0, 1, 2]


def test_what_a_child_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    call_in_child(lambda: print("a runtime's banner", flush=True))
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == "a runtime's banner\n"


def test_the_main_module_of_the_program_is_not_imported_again() -> None:
    """It may be a script without a guard, whose code would run in every child."""
    assert call_in_child(lambda: hasattr(sys.modules["__main__"], "console_main")) is False


@pytest.fixture
def others() -> set[int]:
    """The children that this process has before the test, of fixtures of the whole session."""
    return set(children(os.getpid()))


def test_no_other_process_is_left_and_none_runs_beside_the_child(others: set[int], echoing: FunctionProcess) -> None:
    assert set(children(os.getpid())) - others == {echoing.pid}


# ---- failures


@pytest.mark.parametrize("error", [InvalidArgument("no\n  model"), OSError("no\nmodel"), ValueError("no model")])
def test_the_message_of_an_error_is_reported_with_the_name(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(BenchmarkFailed, match=r"^a client: no model$"):
        call_in_child(fail, name="a client")


def test_a_runner_that_is_unavailable_is_reported_as_such() -> None:
    def fail() -> None:
        raise RunnerUnavailable("not installed")

    with pytest.raises(RunnerUnavailable, match=r"^not installed$"):
        call_in_child(fail, name="a client")


def test_an_exception_that_is_a_bug_is_printed_by_the_child(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildEnded, match="a child process: its process ended with status 1 before a result"):
        call_in_child(lambda: {}["absent"])
    assert "KeyError: 'absent'" in capfd.readouterr().err


def test_the_death_of_a_child_is_noticed_immediately(echoing: FunctionProcess) -> None:
    os.kill(echoing.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(ChildEnded, match="an echo: its process ended with status -9 before a result") as raised:
        echoing.receive(600.0)
    assert raised.value.status == -signal.SIGKILL
    assert time.monotonic() - begin < 60
    echoing.send("nobody gets this")


def test_a_message_that_is_cut_short_is_the_end_of_the_child() -> None:
    def die_while_sending(connection: Any) -> None:
        os.write(connection.fileno(), (1000).to_bytes(4, "big") + b"the beginning")
        os._exit(3)

    with (
        started_child(die_while_sending) as child,
        pytest.raises(ChildEnded, match="ended with status 3 before a result"),
    ):
        child.receive(60.0)


def test_a_child_that_closes_its_connection_and_goes_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_and_go_on(connection: Any) -> None:
        connection.close()
        signal.pause()

    monkeypatch.setattr(child_processes, "END_S", 0.1)
    with started_child(close_and_go_on) as child, pytest.raises(ChildEnded) as raised:
        child.receive(60.0)
    assert raised.value.status == -signal.SIGKILL


def test_an_interpreter_that_does_not_start_is_reported() -> None:
    def use(data: bytes) -> int:
        return len(data)

    with pytest.raises(ChildEnded, match="ended with status 1 before a result"):
        call_in_child(use, bytes(1 << 24), environment={"PYTHONHOME": "/nowhere"})


def test_a_child_that_exceeds_its_limit_ends() -> None:
    def run(connection: Any) -> None:
        set_time_limit(0.01)
        connection.recv()

    with started_child(run) as child, pytest.raises(ChildEnded) as raised:
        child.receive(60.0)
    assert raised.value.status == -signal.SIGALRM


def test_a_wait_without_a_message_calls_tick_and_ends(echoing: FunctionProcess) -> None:
    ticks: list[None] = []
    with pytest.raises(BenchmarkFailed, match="an echo: its process did not reply within 0 s"):
        echoing.receive(0.0, lambda: ticks.append(None))
    assert ticks


def test_a_child_ends_when_the_connection_is_closed(echoing: FunctionProcess) -> None:
    echoing.connection.close()
    assert echoing.wait(60.0) == 0


def test_a_child_ends_when_its_parent_is_killed() -> None:
    def wait(connection: Any) -> None:
        connection.recv()

    def start_another(connection: Any) -> None:
        with started_child(wait) as inner:
            connection.send(inner.pid)
            connection.recv()

    with started_child(start_another) as child, Process(child.receive(60.0)) as inner:
        child.kill()
        inner.wait_for_end()


def test_a_child_that_computes_is_killed_with_its_parent() -> None:
    def compute(connection: Any) -> None:
        connection.send("computing")
        while True:
            pass

    def start_another(connection: Any) -> None:
        with started_child(compute) as inner:
            inner.receive(60.0)
            connection.send(inner.pid)
            connection.recv()

    with started_child(start_another) as child, Process(child.receive(60.0)) as inner:
        child.kill()
        inner.wait_for_end()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_child_that_cleans_up_does_so_when_its_parent_is_killed_and_after_an_error(
    is_killed: bool, tmp_path: Path
) -> None:
    def hold_folder(connection: Any) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            connection.send(folder)
            connection.recv()

    def start_another(connection: Any) -> None:
        with started_child(hold_folder, cleans_up=True) as inner:
            connection.send((inner.pid, inner.receive(60.0)))
            connection.recv()
            raise ValueError

    with started_child(start_another) as child:
        pid, folder = child.receive(60.0)
        assert Path(folder).is_dir()
        with Process(pid) as inner:
            child.kill() if is_killed else child.send("fail")
            inner.wait_for_end()
        assert not Path(folder).exists()


def test_a_child_is_killed_after_an_error_in_the_block() -> None:
    def ignore(connection: Any) -> None:
        connection.send("ready")
        signal.pause()

    with suppress(KeyError), started_child(ignore) as child:
        child.receive(60.0)
        pid = child.pid
        raise KeyError
    assert not Path(f"/proc/{pid}").exists()


def test_a_child_that_does_not_exit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(connection: Any) -> None:
        connection.send("ready")
        signal.pause()

    monkeypatch.setattr(child_processes, "END_S", 0.0)
    with started_child(ignore) as child:
        child.receive(60.0)
        pid = child.pid
    assert not Path(f"/proc/{pid}").exists()


def test_what_cannot_be_pickled_starts_no_process(others: set[int]) -> None:
    with pytest.raises(TypeError, match="pickle"):
        call_in_child(sum, (number for number in range(3)))
    assert set(children(os.getpid())) == others
