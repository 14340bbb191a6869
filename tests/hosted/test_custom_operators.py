"""Libraries of custom operators: the driver loads those that it trusts, and a crash in one costs its worker alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.custom_operators import (
    Fault,
    build_extension,
    build_library,
    custom_model,
    custom_openvino_model,
    digest,
)
from support.drivers import LIMIT_S, Daemon, Process, running_daemon, short_folder
from support.faulty_runtime import executing_neighbour, four
from support.model_folders import RepositoryPeer, add_version

import nnfmq
import nnfmq.compat.onnxruntime as ort
from nnfmq.base import settings
from nnfmq.driver.execution.watchdog import GRACE_S
from nnfmq.hal.hosted import LIBRARIES
from nnfmq.lab.replay import ReplayOptions, ReplaySpeed, replay
from nnfmq.recording.reader import RecordingFile
from nnfmq.recording.writer import ExecutionRecorder

pytest.importorskip("onnxruntime")

CLIENT_MIB = 256
SOON_S = 0.1


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    return build_library(folder / "faults.so")


class Custom(NamedTuple):
    """A runtime that takes custom operators: its device, a model with one, and the library."""

    device: str
    file: bytes
    library: Path

    def prepare(self, client: nnfmq.Client) -> nnfmq.PreparedModel:
        options = {LIBRARIES: [str(self.library)], "threads": 1}
        return client.device(self.device).prepare(self.file, runtime_options=options)


@pytest.fixture(scope="module")
def customs(folder: Path, library: Path) -> dict[str, Custom]:
    found = {"onnxruntime": Custom("onnxruntime", custom_model(), library)}
    if find_spec("openvino") is not None:
        extension = build_extension(folder / "extension.so")
        found["openvino"] = Custom("openvino", custom_openvino_model(), extension)
    return found


@pytest.fixture(params=["onnxruntime", "openvino"])
def custom(request: pytest.FixtureRequest, customs: dict[str, Custom]) -> Custom:
    if request.param not in customs:
        pytest.skip(f"{request.param} is not installed")
    return customs[request.param]


@pytest.fixture(scope="module")
def driver(folder: Path, library: Path, customs: dict[str, Custom]) -> Iterator[Daemon]:
    """Return a driver that trusts the libraries, and serves a model with one by the name "custom"."""
    environment = {
        settings.TRUSTED_FILES.variable: ",".join(digest(custom.library) for custom in customs.values()),
        settings.CLIENT_MEMORY_MIB.variable: str(CLIENT_MIB),
    }
    options, others = f'runtime_options = {{ {LIBRARIES} = ["faults.so"] }}', {"faults.so": library.read_bytes()}
    add_version(folder / "models", "custom", 1, custom_model(), options=options, file="model.onnx", others=others)
    with running_daemon(folder / "d.sock", environment=environment, models=folder / "models") as daemon:
        yield daemon


@pytest.fixture
def client(driver: Daemon) -> Iterator[nnfmq.Client]:
    with driver.connect() as made:
        yield made


def prepared(client: nnfmq.Client, *libraries: Path, **options: Any) -> nnfmq.PreparedModel:
    found = {LIBRARIES: list(map(str, libraries)), "threads": 1}
    return client.device("onnxruntime").prepare(custom_model(), runtime_options=found, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Which libraries are loaded.


def test_a_library_that_the_driver_does_not_trust_is_refused_by_its_digest_and_not_loaded(
    client: nnfmq.Client, library: Path, tmp_path: Path
) -> None:
    hostile = build_library(tmp_path / library.name, writes=tmp_path / "written")
    with pytest.raises(nnfmq.InvalidArgument, match=rf"NNFMQ_TRUSTED_FILES\) has its SHA-256: {digest(hostile)}"):
        prepared(client, hostile)
    assert not (tmp_path / "written").exists()
    with prepared(client, library) as model:  # of the same name
        assert (model.execute(four(1))[0] == 2).all()


def test_a_trusted_library_with_another_one_beside_it_is_refused(
    client: nnfmq.Client, library: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(library.read_bytes() + b"\0")
    with pytest.raises(nnfmq.InvalidArgument, match=r"library 'other\.so'"):
        prepared(client, library, other)


@pytest.mark.parametrize(
    ("device", "value", "message"),
    [
        ("onnxruntime", "faults.so", f"{LIBRARIES} is a list of files, not 'faults.so'"),
        ("onnxruntime", [1], f"{LIBRARIES} is a list of files"),
        ("litert", ["faults.so"], f"runtime option '{LIBRARIES}': allowed are threads, "),
    ],
)
def test_an_option_that_names_no_library_of_the_runtime_is_refused(
    client: nnfmq.Client, library: Path, monkeypatch: pytest.MonkeyPatch, device: str, value: object, message: str
) -> None:
    monkeypatch.chdir(library.parent)
    file = nnfmq.example_path("digits.tflite") if device == "litert" else custom_model()
    with pytest.raises(nnfmq.InvalidArgument, match=message):
        client.device(device).prepare(file, runtime_options={LIBRARIES: value})


def test_a_library_that_is_not_there_is_an_error_of_the_file_system(client: nnfmq.Client, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.so"):
        prepared(client, tmp_path / "none.so")


# ----------------------------------------------------------------------------------------------------------------------
# What carries libraries with their model.


def test_caches_have_the_library_which_another_driver_loads_only_if_it_trusts_it(
    client: nnfmq.Client, library: Path, shared_daemon: Daemon
) -> None:
    token = bytes(range(32))
    with (
        tempfile.TemporaryFile() as model_file,
        tempfile.TemporaryFile() as data_file,
        shared_daemon.connect() as other,
    ):
        files = [model_file.fileno()], [data_file.fileno()]
        with prepared(client, library, token=token, model_cache=files[0], data_cache=files[1]) as kept:
            device = client.device("onnxruntime")
            with device.prepare_from_cache(token, *files, model=kept) as model:
                assert (model.execute(four(1))[0] == 2).all()
            with pytest.raises(nnfmq.NnfmqError, match=digest(library)):
                other.device("onnxruntime").prepare_from_cache(token, *files, model=kept)


def test_a_recording_has_the_library_and_is_replayed_without_its_file(
    client: nnfmq.Client, library: Path, tmp_path: Path
) -> None:
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    with ExecutionRecorder.start(tmp_path / "a.nnrec"), prepared(client, copy) as model, model.burst() as burst:
        burst.execute(four(1))
    copy.unlink()
    with RecordingFile(tmp_path / "a.nnrec") as recording:
        done = replay(client, recording, ReplayOptions(ReplaySpeed("max"))).executions
    assert [execution.is_equal for execution in done] == [True]


def test_a_model_by_name_has_the_libraries_of_its_folder(driver: Daemon, client: nnfmq.Client) -> None:
    with RepositoryPeer(driver.path) as peer:
        peer.wait_for("custom", version=1, device="onnxruntime")
    with client.model("custom", timeout=LIMIT_S) as model, model.burst() as burst:
        assert (burst.execute(four(1))[0] == 2).all()


def test_a_session_of_ONNX_Runtime_s_interface_registers_a_library(
    driver: Daemon, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(driver.path))
    options = ort.SessionOptions()
    with pytest.raises(ort.onnxruntime_pybind11_state.Fail, match=r"Failed to load library /none\.so"):
        options.register_custom_ops_library("/none.so")
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(custom_model(), options)
    assert (session.run(None, {"x": four(1)})[0] == 2).all()
    with pytest.raises(Exception, match="as the test wants"):
        session.run(None, {"x": four(Fault.STATUS)})


# ----------------------------------------------------------------------------------------------------------------------
# Operators that fail in an execution.


@pytest.fixture
def neighbour(driver: Daemon, custom: Custom) -> Iterator[None]:
    with executing_neighbour(driver, custom.prepare):
        yield


FAULTS = {
    Fault.ABORT: (nnfmq.DeadObject, None),
    Fault.NULL_POINTER: (nnfmq.DeadObject, None),
    Fault.UNCHECKED_10_GIB: (nnfmq.DeadObject, None),
    Fault.CHECKED_10_GIB: (nnfmq.ResourceExhausted, "failed to allocate memory"),
    Fault.STATUS: (nnfmq.GeneralFailure, "as the test wants"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_an_operator_that_fails_costs_its_worker_at_most(
    client: nnfmq.Client, custom: Custom, neighbour: None, fault: Fault
) -> None:
    error, text = FAULTS[fault]
    with Process(client.worker_pid) as worker:
        model = custom.prepare(client)
        with model.burst() as burst:
            assert (burst.execute(four(1))[0] == 2).all()
            begin_s = time.monotonic()
            with pytest.raises(error, match=text):
                burst.execute(four(fault))
            print(f"{error.__name__} after {time.monotonic() - begin_s:.3f} s")
            if error is not nnfmq.DeadObject:
                assert (burst.execute(four(1))[0] == 2).all()
        if error is nnfmq.DeadObject:
            worker.wait_for_end()


def test_an_operator_that_does_not_end_is_a_missed_deadline_and_ends_with_its_worker(
    client: nnfmq.Client, custom: Custom, neighbour: None
) -> None:
    model, other = custom.prepare(client), custom.prepare(client)
    with Process(client.worker_pid) as worker, model.burst() as burst:
        begin_s = time.monotonic()
        with pytest.raises(nnfmq.MissedDeadline):
            burst.execute(four(Fault.ENDLESS), timeout=SOON_S)
        assert time.monotonic() - begin_s < GRACE_S
        worker.wait_for_end()
        assert time.monotonic() - begin_s > SOON_S + GRACE_S
    with pytest.raises(nnfmq.DeadObject):
        other.execute(four(1))


def test_a_client_that_recovers_goes_on_with_the_library_in_another_worker(
    driver: Daemon, custom: Custom, neighbour: None
) -> None:
    with (
        driver.connect(recover=True) as client,
        custom.prepare(client) as model,
        model.burst() as burst,
    ):
        with pytest.raises(nnfmq.DeadObject):
            burst.execute(four(Fault.ABORT))
        assert (burst.execute(four(1), timeout=LIMIT_S)[0] == 2).all()
