"""Compilation caching through driver processes: one saves and another loads; one dies while it saves.

In HIDL calls, files are passed in handles, which may hold several fds or none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.caching import TOKEN, Paths, chain
from support.drivers import LIMIT_S, Daemon, InThread, Process, running_daemon, until
from support.models import pool_bytes, request_for, weighty_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import ExecutionPreference, MeasureTiming, Model, OperationType, Priority
from nnfmq.lab import hidl
from nnfmq.nnapi import CompilationBuilder

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
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.driver.cache import files
from nnfmq.driver.cache.files import CacheContents
from nnfmq.driver.devices.device import DeviceBase


class Saving(DeviceBase):
    name = "mine-saving"
    cache_files_needed = NumberOfCacheFiles(1, 1)

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return FunctionProgram(model, lambda inputs: [inputs[0] + 1])

    def save(self, model, program):
        if type(program) is not FunctionProgram:
            raise TypeError("this is not what `compile` made")
        return files.encode_program(model, ())

    def restore(self, contents):
        model, _ = files.decode_program(contents)
        return model, FunctionProgram(model, lambda inputs: [inputs[0] + 100])
"""


class Half(NamedTuple):
    """A worker that has stopped while it saves a model."""

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
    """Let a client of a stopping daemon save; return when its worker has saved a part and stopped."""
    client = stack.enter_context(daemon.connect())
    worker = stack.enter_context(Process(client.worker_pid))
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


def test_N_CCH_16_a_worker_loads_the_cache_that_another_saved(daemon: Daemon, tmp_path: Path) -> None:
    files = Paths.new(tmp_path)
    with daemon.connect() as first, to_cache(first, files) as model:
        assert model.execute(ONE)[0][0] == 101.0
    with daemon.connect() as second, from_cache(second, files) as model:
        assert model.execute(ONE)[0][0] == 101.0
        with model.burst() as burst:
            assert burst.execute(ONE)[0][0] == 101.0
    with nnfmq.connect(embedded=True) as embedded, from_cache(embedded, files) as model:
        assert model.execute(ONE)[0][0] == 101.0


def test_DEV_6_a_driver_reports_how_many_files_its_devices_need(client: nnfmq.Client) -> None:
    info = client.device("reference").info
    assert (info.model_cache_files, info.data_cache_files) == (1, 1)


def test_N_CCX_1_a_driver_of_another_installation_rejects_the_cache(
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


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_CACHE_12_N_CCH_8_files_that_change_after_they_were_verified_change_no_result(
    client: nnfmq.Client, device: str, tmp_path: Path
) -> None:
    files, model = Paths.new(tmp_path), weighty_model(2.0, 256)
    with ExitStack() as stack:
        fds = files.open(stack)
        client.device(device).prepare(model, token=TOKEN, model_cache=fds[0], data_cache=fds[1]).close()
        prepared = stack.enter_context(client.device(device).prepare_from_cache(TOKEN, *fds, model=model))
        for path in files.all:
            with path.open("r+b") as file:  # the same file, which the driver may still have
                file.write(bytes(path.stat().st_size))
        assert prepared.execute(np.ones((1, 256), np.float32))[0].tolist() == [[512.0] * 256]


def test_CACHE_8_N_CCH_15_a_driver_that_cannot_have_a_key_declares_no_cache_files(folder: Path, tmp_path: Path) -> None:
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


def test_CACHE_11_LIFE_4_the_files_of_a_driver_killed_while_it_saves_are_rejected_and_replaced(
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


def test_CACHE_11_LIFE_4_a_driver_killed_while_it_saves_to_a_folder_causes_no_wrong_preparation(
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


def test_a_client_that_exits_while_its_model_is_saved_affects_no_other_client(
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


def test_DEV_6_CACHE_8_a_plug_in_s_device_saves_and_restores(folder: Path, caches: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    add_plugin(site, "saving_device", SAVING_DEVICE, {"mine-saving": "saving_device:Saving"}, "nnfmq.devices")
    results = []
    for _ in range(2):
        with (
            running_daemon(folder / "d.sock", environment=path_with(site)) as daemon,
            daemon.connect() as client,
            client.device("mine-saving").prepare(ADD, cache_dir=caches) as model,
        ):
            results.append(model.execute(ONE)[0].tolist())
    assert results == [[2.0], [101.0]]  # compiled, then restored


# ------------------------------------------------------------------------------------------------ HIDL's forms

NONE, INVALID, FAILURE = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE
Handles = list[list[int]]


class Forms(NamedTuple):
    """An interface version with its calls: the arguments that precede the handles for saving and loading."""

    interface: str
    save: str
    load: str
    saved: tuple[Any, ...]
    loaded: tuple[Any, ...] = ()


FAST = ExecutionPreference.FAST_SINGLE_ANSWER
OLD = ("prepareModel_1_2", "prepareModelFromCache", (FAST,))
NEW = ("prepareModel_1_3", "prepareModelFromCache_1_3", (FAST, Priority.HIGH, None), (None,))
FORMS = [Forms("HIDL 1.2", *OLD), Forms("HIDL 1.3", *OLD), Forms("HIDL 1.3", *NEW)]


class HidlClient:
    """A client that calls a driver over HIDL: caches in handles, results of callbacks."""

    def __init__(self, forms: Forms, device: hidl.IDevice, files: Paths, stack: ExitStack) -> None:
        self.forms = forms
        self.device = device
        self.model, self.data = ([[fd] for fd in fds] for fds in files.open(stack))
        self.spare = os.memfd_create("spare")
        stack.callback(os.close, self.spare)
        self._stack = stack

    def save(self, model: Handles, data: Handles, token: bytes = TOKEN) -> hidl.IPreparedModel:
        """Prepare a model; this must succeed with any files."""
        status, prepared = self._called(self.forms.save, ADD, *self.forms.saved, model, data, token)
        assert status is NONE
        return prepared

    def load(
        self, model: Handles, data: Handles, token: bytes = TOKEN, before: tuple[Any, ...] | None = None
    ) -> tuple[ErrorStatus, hidl.IPreparedModel | None]:
        """Prepare from the files; return the callback's arguments."""
        before = self.forms.loaded if before is None else before
        return self._called(self.forms.load, *before, model, data, token)

    def _called(self, form: str, *arguments: Any) -> tuple[ErrorStatus, Any]:
        calls: Queue[tuple[ErrorStatus, Any]] = Queue()
        launched = getattr(self.device, form)(*arguments, lambda *given: calls.put(given))
        status, prepared = calls.get(timeout=LIMIT_S)
        assert calls.empty() and launched in (NONE, status)
        assert (prepared is None) == (status is not NONE)
        return status, prepared

    def result(self, prepared: hidl.IPreparedModel | None) -> float:
        """Execute the chain with 1."""
        assert prepared is not None
        pools = [self._stack.enter_context(Memory.create(size)) for size in pool_bytes(ADD)]
        np.frombuffer(pools[0].view, np.float32, 1)[:] = 1
        assert prepared.executeSynchronously(request_for(ADD, pools), MeasureTiming.NO)[0] is NONE
        return float(np.frombuffer(pools[1].view, np.float32, 1)[0])


@pytest.mark.parametrize("token", ["x" * 32, 5, [1]])
def test_a_token_that_is_not_bytes_is_named(token: Any, daemon: Daemon, caches: Path) -> None:
    with nnfmq.connect(daemon.path, timeout=LIMIT_S) as client:
        device, refused = client.device("reference"), pytest.raises(nnfmq.InvalidArgument, match="`token` is 32 bytes")
        with refused:
            device.prepare(ADD, cache_dir=caches, token=token)
        with refused:
            device.prepare_from_cache(token, [], [], model=nnfmq.load(nnfmq.example_path("digits.tflite")))
        with nnfmq.Runtime([daemon.path]) as runtime, refused:
            CompilationBuilder(ADD, [runtime.device("reference")]).set_caching(caches, token)


@pytest.fixture(params=FORMS, ids=lambda forms: f"{forms.load} of {forms.interface}")
def forms(request: pytest.FixtureRequest) -> Forms:
    found: Forms = request.param
    return found


@pytest.fixture
def files(tmp_path: Path) -> Paths:
    return Paths.new(tmp_path)


@pytest.fixture
def hidl_client(forms: Forms, daemon: Daemon, files: Paths) -> Iterator[HidlClient]:
    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface=forms.interface))
        yield HidlClient(forms, hidl.IDevice(client, "reference"), files, stack)


def test_N_CCH_16_DEV_6_DEV_13_caches_are_saved_and_loaded_over_hidl(hidl_client: HidlClient, files: Paths) -> None:
    assert hidl_client.device.getNumberOfCacheFilesNeeded() == (NONE, 1, 1)
    for handle in (*hidl_client.model, *hidl_client.data):
        os.lseek(handle[0], 1234, os.SEEK_SET)
    first = hidl_client.save(hidl_client.model, hidl_client.data)
    assert hidl_client.result(first) == 101.0
    assert all(files.contents())
    for _ in range(2):
        status, again = hidl_client.load(hidl_client.model, hidl_client.data)
        assert status is NONE and hidl_client.result(again) == 101.0


def handles_without_one_fd(hidl_client: HidlClient, kind: str, count: int) -> tuple[Handles, Handles]:
    """Return the handles; that of one kind has `count` fds."""
    right = getattr(hidl_client, kind)
    wrong = [[right[0][0], hidl_client.spare][:count]]
    return (wrong, hidl_client.data) if kind == "model" else (hidl_client.model, wrong)


each_handle = pytest.mark.parametrize(
    ("kind", "count"), [(kind, count) for kind in ("model", "data") for count in (2, 0)]
)


@each_handle
def test_N_CCH_3_CACHE_4_with_a_handle_without_exactly_one_fd_the_model_is_prepared_and_not_saved(
    kind: str, count: int, hidl_client: HidlClient, files: Paths
) -> None:
    prepared = hidl_client.save(*handles_without_one_fd(hidl_client, kind, count))
    assert hidl_client.result(prepared) == 101.0
    assert files.contents() == [b"", b""] and os.fstat(hidl_client.spare).st_size == 0
    assert hidl_client.load(hidl_client.model, hidl_client.data) == (FAILURE, None)


@each_handle
def test_N_CCH_4_loading_from_a_handle_without_exactly_one_fd_is_rejected(
    kind: str, count: int, hidl_client: HidlClient
) -> None:
    hidl_client.save(hidl_client.model, hidl_client.data)
    assert hidl_client.load(*handles_without_one_fd(hidl_client, kind, count)) == (INVALID, None)
    assert hidl_client.load(hidl_client.model, hidl_client.data)[0] is NONE


@pytest.mark.parametrize(("model", "data"), [(2, 1), (0, 1), (1, 2), (1, 0), (0, 0), (33, 1)])
def test_N_CCH_1_N_CCH_2_CACHE_6_with_a_wrong_number_of_handles_nothing_is_saved_or_loaded(
    model: int, data: int, hidl_client: HidlClient, files: Paths
) -> None:
    wrong = hidl_client.model * model, hidl_client.data * data
    assert hidl_client.result(hidl_client.save(*wrong)) == 101.0
    assert files.contents() == [b"", b""]
    hidl_client.save(hidl_client.model, hidl_client.data)
    assert hidl_client.load(*wrong) == (INVALID, None)


@pytest.mark.parametrize(("token", "status"), [(TOKEN[::-1], FAILURE), (TOKEN[1:], INVALID), (bytes(1000), INVALID)])
def test_CACHE_3_N_CCH_14_N_VAL_23_a_model_is_loaded_under_its_own_token(
    token: bytes, status: ErrorStatus, hidl_client: HidlClient, files: Paths
) -> None:
    hidl_client.save([], [], token)
    if status is INVALID:
        hidl_client.save(hidl_client.model, hidl_client.data, token)
        assert files.contents() == [b"", b""]
    hidl_client.save(hidl_client.model, hidl_client.data)
    assert hidl_client.load(hidl_client.model, hidl_client.data, token) == (status, None)


@pytest.mark.parametrize("forms", FORMS[2:], indirect=True, ids=["HIDL 1.3"])
def test_PREP_6_CACHE_8_loading_has_a_deadline_since_1_3(hidl_client: HidlClient) -> None:
    hidl_client.save(hidl_client.model, hidl_client.data)
    late = ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert hidl_client.load(hidl_client.model, hidl_client.data, before=(1,)) == (late, None)
    in_time = (time.monotonic_ns() + int(LIMIT_S * 1e9),)
    assert hidl_client.load(hidl_client.model, hidl_client.data, before=in_time)[0] is NONE


def test_N_CCH_15_a_driver_without_a_key_declares_no_cache_files_over_hidl(
    folder: Path, tmp_path: Path, files: Paths
) -> None:
    (tmp_path / "file").touch()
    state = {"XDG_STATE_HOME": str(tmp_path / "file")}
    with running_daemon(folder / "d.sock", environment=state) as daemon, ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S, interface="HIDL 1.2"))
        hidl_client = HidlClient(FORMS[0], hidl.IDevice(client, "reference"), files, stack)
        assert hidl_client.device.getNumberOfCacheFilesNeeded() == (NONE, 0, 0)
        for caches in ((hidl_client.model, hidl_client.data), ([], [])):
            hidl_client.save(*caches)
            assert hidl_client.load(*caches) == (FAILURE, None)
        assert files.contents() == [b"", b""]


def test_PREP_3_LIFE_4_a_callback_is_called_when_the_driver_is_killed_while_it_saves(
    stopping: Daemon, files: Paths
) -> None:
    calls: Queue[tuple[Any, Any]] = Queue()
    with (
        nnfmq.connect(stopping.path, timeout=LIMIT_S, interface="HIDL 1.3", recover=False) as client,
        Process(client.worker_pid) as worker,
        ExitStack() as stack,
    ):
        device = hidl.IDevice(client, "reference")
        caches = [[[fd] for fd in fds] for fds in files.open(stack)]
        assert device.prepareModel_1_2(ADD, FAST, *caches, TOKEN, lambda *given: calls.put(given)) is NONE
        until(lambda: set(worker.states()) == {"T"}, "the worker has stopped in the middle of saving")
        worker.kill()
        assert calls.get(timeout=LIMIT_S) == (FAILURE, None)
        with pytest.raises(nnfmq.DeadObject):
            device.getStatus()
