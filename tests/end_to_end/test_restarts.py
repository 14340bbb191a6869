"""A driver that ends, or is replaced: what is in progress gets its result, and clients that recover lose no request."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
from support import tiers
from support.drivers import (
    LIMIT_S,
    Daemon,
    InThread,
    Process,
    Program,
    app,
    one,
    running_daemon,
    until,
    wait_until_waiting,
)
from support.model_folders import add_version, adder
from support.models import null_model

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.client.connection import open_connections
from nnfmq.client.model.handle import ModelHandle
from nnfmq.driver.process.hand_over import REQUEST, Predecessor
from nnfmq.driver.session.session import END
from nnfmq.serialize.messages import GoAway

DRAINING = "this driver ends, and takes no new work: connect to the next one"
RESTARTS = 100 if tiers.IS_DEEP else 3


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "d.sock"


@contextmanager
def started(path: Path, *options: str, drain_s: float = LIMIT_S, models: Path | None = None) -> Iterator[Daemon]:
    """Run a driver that a test ends; it is killed if it has not ended then."""
    named = [] if models is None else ["--models", str(models)]
    daemon = Daemon.start(path, options=[*options, *named], environment={"NNFMQ_DRAIN_S": str(drain_s)})
    try:
        yield daemon
    finally:
        daemon.close()


def ends_well(daemon: Daemon) -> bool:
    """Wait until a driver has ended, and return whether it did so without an error.

    On a busy machine a worker may wait longer than 250 ms for its supervisor, and does without shared programs.
    """
    status, lines = daemon.program.wait(), daemon.program.errors().splitlines()
    print(status, lines)
    return status == 0 and all("the supervisor does not respond" in line for line in lines)


def terminate(daemon: Daemon) -> None:
    """Send SIGTERM, and return when the driver has closed its socket."""
    daemon.process.send(signal.SIGTERM)
    until(lambda: not daemon.path.exists(), "the driver listens no more")


def rejects(call: Callable[[], object]) -> bool:
    """Return whether a driver rejects a call because it ends."""
    try:
        call()
    except nnfmq.DeviceUnavailable as error:
        return DRAINING in str(error)
    return False


@contextmanager
def in_progress(client: nnfmq.Client) -> Iterator[Callable[[], None]]:
    """Keep a fenced execution in progress; yield a function that lets it end, and checks its result."""
    with (
        nnfmq.Fence.create() as fence,
        client.device("reference").prepare(null_model()) as model,
        model.execute_fenced(one(7), wait_for=[fence]) as launched,
    ):

        def end() -> None:
            fence.signal()
            assert launched.result(LIMIT_S) == (one(7),)

        yield end


@contextmanager
def bursting(client: nnfmq.Client) -> Iterator[nnfmq.Burst]:
    """Yield a burst of the null model that has executed once."""
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        burst.execute(one(1))
        yield burst


# ------------------------------------------------------------------------------------------------ SIGTERM


def test_while_a_driver_drains_new_work_is_rejected_and_what_is_in_progress_ends(path: Path) -> None:
    with started(path) as daemon, daemon.connect() as client, in_progress(client) as end, bursting(client) as burst:
        terminate(daemon)
        until(lambda: rejects(lambda: client.device("reference").prepare(null_model())), "the worker drains")
        assert all(rejects(lambda: burst.execute(one(2))) for _ in range(2))
        with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens"):
            nnfmq.connect(path)
        end()
        assert ends_well(daemon)
        with pytest.raises(nnfmq.DeadObject):
            burst.execute(one(2))


def test_a_request_that_was_sent_before_SIGTERM_is_executed(path: Path) -> None:
    """Even if the driver has not read it yet."""
    with started(path) as daemon, daemon.connect() as client, bursting(client) as burst:
        with Process(client.worker_pid) as worker, worker.stopped():
            call = InThread.start(lambda: burst.execute(one(2)))
            wait_until_waiting(burst)
            terminate(daemon)
        assert call.wait().value == (one(2),)
        assert ends_well(daemon)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_client_that_connects_while_a_driver_ends_gets_the_next_one(path: Path, number: signal.Signals) -> None:
    with started(path) as old:
        with old.process.stopped():
            before = len(open_connections._connections)
            call = InThread.start(lambda: nnfmq.connect(path, timeout=LIMIT_S))
            until(lambda: len(open_connections._connections) > before, "it waits for the driver to accept it")
            old.process.send(number)
        old.process.wait_for_end()
        with running_daemon(path) as new, call.wait().value as client:
            assert client.devices() and client.driver_pid == new.process.pid
            client.close()


def test_a_second_SIGTERM_ends_a_driver_at_once(path: Path) -> None:
    with started(path) as daemon, daemon.connect() as client, in_progress(client):
        terminate(daemon)
        daemon.process.send(signal.SIGTERM)
        assert ends_well(daemon)


def test_a_worker_that_has_not_run_between_two_SIGTERM_ends_at_once(path: Path) -> None:
    """The kernel keeps one signal of each number for a process that does not run."""
    with started(path) as daemon, daemon.connect() as client, in_progress(client):
        with Process(client.worker_pid) as worker, worker.stopped():
            terminate(daemon)
            daemon.process.send(signal.SIGTERM)
            until(lambda: pending_signals(worker.pid) >= {signal.SIGTERM, END}, "the supervisor has sent both")
        assert ends_well(daemon)


def pending_signals(pid: int) -> set[int]:
    """Return the signals that a process has been sent and has not handled."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    pending = int(status.partition("\nShdPnd:\t")[2].split()[0], 16)
    return {number for number in signal.valid_signals() if pending >> (number - 1) & 1}


@pytest.mark.parametrize("drain_s", [0, 0.05])
def test_a_driver_waits_for_its_clients_no_longer_than_it_may(path: Path, drain_s: float) -> None:
    with started(path, drain_s=drain_s) as daemon, daemon.connect() as client, in_progress(client):
        terminate(daemon)
        assert ends_well(daemon)


def test_another_driver_may_start_while_one_drains_and_clients_that_recover_move_to_it(path: Path) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(started(path))
        keeping = stack.enter_context(old.connect())
        end = stack.enter_context(in_progress(keeping))
        client = stack.enter_context(old.connect(recover=True))
        model = stack.enter_context(client.device("reference").prepare(null_model()))
        burst = stack.enter_context(model.burst())
        burst.execute(one(1))
        terminate(old)
        new = stack.enter_context(running_daemon(path))
        for value in range(3):
            assert burst.execute(one(value)) == model.execute(one(value)) == (one(value),)
        assert client.driver_pid == new.process.pid
        assert client.recovery == (0, 1)  # it has not died
        end()
        assert ends_well(old)
        keeping.close()
        client.close()


def test_clients_that_recover_wait_for_the_next_driver(path: Path) -> None:
    with started(path) as old, old.connect(recover=True) as client, bursting(client) as burst:
        terminate(old)
        assert ends_well(old)
        call = InThread.start(lambda: burst.execute(one(2)))
        with running_daemon(path):
            assert call.wait().value == (one(2),)
            client.close()


def test_a_worker_that_SIGTERM_ends_is_replaced_by_another_one_of_its_driver(daemon: Daemon) -> None:
    with daemon.connect(recover=True) as client, Process(client.worker_pid) as worker:
        with client.device("reference").prepare(null_model()) as model:
            worker.send(signal.SIGTERM)
            worker.wait_for_end()
            assert model.execute(one(2)) == (one(2),)
        assert client.worker_pid != worker.pid


def test_a_request_that_a_driver_left_unread_when_it_ended_is_executed_by_the_next_one(daemon: Daemon) -> None:
    with daemon.connect(recover=True) as client, client.device("reference").prepare(null_model()) as model:
        for was_asked in (True, False):
            with model.burst() as burst, Process(client.worker_pid) as worker:
                burst.execute(one(1))
                worker.stop()
                call = InThread.start(lambda burst=burst: burst.execute(one(2)))
                wait_until_waiting(burst)
                if was_asked:
                    client.connection._on_go_away(GoAway("the driver ends"))
                worker.kill()
                if was_asked:
                    assert call.wait().value == (one(2),)
                else:
                    assert isinstance(call.wait().error, nnfmq.DeadObject)
            client.devices()


# ------------------------------------------------------------------------------------------------ --replace


def test_a_driver_that_is_replaced_serves_its_clients_until_they_leave(path: Path) -> None:
    with (
        started(path) as old,
        old.connect() as client,
        bursting(client) as burst,
        running_daemon(path, options=["--replace"]) as new,
    ):
        assert burst.execute(one(1)) == (one(1),)
        with new.connect() as other:
            assert (client.driver_pid, other.driver_pid) == (old.process.pid, new.process.pid)
        assert not old.process.has_exited()
        client.close()
        assert ends_well(old)
        assert admits(new)


def admits(daemon: Daemon) -> bool:
    daemon.connect().close()
    return True


class Gate:
    """Where the thread that moves a client waits when it has prepared a model in the successor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._go, prepare = threading.Semaphore(0), threading.Event(), ModelHandle.prepare_ahead

        def prepare_and_wait(model: ModelHandle, *arguments: Any) -> None:
            prepare(model, *arguments)
            self.reached.release()
            assert self._go.wait(LIMIT_S)

        monkeypatch.setattr(ModelHandle, "prepare_ahead", prepare_and_wait)

    def wait(self) -> None:
        """Wait until a model is prepared, or another one."""
        assert self.reached.acquire(timeout=LIMIT_S)

    def open(self) -> None:
        """Let the thread go on."""
        self._go.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def prepared_in(monitor: nnfmq.Client) -> list[set[int]]:
    """Return the ids of the models, and of the bursts, that the only client of a driver with a model has."""
    (served,) = (each for each in monitor.statistics().clients if each.models)
    return [{model.id for model in served.models}, {burst.id for burst in served.bursts}]


def moves_to(client: nnfmq.Client, driver: Daemon) -> None:
    until(lambda: client.driver_pid == driver.process.pid, "the client moves")


def test_a_client_moves_when_the_successor_has_its_models_and_the_driver_serves_it_until_then(
    path: Path, gate: Gate
) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(started(path))
        client = stack.enter_context(old.connect(recover=True))
        burst = stack.enter_context(bursting(client))
        closed = stack.enter_context(client.device("reference").prepare(null_model()))
        new = stack.enter_context(running_daemon(path, options=["--replace"]))
        monitor = stack.enter_context(new.connect())
        gate.wait()
        assert burst.execute(one(2)) == (one(2),)
        assert client.driver_pid == old.process.pid
        closed.close()
        gate.open()
        moves_to(client, new)
        assert ends_well(old)  # although its client has nothing to execute
        assert client.recovery == (0, 1)
        found = prepared_in(monitor)
        assert [len(ids) for ids in found] == [1, 1]  # neither the closed model, nor the other one twice
        assert burst.execute(one(3)) == (one(3),)
        assert prepared_in(monitor) == found  # the call has prepared and configured nothing
        monitor.close()
        client.close()


def test_a_client_that_is_closed_while_it_moves_keeps_no_driver(path: Path, gate: Gate) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(started(path))
        client = stack.enter_context(old.connect(recover=True))
        stack.enter_context(bursting(client))
        new = stack.enter_context(running_daemon(path, options=["--replace"]))
        gate.wait()
        closing = InThread.start(client.close)
        until(lambda: client._is_closed, "the client is closed")
        gate.open()
        assert closing.wait().error is None
        assert ends_well(old)
        assert admits(new)


@pytest.mark.full
def test_a_client_whose_next_driver_dies_while_it_moves_moves_to_the_one_after_it(path: Path, gate: Gate) -> None:
    with started(path) as old, old.connect(recover=True) as client, bursting(client) as burst:
        with started(path, "--replace") as new:
            gate.wait()
            new.process.kill()
            with Process(client._ahead[0].client.worker_pid) as worker:  # it outlives the supervisor
                worker.kill()
                worker.wait_for_end()
        gate.open()
        with running_daemon(path) as last:
            assert burst.execute(one(2)) == (one(2),)
            moves_to(client, last)
            assert ends_well(old)
            assert burst.execute(one(3)) == (one(3),)
            client.close()


def test_a_move_is_tried_again_until_the_successor_admits_the_client(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(path) as old, old.connect(recover=True) as client, bursting(client) as burst:
        again, attempts = client._connect_again, []
        assert again is not None

        def reject_twice(deadline_ns: int | None, is_closed: Any) -> nnfmq.Client:
            attempts.append(burst.execute(one(2)))  # the driver serves the client meanwhile
            if len(attempts) < 3:
                raise nnfmq.ResourceExhaustedTransient("this driver has all the clients that it may have")
            return again(deadline_ns, is_closed)

        monkeypatch.setattr(client, "_connect_again", reject_twice)
        with running_daemon(path, options=["--replace"]) as new:
            moves_to(client, new)
            assert attempts == 3 * [(one(2),)]
            assert ends_well(old)
            client.close()


def test_what_is_in_progress_ends_in_the_driver_that_is_left(path: Path) -> None:
    with (
        started(path) as old,
        old.connect(recover=True) as client,
        in_progress(client) as end,
        running_daemon(path, options=["--replace"]) as new,
    ):
        moves_to(client, new)
        assert client.devices()
        assert not old.process.has_exited()
        end()
        assert ends_well(old)
        client.close()


def test_replacing_where_no_driver_listens_starts_one(path: Path) -> None:
    with running_daemon(path, options=["--replace"]) as daemon:
        assert admits(daemon)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_a_client_stays_with_a_driver_that_was_replaced_until_its_buffers_are_closed(
    path: Path, is_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nnfmq.client")
    with ExitStack() as stack:
        old = stack.enter_context(started(path))
        client = stack.enter_context(old.connect(recover=True))
        device = client.device("reference")
        model = stack.enter_context(device.prepare(null_model()))
        buffers = {number: device.allocate(inputs=[(model, 0)]) for number in range(2)}

        def release(number: int) -> None:
            buffer = buffers.pop(number)
            if is_closed:
                buffer.close()

        buffers[0].copy_from(one(7))
        new = stack.enter_context(running_daemon(path, options=["--replace"]))
        until(lambda: "stays until its buffers are closed" in caplog.text, "the client is told")
        assert model.execute(buffers[0], timeout=LIMIT_S) == (one(7),)
        release(1)
        assert model.execute(buffers[0], timeout=LIMIT_S) == (one(7),)
        assert client.driver_pid == old.process.pid
        release(0)
        moves_to(client, new)
        assert model.execute(one(8), timeout=LIMIT_S) == (one(8),)
        assert client.recovery.deaths == 0
        client.close()
        assert ends_well(old)


def test_a_successor_that_gives_up_changes_nothing(path: Path) -> None:
    with running_daemon(path) as daemon:
        for _ in range(2):
            found = Predecessor.request(path)
            assert found is not None
            refused = pytest.raises(nnfmq.DeviceUnavailable, match="another driver replaces this one already")
            with found.listener, found, refused:
                Predecessor.request(path)
            assert admits(daemon)
        with Channel.connect(path) as channel:
            channel.send(REQUEST)
        assert admits(daemon)


def test_an_invalid_setting_of_a_successor_leaves_the_driver_as_it_is(path: Path) -> None:
    arguments = ["-P", "-m", "nnfmq", "serve", "--replace", "--socket", path]
    with running_daemon(path) as daemon, Program.start(arguments, {"NNFMQ_CACHE_MIB": "x"}) as program:
        assert program.wait() == 1
        assert admits(daemon)


def test_the_model_repository_is_handed_over_with_the_socket(
    path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nnfmq.client")
    (folder / "models").mkdir()
    add_version(folder / "models", "adder", 1, adder(1))
    with ExitStack() as stack:
        old = stack.enter_context(started(path, models=folder / "models"))
        client = stack.enter_context(old.connect(recover=True))
        model = client.model("adder", timeout=LIMIT_S)
        new = stack.enter_context(running_daemon(path, options=["--replace"], models=folder / "models"))
        moves_to(client, new)
        until(lambda: model.handle.connection is client.connection, "the model moves")
        assert "prepared ahead" not in caplog.text  # it was, before the client left the driver
        assert model.execute([[1.0, 2.0, 3.0, 4.0]], timeout=LIMIT_S)[0].tolist() == [[2, 3, 4, 5]]
        model.close()
        client.close()
        assert ends_well(old)


def test_a_successor_without_models_removes_the_socket_of_the_model_repository(path: Path, folder: Path) -> None:
    (folder / "models").mkdir()
    with started(path, models=folder / "models") as old, running_daemon(path, options=["--replace"]) as new:
        assert ends_well(old)
        with new.connect() as client, pytest.raises(nnfmq.DeviceUnavailable, match="has no model repository"):
            client.models(timeout=LIMIT_S)


# ------------------------------------------------------------------------------------------------ under load


class Load(NamedTuple):
    """An application that executes without a pause. Its own process: threads of one would wait for each other."""

    program: Program
    counter: Path

    @classmethod
    def start(cls, path: Path, way: str, counter: Path) -> Self:
        """Start it; `counter` is its file."""
        counter.write_bytes(bytes(8))
        return cls(app("restart_load", path, way, counter), counter)

    @property
    def count(self) -> int:
        """The number of its executions so far."""
        return int.from_bytes(self.counter.read_bytes(), sys.byteorder)

    def end(self) -> dict[str, int]:
        """Let it end after an execution; return what it has printed."""
        self.program.end_input()
        found: dict[str, int] = json.loads(self.program.line())
        assert self.program.wait() == 0, self.program.errors()
        return found


def wait_until_all_execute(loads: list[Load]) -> None:
    """Wait until each load has executed once more than now."""
    before = [load.count for load in loads]

    def have_executed() -> bool:
        assert not any(load.program.popen.poll() for load in loads), [load.program.errors() for load in loads]
        return all(load.count > count for load, count in zip(loads, before, strict=True))

    until(have_executed, "each load executes")


def restarted(path: Path, daemon: Daemon, replaces: bool, drivers: ExitStack) -> Daemon:
    """Return the driver that follows another one, which has ended; `drivers` kills it if a test fails."""
    if not replaces:
        terminate(daemon)
    successor = drivers.enter_context(Daemon.start(path, options=["--replace"] if replaces else []))
    assert ends_well(daemon)
    return successor


@pytest.mark.parametrize("replaces", [True, False], ids=["replaced", "SIGTERM and start"])
def test_no_request_of_clients_that_recover_is_lost_in_restarts_under_load(
    path: Path, folder: Path, replaces: bool
) -> None:
    with ExitStack() as drivers:
        daemon = drivers.enter_context(Daemon.start(path))
        loads = {way: Load.start(path, way, folder / way) for way in ("burst", "execute", "execute_async")}
        for load in loads.values():
            drivers.enter_context(load.program)
        for _ in range(RESTARTS):
            wait_until_all_execute([*loads.values()])
            daemon = restarted(path, daemon, replaces, drivers)
        wait_until_all_execute([*loads.values()])
        found = {way: load.end() for way, load in loads.items()}
        assert all(each["deaths"] == 0 < each["reconnections"] for each in found.values()), found
        print("longest request, ms:", {way: round(each["longest_ns"] / 1e6) for way, each in found.items()})
        daemon.end()
