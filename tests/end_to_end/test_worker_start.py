"""How a driver starts workers: by fork, as copies of the supervisor, or by exec, with address layouts of their own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, Process, app, kill_worker, one, running_daemon, short_folder, until
from support.models import null_model, weighty_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.base import settings
from nnfmq.hal.types import ExecutionPreference

EXEC = ["--worker-start", "exec"]
SIDE = 256
PLACES = ("libc.so.6", "[heap]", "[stack]", "[vdso]")
_DEVICE = f"""
import json
import os
import pathlib

from nnfmq.driver.devices.device import DeviceBase
from nnfmq.hal.errors import GeneralFailure


class Telling(DeviceBase):
    name = "test-telling"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        os.write(2, b"a text of a library\\n")
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        raise GeneralFailure("maps: " + json.dumps([line for line in lines if line.endswith({PLACES})]))
"""
NO_INTERPRETER = """
import pathlib, sys
from nnfmq.base import logs
from nnfmq.driver.process import supervisor
logs.configure()
sys.executable = "/nonexistent/python"
ready = lambda path: print(f"nnfmq: listening on {path}", flush=True)
supervisor.serve(pathlib.Path(sys.argv[1]), worker_start="exec", ready=ready)
"""


def layout(lines: list[str]) -> dict[str, int]:
    """Return the first address of each of PLACES, but the end of the stack, which grows downwards."""
    found: dict[str, int] = {}
    for line in lines:
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        for place in PLACES:
            if line.endswith(place):
                found.setdefault(place, end if place == "[stack]" else begin)
    assert set(found) == set(PLACES)
    return found


def layout_of_worker(client: nnfmq.Client) -> dict[str, int]:
    """Return what a device in the worker of a client finds there."""
    with pytest.raises(nnfmq.GeneralFailure) as error:
        client.device("test-telling").prepare(null_model())
    found = re.search(r"maps: (\[.*\])", str(error.value))
    assert found is not None, error.value
    return layout(json.loads(found[1]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    add_plugin(made, "nnfmq_telling", _DEVICE, {"telling": "nnfmq_telling:Telling"}, "nnfmq.devices")
    return made


@pytest.fixture(scope="module")
def executing(site: Path) -> Iterator[Daemon]:
    with short_folder() as folder:
        environment = {**path_with(site), "XDG_CACHE_HOME": str(folder), "NNFMQ_LOG_FORMAT": "text"}
        with running_daemon(folder / "d.sock", options=EXEC, environment=environment) as daemon:
            yield daemon


def executes(client: nnfmq.Client, value: float) -> bool:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        return burst.execute(one(value)) == (one(value),) == model.execute(one(value))


@pytest.mark.skipif(
    Path("/proc/sys/kernel/randomize_va_space").read_text().strip() == "0", reason="the kernel places nothing at random"
)
def test_an_executed_worker_has_an_address_layout_of_its_own_and_a_forked_one_the_supervisor_s(
    executing: Daemon, site: Path, folder: Path
) -> None:
    with executing.connect() as one_client, executing.connect() as another:
        layouts = [layout_of_worker(one_client), layout_of_worker(another)]
    layouts.append(layout(Path(f"/proc/{executing.program.pid}/maps").read_text().splitlines()))
    for place in PLACES:
        assert len({each[place] for each in layouts}) == len(layouts), place
    options = ["--worker-start", "fork"]
    with running_daemon(folder / "d.sock", options=options, environment=path_with(site)) as forking:
        of_supervisor = layout(Path(f"/proc/{forking.program.pid}/maps").read_text().splitlines())
        with forking.connect() as client:
            assert layout_of_worker(client) == of_supervisor


def test_clients_of_executed_workers_execute_and_share_what_one_has_compiled(executing: Daemon) -> None:
    with executing.connect() as first, executing.connect() as second:
        with prepared(first) as one_model:
            until(lambda: first.statistics().cache.programs == 1, "its program is shared")
            hits = first.statistics().cache.hits
            with prepared(second) as other_model:
                for model in (one_model, other_model):
                    assert model.execute(np.ones((1, SIDE), np.float32))[0].tolist() == [[SIDE] * SIDE]
                statistics = first.statistics()
        assert statistics.cache.hits > hits
        assert {(client.worker_pid, client.executions) for client in statistics.clients} == {
            (first.worker_pid, 1), (second.worker_pid, 1)
        }  # fmt: skip


def prepared(client: nnfmq.Client) -> nnfmq.PreparedModel:
    preference = ExecutionPreference.FAST_SINGLE_ANSWER
    return client.device("compiled").prepare(weighty_model(1.0, SIDE), preference=preference)


def test_an_executed_worker_is_named_and_what_it_writes_is_logged_with_its_client(executing: Daemon) -> None:
    with executing.connect() as client:
        pid = client.worker_pid
        assert Path(f"/proc/{pid}/comm").read_text() == "nnfmq-worker\n"
        layout_of_worker(client)
        line = rf"WARNING nnfmq.stderr\[{executing.program.pid}\]: a worker wrote to stderr: a text of a library "
        line += rf"client={os.getpid()} .*worker={pid}"
        until(lambda: re.search(line, executing.program.errors()) is not None, "the text is logged")


@pytest.fixture
def own(folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder / "d.sock", options=EXEC) as daemon:
        yield daemon


def test_the_death_of_either_side_of_an_executed_worker_leaves_nothing(own: Daemon) -> None:
    held = own.process.descriptors()
    with own.connect() as neighbour:
        with own.connect() as unlucky:
            kill_worker(unlucky)
            with pytest.raises(nnfmq.DeadObject):
                unlucky.devices()
        with app("waits", own.path, "nothing") as program, Process(int(program.line())) as worker:
            program.popen.kill()
            worker.wait_for_end()
        with app("waits", own.path, "burst") as program, Process(int(program.line())) as worker:
            with worker.stopped():
                program.tell()
                assert program.line() == "waiting"
                program.popen.kill()
                program.wait()
            worker.wait_for_end()
        assert executes(neighbour, 5)
    until(lambda: not own.process.descendants(), "all workers have exited")
    until(lambda: own.process.descriptors() == held, f"the supervisor has what it had before: {held}")


def test_executed_workers_outlive_a_killed_supervisor_and_end_with_their_clients(folder: Path) -> None:
    with Daemon.start(folder / "d.sock", options=EXEC) as daemon, daemon.connect() as client:
        assert executes(client, 1)
        with Process(client.worker_pid) as worker:
            daemon.kill()
            assert executes(client, 2)
            with running_daemon(folder / "d.sock", options=EXEC) as successor, successor.connect() as other:
                assert executes(other, 3) and executes(client, 4)
            client.close()
            worker.wait_for_end()


def test_SIGTERM_ends_a_driver_and_its_executed_workers(folder: Path) -> None:
    with running_daemon(folder / "d.sock", options=EXEC) as daemon, daemon.connect() as client:
        assert executes(client, 1)
        daemon.end()
        with pytest.raises(nnfmq.NnfmqError):
            client.devices()


def test_an_executed_worker_has_the_settings_that_its_driver_has_read(folder: Path) -> None:
    """Not those of the file as it is when the worker starts: the driver was not told to read it again."""
    path = folder / "nnfmq.toml"
    path.write_text('client_models = 1\nworker_start = "exec"')
    with running_daemon(folder / "d.sock", environment={settings.CONFIG_VARIABLE: str(path)}) as daemon:
        path.write_text("an error")
        with daemon.connect() as client:
            device = client.device("reference")
            with device.prepare(null_model()), pytest.raises(nnfmq.ResourceExhausted, match="NNFMQ_CLIENT_MODELS"):
                device.prepare(null_model())


def test_a_client_whose_worker_cannot_be_executed_is_told_why(folder: Path) -> None:
    arguments = ["-P", "-c", NO_INTERPRETER, folder / "d.sock"]
    text = rf"uid {os.getuid()} cannot execute /nonexistent/python: No such file or directory"
    with running_daemon(folder / "d.sock", arguments=arguments) as daemon:
        with pytest.raises(nnfmq.GeneralFailure, match=text):
            daemon.connect()
        until(lambda: re.search(text, daemon.program.errors()) is not None, "it is logged")
        until(lambda: not daemon.process.descendants(), "nothing is left of it")
