"""Classes of clients, in drivers that run without privileges: who gets which, what it changes, and the way back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from support.core_page import SLOTS, Page, opened_page
from support.drivers import (
    LIMIT_S,
    Daemon,
    InThread,
    Process,
    Program,
    at_least_once,
    kill_worker,
    running_daemon,
    short_folder,
    until,
)
from support.models import slow_model

import nnfmq
from nnfmq.base.processes import allowed_cores
from nnfmq.base.scheduling import Scheduling, scheduling_of
from nnfmq.cli import main
from nnfmq.driver.process.client_classes import SCHEDULING
from nnfmq.engines.compiled import thread_pool
from nnfmq.hal.client_class import ClientClass

UNPRIVILEGED = """
import sys
from nnfmq.base.sandbox.kernel import drop_capabilities
from nnfmq.cli import main
drop_capabilities()
sys.exit(main(["serve", "--socket", sys.argv[1]]))
"""
"""A driver that the kernel's scheduler lets do no more than any user, also if root runs it."""
WAITING = """
import sys, nnfmq
with nnfmq.connect(sys.argv[1]) as client:
    print(client.worker_pid, flush=True)
    sys.stdin.read()
"""
MODEL, INPUT = slow_model(8, 64), np.ones((1, 64, 64, 32), np.float32)
CORES, OTHER = allowed_cores(), SLOTS // 2  # a place that no worker of these tests has
only_the_compiled_core_pauses = pytest.mark.skipif(
    thread_pool.core_name != "compiled", reason="only the compiled core has a thread pool"
)
BATCH, NORMAL, INTERACTIVE = ClientClass.BATCH, ClientClass.NORMAL, ClientClass.INTERACTIVE


@contextmanager
def unprivileged_driver(environment: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Run a driver without capabilities."""
    with short_folder() as folder:
        path = folder / "d.sock"
        with running_daemon(path, environment=environment, arguments=["-P", "-c", UNPRIVILEGED, path]) as daemon:
            yield daemon


@pytest.fixture(scope="module")
def driver() -> Iterator[Daemon]:
    with unprivileged_driver() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def ruled() -> Iterator[Daemon]:
    """A driver that gives nobody the class interactive by asking, and this test's program the class batch."""
    rules = {"NNFMQ_INTERACTIVE_UIDS": "", "NNFMQ_CLIENT_CLASSES": f"{os.getuid() + 1}=interactive,pytest=batch"}
    with unprivileged_driver(rules) as daemon:
        yield daemon


def connect(daemon: Daemon, client_class: str | None = None) -> nnfmq.Client:
    return nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=False, client_class=client_class)  # type: ignore[arg-type]


def class_of(client: nnfmq.Client) -> ClientClass:
    found = client.statistics().clients
    return ClientClass(next(each.client_class for each in found if each.worker_pid == client.worker_pid))


def scheduling(worker: int) -> set[Scheduling]:
    """Return what the threads of a worker ask of the kernel's scheduler."""
    return {scheduling_of(int(thread)) for thread in os.listdir(f"/proc/{worker}/task")}


def expected(client_class: ClientClass) -> set[Scheduling]:
    return {SCHEDULING[client_class]}


def test_a_class_has_effect_on_a_running_worker_and_so_has_the_way_back_without_privileges(driver: Daemon) -> None:
    with connect(driver) as client, connect(driver, "interactive") as administrator:
        worker = client.worker_pid
        assert (class_of(client), scheduling(worker)) == (NORMAL, expected(NORMAL))
        assert (class_of(administrator), scheduling(administrator.worker_pid)) == (INTERACTIVE, expected(INTERACTIVE))
        for wanted in (BATCH, INTERACTIVE, BATCH, NORMAL):
            administrator.set_client_class(wanted, worker)
            assert (class_of(client), scheduling(worker)) == (wanted, expected(wanted))


def test_the_threads_that_a_worker_starts_later_have_its_class(driver: Daemon) -> None:
    with connect(driver, "batch") as client:
        before = len(os.listdir(f"/proc/{client.worker_pid}/task"))
        client.devices()  # on a thread of the session's pool
        client.statistics()
        assert len(os.listdir(f"/proc/{client.worker_pid}/task")) > before
        assert scheduling(client.worker_pid) == expected(BATCH)


def test_a_client_that_may_not_have_a_class_is_told_why_and_who_can_change_it(ruled: Daemon) -> None:
    with pytest.raises(nnfmq.GeneralFailure, match="does not get the class interactive: it has batch by"):
        connect(ruled, "interactive")


def test_a_client_may_lower_itself_and_not_get_beyond_what_the_driver_decided(ruled: Daemon) -> None:
    with connect(ruled) as client:
        assert class_of(client) is BATCH  # by the rule for this program
        with pytest.raises(nnfmq.GeneralFailure, match="does not get the class normal: it has batch by"):
            client.set_client_class("normal")
        assert class_of(client) is BATCH


def test_the_setting_says_who_gets_the_class_interactive_by_asking() -> None:
    with unprivileged_driver({"NNFMQ_INTERACTIVE_UIDS": str(os.getuid() + 1)}) as daemon:
        text = (
            f"uid {os.getuid()} does not get the class interactive by requesting it: allowed are uid {os.getuid() + 1} "
        )
        with pytest.raises(nnfmq.GeneralFailure, match=text):
            connect(daemon, "interactive")
        with connect(daemon, "normal") as client:
            client.set_client_class("batch")
            client.set_client_class("normal")
            with pytest.raises(nnfmq.GeneralFailure, match=text):
                client.set_client_class("interactive")
            assert class_of(client) is NORMAL


def test_an_unknown_class_or_client_is_an_error_that_says_what_there_is(driver: Daemon) -> None:
    with connect(driver) as client:
        with pytest.raises(nnfmq.InvalidArgument, match=r"'interactives': allowed are .* did you mean 'interactive'"):
            client.set_client_class("interactives")  # type: ignore[arg-type]
        with pytest.raises(nnfmq.GeneralFailure, match="has the worker 1: `nnfmq client list` shows them"):
            client.set_client_class("batch", 1)


def test_the_place_of_a_client_that_has_left_has_the_class_of_the_next_one(driver: Daemon) -> None:
    with opened_page(driver) as page:
        with connect(driver, "batch") as first:
            place = page.classes.index(BATCH)
            with Process(first.worker_pid) as worker:
                worker.kill()
                worker.wait_for_end()
        until(lambda: not page.classes[place], "the supervisor clears the entry")
        with connect(driver) as second:
            assert class_of(second) is NORMAL
            until(lambda: set(page.classes) == {0, NORMAL}, "the others have ended")


@contextmanager
def opened_burst(client: nnfmq.Client) -> Iterator[Callable[[], object]]:
    """Yield a function that executes a model of some milliseconds over a burst."""
    pytest.importorskip("llvmlite", exc_type=ImportError)
    with client.device("compiled").prepare(MODEL, preference="sustained_speed") as prepared, prepared.burst() as burst:
        yield lambda: burst.execute(INPUT, timeout=LIMIT_S)


@only_the_compiled_core_pauses
def test_a_batch_client_pauses_and_has_the_cores_at_once_when_its_class_changes(driver: Daemon) -> None:
    with (
        connect(driver, "batch") as client,
        connect(driver) as administrator,
        opened_burst(client) as execute,
        opened_page(driver) as page,
    ):
        execute()
        page.compute(OTHER, INTERACTIVE, CORES)
        try:
            running = InThread.start(execute)
            until(lambda: any(page.paused), "its worker pauses")
            administrator.set_client_class("interactive", client.worker_pid)
            running.wait(5)
            assert not any(page.paused)
        finally:
            page.end(OTHER)


@only_the_compiled_core_pauses
@pytest.mark.parametrize("runtime", ["litert", "onnxruntime"])
def test_an_execution_of_a_hosted_runtime_pauses_before_it_begins(driver: Daemon, runtime: str, tmp_path: Path) -> None:
    """At most until its deadline, or until its class changes."""
    with (
        connect(driver, "batch") as client,
        connect(driver) as administrator,
        client.device(runtime).prepare(hosted_file(runtime, tmp_path)) as model,
        model.burst() as burst,
        opened_page(driver) as page,
    ):
        inputs = [np.ones([size or 1 for size in each.shape], each.dtype) for each in model.inputs]
        expected = burst.execute(*inputs, timeout=LIMIT_S)[0]
        number = page.classes.index(BATCH)
        page.compute(OTHER, INTERACTIVE, CORES)
        try:
            running = InThread.start(lambda: burst.execute(*inputs, timeout=LIMIT_S))
            until(lambda: any(page.paused), "its worker pauses")
            administrator.set_client_class("interactive", client.worker_pid)
            assert np.array_equal(running.wait(5).value[0], expected)
            administrator.set_client_class("batch", client.worker_pid)

            def pauses_until_the_deadline() -> bool:
                begin_ns = time.monotonic_ns()
                with suppress(nnfmq.MissedDeadline):
                    burst.execute(*inputs, timeout=0.2)
                until(lambda: not any(page.paused), "the worker does not pause any more")
                return time.monotonic_ns() - begin_ns < 800_000_000  # a pause may take 1 s

            at_least_once(pauses_until_the_deadline, "the worker does not pause beyond the deadline")
        finally:
            page.end(OTHER)
        until(lambda: not page.busy[number], "it is busy no more")


@only_the_compiled_core_pauses
@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_an_execution_of_a_hosted_runtime_counts_with_the_threads_of_its_file(driver: Daemon, tmp_path: Path) -> None:
    path = hosted_file("litert", tmp_path)
    with connect(driver, "batch") as client, opened_page(driver) as page:
        number = page.classes.index(BATCH)
        for threads in (CORES, 1):
            with client.device("litert").prepare(path, runtime_options={"threads": threads}) as model:
                model.execute(*(np.ones(each.shape, each.dtype) for each in model.inputs))
            assert page.uses[number] == threads


def hosted_file(runtime: str, folder: Path) -> Path:
    """Return a model file for a runtime that is installed."""
    if runtime == "litert":
        pytest.importorskip("ai_edge_litert", reason="LiteRT is not installed")
        return Path(nnfmq.example_path("digits.tflite"))
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    onnx = pytest.importorskip("onnx", reason="ONNX is not installed")
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 8]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "relu", value[:1], value[1:])
    path = folder / "relu.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@only_the_compiled_core_pauses
def test_a_batch_client_goes_on_when_the_worker_for_which_it_pauses_is_killed(driver: Daemon) -> None:
    with (
        connect(driver, "batch") as client,
        connect(driver, "interactive") as other,
        opened_burst(client) as execute,
        opened_burst(other) as execute_other,
        Process(other.worker_pid) as worker,
        opened_page(driver) as page,
    ):
        number = page.classes.index(INTERACTIVE)
        calling = InThread.start(lambda: [execute_other() for _ in range(100_000)])
        until(lambda: stopped_while_busy(worker, page, number), "the other worker is stopped while it computes")
        running = InThread.start(lambda: [execute() for _ in range(3)])
        until(lambda: any(page.paused), "the worker of the batch client pauses")
        worker.kill()
        running.wait(5)
        assert isinstance(calling.wait().error, nnfmq.DeadObject)
        until(lambda: not any(page.paused) and not any(page.busy), "nobody pauses or computes")


def stopped_while_busy(worker: Process, page: Page, number: int) -> bool:
    """Stop a worker, and return whether it computed with all cores then; let it run again if not."""
    worker.stop()
    if page.busy[number]:
        page.compute(number, INTERACTIVE, CORES)
        return True
    worker.resume()
    return False


@only_the_compiled_core_pauses
def test_a_killed_batch_client_leaves_no_pause_behind(driver: Daemon) -> None:
    with (
        connect(driver, "batch") as client,
        opened_burst(client) as execute,
        Process(client.worker_pid) as worker,
        opened_page(driver) as page,
    ):
        page.compute(OTHER, INTERACTIVE, CORES)
        try:
            running = InThread.start(execute)
            until(lambda: any(page.paused), "its worker pauses")
            worker.kill()
            assert isinstance(running.wait().error, nnfmq.DeadObject)
            until(lambda: not any(page.paused), "the supervisor clears the entry")
        finally:
            page.end(OTHER)


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, INTERACTIVE), ({"NNFMQ_INTERACTIVE_UIDS": ""}, NORMAL)], ids=["kept", "refused"]
)
def test_a_class_given_at_run_time_outlives_the_worker_and_the_driver(
    environment: dict[str, str], expected: ClientClass, caplog: pytest.LogCaptureFixture
) -> None:
    with short_folder() as folder:
        path = folder / "d.sock"
        arguments = ["-P", "-c", UNPRIVILEGED, path]
        with running_daemon(path, arguments=arguments) as daemon, connect(daemon) as administrator:
            client = daemon.connect(recover=True)
            for given in (BATCH, INTERACTIVE):
                administrator.set_client_class(given, client.worker_pid)
                kill_worker(client)
                assert class_of(client) is given
        with client, running_daemon(path, environment=environment, arguments=arguments):
            assert class_of(client) is expected
            client.close()
    assert ("the class interactive is not kept: " in caplog.text) == (expected is NORMAL)


def test_an_embedded_driver_shows_a_class_that_has_no_effect() -> None:
    with nnfmq.connect(embedded=True, client_class="batch", recover=False) as client:
        assert class_of(client) is BATCH
        client.set_client_class("interactive")
        assert class_of(client) is INTERACTIVE
        with pytest.raises(nnfmq.GeneralFailure, match="no supervisor"):
            client.set_client_class("normal", 1)


def test_the_command_shows_and_changes_classes(driver: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    app = Program.start(["-P", "-c", WAITING, driver.path])
    with app:
        worker = int(app.line())
        to_driver = ["--connect", str(driver.path)]
        assert main(["client", "set", str(app.pid), "--class", "batch", "--json", *to_driver]) == 0
        (changed,) = json.loads(capsys.readouterr().out)["clients"]
        assert (changed["id"], changed["pid"], changed["class"]) == (worker, app.pid, "batch")
        assert main(["client", "list", *to_driver]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(str(worker) in line and "batch" in line for line in lines)
        assert main(["client", "set", "1", "--class", "batch", *to_driver]) == 1
        assert (
            f"has no client 1; allowed are an id or a pid of `nnfmq client list`: {worker}" in capsys.readouterr().err
        )
