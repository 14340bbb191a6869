"""A runtime that crashes, hangs or takes all memory costs its worker at most, and only its client learns of it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, until
from support.faulty_runtime import (
    DEVICE,
    FAULT,
    GRACE_S,
    STALL_S,
    faulty_driver,
    faulty_file,
    four,
    unharmed_neighbour,
)

import nnfmq
from nnfmq.driver.cache.shared_files import SHARED_BYTES_MIN

SOON_S = 0.1


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests of this module: its workers may die, it may not."""
    with faulty_driver(tmp_path_factory.mktemp("site")) as daemon:
        yield daemon


@pytest.fixture
def neighbour(driver: Daemon, tmp_path: Path) -> Iterator[None]:
    with unharmed_neighbour(driver, tmp_path):
        yield


@pytest.fixture
def client(driver: Daemon, neighbour: None) -> Iterator[nnfmq.Client]:
    with driver.connect() as made:
        yield made


def execute_in_burst(model: nnfmq.PreparedModel, timeout: float | None) -> object:
    with model.burst() as burst:
        assert (burst.execute(four(1))[0] == 2).all()
        return burst.execute(four(FAULT), timeout=timeout)


def execute_fenced(model: nnfmq.PreparedModel, timeout: float | None) -> object:
    with model.execute_fenced(four(FAULT), timeout=timeout) as launched:
        return launched.result(LIMIT_S)


MODES: dict[str, Callable[[nnfmq.PreparedModel, float | None], object]] = {
    "burst": execute_in_burst,
    "call": lambda model, timeout: model.execute(four(FAULT), timeout=timeout),
    "fenced": execute_fenced,
}


def prepared(client: nnfmq.Client, folder: Path, **content: object) -> nnfmq.PreparedModel:
    return client.device(DEVICE).prepare(faulty_file(folder, **content))


@pytest.mark.parametrize(("mode", "fault"), [*((mode, "segfault") for mode in MODES), ("burst", "abort")])
def test_a_crash_in_an_execution_is_DEAD_OBJECT(client: nnfmq.Client, tmp_path: Path, mode: str, fault: str) -> None:
    model = prepared(client, tmp_path, run=fault)
    with pytest.raises(nnfmq.DeadObject):
        MODES[mode](model, None)


def logged_words(driver: Daemon, worker: int) -> list[str]:
    """Return what a worker has written to stderr, by the lines of the log that name it; its death counts as such."""
    pattern = re.compile(
        rf" (?:WARNING|ERROR) [\w.]+\[\d+\]: (.*) client={os.getpid()} .* worker={worker}$", re.MULTILINE
    )
    return pattern.findall(driver.program.errors())


WORDS = ["a worker wrote to stderr: the runtime says", "a worker wrote to stderr:   two lines"]


def test_what_a_runtime_writes_to_stderr_is_logged_with_its_client(
    client: nnfmq.Client, driver: Daemon, tmp_path: Path
) -> None:
    execute_in_burst(prepared(client, tmp_path, run="write"), None)
    until(lambda: logged_words(driver, client.worker_pid) == WORDS, "it is logged")


def test_the_last_words_of_a_worker_are_logged_before_its_death(
    client: nnfmq.Client, driver: Daemon, tmp_path: Path
) -> None:
    worker = client.worker_pid
    with pytest.raises(nnfmq.DeadObject):
        execute_in_burst(prepared(client, tmp_path, run="write and abort"), None)
    until(lambda: len(logged_words(driver, worker)) == 3, "both are logged")
    assert logged_words(driver, worker) == [*WORDS, f"worker {worker} ended with status -6"]


def test_a_runtime_that_writes_more_than_the_supervisor_reads_does_not_wait(
    client: nnfmq.Client, driver: Daemon, tmp_path: Path
) -> None:
    model = prepared(client, tmp_path, run="write 1 MiB")
    with driver.process.stopped():
        execute_in_burst(model, LIMIT_S)
    until(lambda: bool(logged_words(driver, client.worker_pid)), "the begin of it is logged")


@pytest.mark.parametrize("padding", [0, SHARED_BYTES_MIN], ids=["own memory", "memory of another client"])
def test_each_preparation_opens_its_file_once(
    client: nnfmq.Client, driver: Daemon, tmp_path: Path, padding: int
) -> None:
    file = faulty_file(tmp_path, open="write", run="abort", padding=" " * padding)
    device, worker = client.device(DEVICE), client.worker_pid
    with driver.connect() as other, other.device(DEVICE).prepare(file):
        client.prepare(file).close()
        device.prepare(device.load(file)).close()
        with pytest.raises(nnfmq.DeadObject):
            execute_in_burst(device.prepare(file, shapes={"x": (4,)}), None)
    until(lambda: f"worker {worker} ended with status -6" in logged_words(driver, worker), "all is logged")
    assert "".join(logged_words(driver, worker)).count("the runtime says") == 3


@pytest.mark.parametrize("fault", ["segfault", "abort", "killed"])
def test_a_crash_while_a_file_is_opened_is_DEAD_OBJECT(client: nnfmq.Client, tmp_path: Path, fault: str) -> None:
    with pytest.raises(nnfmq.DeadObject):
        prepared(client, tmp_path, open=fault)


ENDS = {"burst": nnfmq.MissedDeadline, "call": nnfmq.MissedDeadline, "fenced": nnfmq.DeadObject}
"""The error of an execution that does not stop. `FencedExecution.result` waits for the fence, as long as it is told."""


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_stop_at_its_deadline_ends_with_its_worker_when_the_grace_is_over(
    client: nnfmq.Client, driver: Daemon, tmp_path: Path, mode: str
) -> None:
    model, other = prepared(client, tmp_path, run="endless"), prepared(client, tmp_path)
    with Process(client.worker_pid) as worker:
        begin_s = time.monotonic()
        with pytest.raises(ENDS[mode]):
            MODES[mode](model, SOON_S)
        print(f"{ENDS[mode].__name__} after {time.monotonic() - begin_s:.3f} s")
        worker.wait_for_end()
        assert time.monotonic() - begin_s > SOON_S + GRACE_S
    until(lambda: "so this worker exits" in driver.program.errors(), "the log says why")
    with pytest.raises(nnfmq.DeadObject):
        other.execute(four(1))


def test_a_runtime_that_keeps_the_GIL_beyond_a_deadline_ends_with_its_worker(
    client: nnfmq.Client, tmp_path: Path
) -> None:
    model = prepared(client, tmp_path, run="keep the GIL")
    with Process(client.worker_pid) as worker, model.burst() as burst:
        burst.execute(four(1), timeout=LIMIT_S)
        with pytest.raises(nnfmq.MissedDeadline):
            burst.execute(four(FAULT), timeout=SOON_S)
        with pytest.raises(nnfmq.DeadObject):
            burst.execute(four(1), timeout=LIMIT_S)
        worker.wait_for_end(STALL_S)


def test_what_stops_at_its_deadline_keeps_its_worker(client: nnfmq.Client, tmp_path: Path) -> None:
    with prepared(client, tmp_path, run="until aborted") as model, model.burst() as burst:
        for _ in range(2):
            with pytest.raises(nnfmq.MissedDeadline):
                burst.execute(four(FAULT), timeout=SOON_S)
            assert (burst.execute(four(1), timeout=LIMIT_S)[0] == 2).all()
        with pytest.raises(nnfmq.MissedDeadline):
            model.execute(four(FAULT), timeout=SOON_S)
        assert (model.execute(four(2))[0] == 3).all()


def test_a_file_that_opens_for_ever_ends_with_its_worker(client: nnfmq.Client, tmp_path: Path) -> None:
    with Process(client.worker_pid) as worker:
        with pytest.raises(nnfmq.MissedDeadline):
            client.device(DEVICE).prepare(faulty_file(tmp_path, open="endless"), timeout=SOON_S)
        worker.wait_for_end()


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("10 GiB", nnfmq.ResourceExhausted, "allocate"),
        ("bad_alloc", nnfmq.ResourceExhausted, "std::bad_alloc"),
        ("raise", nnfmq.GeneralFailure, "faulty: as the test wants"),
    ],
)
def test_an_error_in_an_execution_costs_that_execution(
    client: nnfmq.Client, tmp_path: Path, fault: str, error: type[Exception], text: str
) -> None:
    with prepared(client, tmp_path, run=fault) as model, model.burst() as burst:
        assert (burst.execute(four(1))[0] == 2).all()
        with pytest.raises(error, match=text):
            burst.execute(four(FAULT))
        with pytest.raises(error, match=text):
            model.execute(four(FAULT))
        assert (burst.execute(four(1))[0] == 2).all()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("rank", r"\(1, 2\) for output 'y'"),
        ("dtype", "int8"),
        ("same size", "int32"),
        ("no result", "0 results"),
        ("no array", "list"),
    ],
)
def test_a_result_that_is_not_what_the_file_declares_is_GENERAL_FAILURE(
    client: nnfmq.Client, tmp_path: Path, fault: str, text: str
) -> None:
    with prepared(client, tmp_path, run=fault, dynamic=True) as model:
        assert (model.execute(four(1))[0] == 2).all()
        with pytest.raises(nnfmq.GeneralFailure, match=text):
            model.execute(four(FAULT))
        assert (model.execute(four(1))[0] == 2).all()


@pytest.mark.parametrize(
    ("fault", "error"),
    [("10 GiB", nnfmq.ResourceExhausted), ("raise", nnfmq.InvalidArgument), ("bad_alloc", nnfmq.ResourceExhausted)],
)
def test_an_error_while_a_file_is_opened_costs_that_file(
    client: nnfmq.Client, tmp_path: Path, fault: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"{DEVICE}: "):
        prepared(client, tmp_path, open=fault)
    with prepared(client, tmp_path) as model:
        assert (model.execute(four(1))[0] == 2).all()


def test_SIGSTOP_of_the_worker_during_a_run_is_a_missed_deadline_and_it_goes_on_afterwards(
    client: nnfmq.Client, tmp_path: Path
) -> None:
    with prepared(client, tmp_path, run="0.2 s") as model, model.burst() as burst:
        burst.execute(four(1))
        with Process(client.worker_pid) as worker:
            call = InThread.start(lambda: burst.execute(four(FAULT), timeout=0.3))
            until(lambda: burst.channel.results.waiters > 0, "the client waits")
            with worker.stopped():
                assert isinstance(call.wait().error, nnfmq.MissedDeadline)
        assert (burst.execute(four(1), timeout=LIMIT_S)[0] == 2).all()


def test_a_client_that_recovers_goes_on_after_the_death_of_its_worker(
    driver: Daemon, neighbour: None, tmp_path: Path
) -> None:
    with (
        nnfmq.connect(driver.path, timeout=LIMIT_S, recover=True) as client,
        prepared(client, tmp_path, run="endless") as model,
        model.burst() as burst,
    ):
        burst.execute(four(1))
        with Process(client.worker_pid) as worker:
            with pytest.raises(nnfmq.MissedDeadline):
                burst.execute(four(FAULT), timeout=SOON_S)
            worker.wait_for_end()
        assert (burst.execute(four(1), timeout=LIMIT_S)[0] == 2).all()
        assert (model.execute(four(2), timeout=LIMIT_S)[0] == 3).all()
