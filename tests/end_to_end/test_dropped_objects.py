"""Objects that the application drops without closing them: their descriptors and processes go, and a warning says so.

The garbage collector is off: nothing here may be part of a reference cycle.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.drivers import LIMIT_S, Daemon, Process, one, until
from support.models import null_model

import nnfmq
from nnfmq.client.connection import garbage

Children = Callable[[], set[str]]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@contextmanager
def expected_warnings() -> Iterator[list[str]]:
    """Give the texts of the ResourceWarnings of the block, on any thread."""
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", ResourceWarning)
        warnings.showwarning = lambda message, *_, **__: found.append(str(message))
        yield found
        until(lambda: not garbage._Current.process.waiting(), "all is closed")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def all_children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split())


@pytest.fixture
def children() -> Children:
    """Return what gives the children of this process that the test has started: a driver of other tests may run."""
    before = all_children()
    return lambda: all_children() - before


def own_models(client: nnfmq.Client) -> tuple[Any, ...]:
    (found,) = (other.models for other in client.statistics().clients if other.worker_pid == client.worker_pid)
    return tuple(found)


@pytest.mark.parametrize("recover", [True, False])
def test_a_client_that_is_dropped_ends_its_driver_and_leaves_no_descriptor(recover: bool, children: Children) -> None:
    before = descriptors()
    with expected_warnings() as found:
        for _ in range(3):  # as a cell of a notebook that is run again
            client = nnfmq.connect(embedded=True, recover=recover)
            model = client.prepare(null_model())
            burst = model.burst()
            assert burst.execute(one(1)) == (one(1),)
        del client, model, burst
        until(lambda: not children(), "the drivers have ended")
        until(lambda: descriptors() <= before, "the descriptors are closed")
    assert sum("of embedded driver" in text and "<Client " in text for text in found) == 3
    assert sum("Burst on" in text and "never closed: call close(), or use `with`" in text for text in found) == 3


def test_a_client_that_is_dropped_while_its_driver_starts_ends_it(children: Children) -> None:
    with expected_warnings():
        nnfmq.connect(embedded=True)
        until(lambda: not children(), "the driver has ended")


def test_a_client_whose_driver_has_died_is_released_when_it_is_dropped(children: Children) -> None:
    before = descriptors()
    with expected_warnings() as found:
        client = nnfmq.connect(embedded=True)
        with Process(client.worker_pid) as driver:
            driver.kill()
            driver.wait_for_end()
        until(lambda known=client.connection: not known.is_open, "the client knows")
        del client
        until(lambda: not children() and descriptors() <= before, "all is released")
    assert len(found) == 1


def is_over_queues(burst: Any) -> bool:
    assert burst.execute(one(1)) == (one(1),)
    return bool(burst.last.driver_ns > 0)


def test_what_is_dropped_one_after_the_other_is_kept_alive_by_what_is_used(children: Children) -> None:
    with expected_warnings():
        burst = nnfmq.connect(embedded=True).prepare(null_model()).burst()
        for value in range(3):
            assert burst.execute(one(value)) == (one(value),)
        with Process(burst.channel.connection.wait_until_ready().worker_pid) as driver:
            driver.kill()
            driver.wait_for_end()
        until(partial(is_over_queues, burst), "the device executes again")
        del burst
        until(lambda: not children(), "the drivers have ended")
        model = nnfmq.connect(embedded=True, recover=False).prepare(null_model())
        assert model.execute(one(2)) == (one(2),)
        assert nnfmq.connect(embedded=True).prepare(null_model()).execute_async(one(3)).result(LIMIT_S) == (one(3),)

        async def main() -> Any:
            return await nnfmq.connect(embedded=True).prepare(null_model()).execute_async(one(4))

        assert asyncio.run(main()) == (one(4),)
        del model
        until(lambda: not children(), "the drivers have ended")


def test_rebinding_models_and_bursts_does_not_run_out_of_descriptors(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        with daemon.connect(recover=True) as client, expected_warnings() as found:
            for value in range(130):
                model = client.device("reference").prepare(null_model())
                burst = model.burst()
                assert burst.execute(one(value)) == (one(value),)
            until(lambda: len(own_models(client)) == 1, "the models are released in the driver")
            burst.close()
            model.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(found) == 129


def test_without_descriptors_the_error_names_close(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), hard))
    try:
        with pytest.raises(nnfmq.ResourceExhausted, match=r"close\(\) bursts, models and clients that are not used"):
            model.burst()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with model.burst() as burst:
        assert burst.execute(one(1)) == (one(1),)


def fenced(client: nnfmq.Client, model: nnfmq.PreparedModel) -> object:
    launched = model.execute_fenced(one(1))
    assert launched.result(LIMIT_S) == (one(1),)
    return launched


def reusable(client: nnfmq.Client, model: nnfmq.PreparedModel) -> object:
    execution = model.create_reusable_execution()
    assert execution.compute(one(1)) == (one(1),)
    return execution


def pool(client: nnfmq.Client, model: nnfmq.PreparedModel) -> object:
    made = model.burst_pool(2)
    assert made.execute(one(1)) == (one(1),)
    return made


KINDS: dict[str, tuple[Callable[[nnfmq.Client, nnfmq.PreparedModel], object], int]] = {
    "burst": (lambda _client, model: model.burst(), 1),
    "pool": (pool, 2),
    "execution": (reusable, 1),
    "fenced": (fenced, 1),
    "aidl_burst": (lambda _client, model: model.aidl_burst(), 0),
    "buffer": (lambda client, model: client.device("reference").allocate(inputs=[(model, 0)]), 0),
    "model": (lambda client, _model: client.device("reference").prepare(null_model()), 0),
    "pending": (lambda _client, model: model.execute_async(one(1)), 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_object_is_released_here_and_in_the_driver(
    kind: str, client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    make, warned = KINDS[kind]
    model.execute(one(1))
    before, models = descriptors(), len(own_models(client))
    with expected_warnings() as found:
        for _ in range(3):
            made = make(client, model)
            assert made is not None
            del made
        until(lambda: descriptors() <= before, "the descriptors are closed")
        until(lambda: len(own_models(client)) == models, "the models are released")
    assert len(found) == 3 * warned


def test_what_is_closed_is_not_warned_of(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    with expected_warnings() as found:
        for make, _ in KINDS.values():
            made: Any = make(client, model)
            getattr(made, "close", lambda: None)()
            del made
        other = nnfmq.connect(embedded=True)
        other.close()
        del other
    assert found == []


def test_bursts_of_a_client_that_was_closed_are_released_without_a_warning(daemon: Daemon) -> None:
    before = descriptors()
    with daemon.connect(), expected_warnings() as found:
        with daemon.connect() as client:
            burst = client.device("reference").prepare(null_model()).burst()
        del burst, client
        until(lambda: descriptors() <= before + 8, "the descriptors are closed")
    assert found == []
    until(lambda: descriptors() <= before, "the descriptors are closed")


def test_a_finalizer_waits_for_no_lock(client: nnfmq.Client, model: nnfmq.PreparedModel) -> None:
    """It may run while its own thread holds any of them."""
    made: list[Any] = [make(client, model) for make, _ in KINDS.values()]
    connection = client.connection
    with expected_warnings(), connection._lock, garbage._Current.process._lock, model.handle._lock:
        dropping = threading.Thread(target=made.clear, daemon=True)
        dropping.start()
        dropping.join(LIMIT_S)
        assert not dropping.is_alive()


PROGRAM = """
import nnfmq, numpy, sys
sys.path.insert(0, {lib!r})
from support.models import null_model
client = nnfmq.connect(embedded=True)
model = client.prepare(null_model())
model.execute(numpy.ones(1, numpy.float32))
pending = model.execute_async(numpy.ones(1, numpy.float32))
print(client.driver_pid)
"""


def test_a_program_that_ends_without_closing_its_client_is_told_which_one_and_leaves_no_driver() -> None:
    lib = Path(__file__).parents[1] / "lib"
    ended = subprocess.run(
        [sys.executable, "-P", "-W", "always", "-c", PROGRAM.format(lib=str(lib))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    pid = int(ended.stdout)
    what = f"<Client {pid} of embedded driver {pid}> was never closed: call close(), or use `with`"
    assert ended.stderr.count(what) == 1
    assert "unclosed <socket" not in ended.stderr and "still running" not in ended.stderr
    until(lambda: not Path(f"/proc/{pid}").exists(), "the driver has ended")
