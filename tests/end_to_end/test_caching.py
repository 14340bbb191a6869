"""Compilation caching through real drivers: one saves and another loads; one dies in the middle of saving."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.caching import TOKEN, Paths, chain
from support.drivers import Daemon, InThread, Process, running_daemon, until
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.hal.types import Model, OperationType

ADD = chain(OperationType.ADD)
ONE = np.ones(1, np.float32)
STOPPING = """
import os, signal, threading
write = os.pwrite
def pwrite(fd, data, offset):
    os.pwrite = write  # the rest, where it goes on
    count = write(fd, data[:1], offset)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # by this thread: another would be stopped later
    return count
os.pwrite = pwrite
"""

SAVING_DEVICE = """
from nnfmq.engines.function import FunctionProgram
from nnfmq.hal.device import NumberOfCacheFiles
from nnfmq.service import interpreter_cache
from nnfmq.service.compilation_cache import CacheContents
from nnfmq.service.device import Device


class Saving(Device):
    name = "saving"
    cache_files_needed = NumberOfCacheFiles(1, 1)

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return FunctionProgram(model, lambda inputs: [inputs[0] + 1])

    def save(self, model, program):
        if type(program) is not FunctionProgram:
            raise TypeError("this is not what `compile` made")
        return interpreter_cache.save(model, ())

    def restore(self, contents):
        model, _ = interpreter_cache.restore(contents)
        return model, FunctionProgram(model, lambda inputs: [inputs[0] + 100])
"""


class Half(NamedTuple):
    """A saving that has stopped half-way."""

    client: nnfmq.Client
    worker: Process
    call: InThread


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    made = tmp_path / "caches"
    made.mkdir()
    return made


@pytest.fixture
def stopping(folder: Path, tmp_path: Path) -> Iterator[Daemon]:
    """Return a daemon whose workers stop, as by SIGSTOP, when they have saved the first byte of a file."""
    (tmp_path / "sitecustomize.py").write_text(STOPPING)
    environment = {"PYTHONPATH": str(tmp_path)}
    with running_daemon(folder / "stopping.sock", environment=environment) as daemon:
        yield daemon


def saving_half(daemon: Daemon, save: Callable[[nnfmq.Client], nnfmq.PreparedModel], stack: ExitStack) -> Half:
    """Let a client of a stopping daemon save, and return when its worker has saved a part and stands."""
    client = stack.enter_context(daemon.connect())
    worker = stack.enter_context(Process(client.driver_pid))
    call = InThread.start(lambda: save(client))
    until(lambda: set(worker.states()) == {"T"}, "the worker has stopped in the middle of saving")
    return Half(client, worker, call)


def from_cache(client: nnfmq.Client, files: Paths) -> nnfmq.PreparedModel:
    with ExitStack() as stack:
        return client.device("reference").prepare_from_cache(TOKEN, *files.open(stack), model=ADD)


def to_cache(client: nnfmq.Client, files: Paths, model: Model = ADD) -> nnfmq.PreparedModel:
    with ExitStack() as stack:
        model_cache, data_cache = files.open(stack)
        device = client.device("reference")
        return device.prepare(model, token=TOKEN, model_cache=model_cache, data_cache=data_cache)


def test_N_CCH_16_what_one_worker_saved_another_loads(daemon: Daemon, tmp_path: Path) -> None:
    files = Paths.new(tmp_path)
    with daemon.connect() as first, to_cache(first, files) as model:
        assert model.execute(ONE)[0][0] == 101.0
    with daemon.connect() as second, from_cache(second, files) as model:
        assert model.execute(ONE)[0][0] == 101.0
        with model.burst() as burst:
            assert burst.execute(ONE)[0][0] == 101.0
    with nnfmq.connect(embedded=True) as embedded, from_cache(embedded, files) as model:
        assert model.execute(ONE)[0][0] == 101.0


def test_DEV_6_a_driver_says_how_many_files_its_devices_need(client: nnfmq.Client) -> None:
    info = client.device("reference").info
    assert (info.model_cache_files, info.data_cache_files) == (1, 1)


def test_N_CCX_1_a_driver_of_another_installation_refuses_the_cache(
    daemon: Daemon, folder: Path, tmp_path: Path
) -> None:
    files = Paths.new(tmp_path)
    with daemon.connect() as client:
        to_cache(client, files).close()
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with running_daemon(folder / "other.sock", environment=state) as other, other.connect() as client:
        with pytest.raises(nnfmq.GeneralFailure):
            from_cache(client, files)
        to_cache(client, files).close()
        from_cache(client, files).close()
    with daemon.connect() as client, pytest.raises(nnfmq.GeneralFailure):
        from_cache(client, files)


def test_N_CCH_15_a_driver_that_can_have_no_key_announces_no_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = {"XDG_STATE_HOME": str(tmp_path / "file")}
    files = Paths.new(tmp_path)
    with running_daemon(folder / "d.sock", environment=state) as daemon, daemon.connect() as client:
        info = client.device("reference").info
        assert (info.model_cache_files, info.data_cache_files) == (0, 0)
        with to_cache(client, files) as model:
            assert model.execute(ONE)[0][0] == 101.0
        assert files.contents() == [b"", b""]
        with pytest.raises(nnfmq.GeneralFailure):
            from_cache(client, files)


def test_CACHE_11_LIFE_4_a_driver_killed_while_it_saves_leaves_what_is_refused_and_made_afresh(
    stopping: Daemon, daemon: Daemon, tmp_path: Path
) -> None:
    files = Paths.new(tmp_path)
    with ExitStack() as stack:
        half = saving_half(stopping, lambda client: to_cache(client, files), stack)
        half.worker.kill()
        assert isinstance(half.call.wait().error, nnfmq.DeadObject)
    assert [len(content) for content in files.contents()] == [0, 1]  # the model's file comes last
    with daemon.connect() as client:
        with pytest.raises(nnfmq.GeneralFailure):
            from_cache(client, files)
        to_cache(client, files).close()
        with from_cache(client, files) as model:
            assert model.execute(ONE)[0][0] == 101.0


def test_CACHE_11_LIFE_4_a_driver_killed_while_it_saves_to_a_folder_is_no_reason_to_prepare_wrongly(
    stopping: Daemon, daemon: Daemon, caches: Path
) -> None:
    def prepare(client: nnfmq.Client) -> nnfmq.PreparedModel:
        return client.device("reference").prepare(ADD, cache_dir=caches)

    with ExitStack() as stack:
        half = saving_half(stopping, prepare, stack)
        sizes = {path: path.stat().st_size for path in caches.iterdir()}
        assert sorted(sizes.values()) == [0, 1]
        half.worker.kill()
        assert isinstance(half.call.wait().error, nnfmq.DeadObject)
    assert not os.listdir(caches)  # the client lives, and has removed them
    for path, size in sizes.items():
        path.write_bytes(b"n" * size)  # as if it had died as well
    with daemon.connect() as client:
        for _ in range(2):
            with prepare(client) as model:
                assert model.execute(ONE)[0][0] == 101.0
    assert all(path.stat().st_size > 64 for path in sizes)


def test_a_client_that_is_gone_while_its_model_is_saved_is_nobody_else_s_trouble(
    stopping: Daemon, daemon: Daemon, tmp_path: Path
) -> None:
    files = Paths.new(tmp_path)
    with ExitStack() as stack:
        half = saving_half(stopping, lambda client: to_cache(client, files), stack)
        half.client.close()
        assert isinstance(half.call.wait().error, nnfmq.DeadObject)
        half.worker.resume()
        half.worker.wait_for_end()
    with daemon.connect() as client:
        to_cache(client, files).close()
        from_cache(client, files).close()


def test_DEV_6_CACHE_8_the_device_of_a_plug_in_saves_and_restores(folder: Path, caches: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    add_plugin(site, "saving_device", SAVING_DEVICE, {"saving": "saving_device:Saving"}, "nnfmq.devices")
    results = []
    for _ in range(2):
        with (
            running_daemon(folder / "d.sock", environment=path_with(site)) as daemon,
            daemon.connect() as client,
            client.device("saving").prepare(ADD, cache_dir=caches) as model,
        ):
            results.append(model.execute(ONE)[0].tolist())
    assert results == [[2.0], [101.0]]  # compiled, then restored
