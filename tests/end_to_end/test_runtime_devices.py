"""nnfmq.Runtime finds the devices of several driver processes, names them, and connects again to drivers that died."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.absent_packages import WITHOUT_LLVMLITE
from support.drivers import LIMIT_S, Daemon, InThread, Process, one, opened, running_daemon, short_folder, until
from support.forking import fork
from support.models import add_model, null_model

import nnfmq
from nnfmq.base.packages import installed_version
from nnfmq.cli import main
from nnfmq.hal.capabilities import CPU_PERFORMANCE, performance_of
from nnfmq.hal.types import DeviceStatus, DeviceType, OperandType

pytestmark = pytest.mark.usefixtures("runtime_directory")
CPU = "nnapi-reference"


def sockets(folder: Path) -> Path:
    return folder / "nnfmq"


def with_devices(folder: Path, *names: str, exec_time: float = 1.0) -> dict[str, str]:
    """Return the environment of a driver that has reference devices of these names, and hosts no runtime."""
    performance = f"[device.performance]\nall = {{ exec_time = {exec_time}, power_usage = 1.0 }}\n"
    path = folder / f"{'-'.join(names)}-{exec_time}.toml"
    path.write_text("".join(f'[[device]]\nname = "{name}"\n{performance}' for name in names))
    return {"NNFMQ_DEVICES": str(path), "NNFMQ_RUNTIMES": ""}


@pytest.fixture(scope="module")
def _two() -> Iterator[tuple[Daemon, Daemon]]:
    with (
        short_folder() as made,
        running_daemon(made / "gpu.sock", environment=with_devices(made, "a", "c")) as gpu,
        running_daemon(made / "nnfmq.sock", environment=with_devices(made, "a", "b")) as first,
    ):
        yield first, gpu


@pytest.fixture
def two(_two: tuple[Daemon, Daemon], folder: Path) -> tuple[Daemon, Daemon]:
    """Two drivers in the runtime directory: `nnfmq` with the devices a and b, `gpu` with a and c.

    They run for all tests here, which kill at most the processes that serve their clients.
    """
    for driver in _two:
        until(lambda driver=driver: not driver.process.children(), "the clients of the test before are gone")
        (sockets(folder) / driver.path.name).symlink_to(driver.path)
    return _two


def kill_workers(daemon: Daemon) -> None:
    """Kill the processes that serve the clients of a driver."""
    for worker in opened(daemon.process.children()):
        with worker:
            worker.kill()
            worker.wait_for_end()


# ------------------------------------------------------------------------------------------------ discovery


def test_API_1_the_devices_of_all_drivers_have_unique_names_and_the_cpu_is_last(two: tuple[Daemon, Daemon]) -> None:
    with nnfmq.Runtime() as runtime:
        devices = runtime.devices()
        assert [device.name for device in devices] == ["a", "b", "a@gpu", "c", CPU]
        assert [device.driver for device in devices] == ["nnfmq", "nnfmq", "gpu", "gpu", CPU]
        assert [device.is_cpu for device in devices] == [False] * 4 + [True]
        with runtime.device("a@gpu").prepare(null_model()) as model:
            assert (model.device, model.execute(one(3))) == ("a@gpu", (one(3),))


def test_API_1_a_device_describes_itself(two: tuple[Daemon, Daemon]) -> None:
    with two[0].connect() as client, nnfmq.Runtime() as runtime:
        info, device = client.device("b").info, runtime.device("b")
        assert (device.type, device.version_string, device.feature_level) == (DeviceType.CPU, info.version, 8)
        assert device.extensions == info.extensions
        assert not device.supports_extension("com.example.none")
        assert performance_of(device.capabilities, OperandType.TENSOR_FLOAT32) == CPU_PERFORMANCE
        assert device.status() is DeviceStatus.AVAILABLE
        assert device.connected().info == info
        assert "'b' of nnfmq" in repr(device)
        assert repr(runtime) == f"<Runtime: a, b, a@gpu, c, {CPU}>"


def test_API_1_an_unknown_name_is_rejected_with_the_names_that_exist(two: tuple[Daemon, Daemon]) -> None:
    with (
        nnfmq.Runtime() as runtime,
        pytest.raises(nnfmq.InvalidArgument, match=f"'d'; there are: a, b, a@gpu, c, {CPU}"),
    ):
        runtime.device("d")


def test_API_1_a_device_is_awaited_until_its_driver_listens(folder: Path) -> None:
    with nnfmq.Runtime() as runtime:
        with pytest.raises(nnfmq.DeviceUnavailable, match=f"no device 'late' within 0.05 s; there are: {CPU}"):
            runtime.wait_for_device("late", timeout=0.05)
        waiting = InThread.start(lambda: runtime.wait_for_device("late", timeout=LIMIT_S))
        with running_daemon(sockets(folder) / "late.sock", environment=with_devices(folder, "late")):
            device = waiting.wait().value
            assert device.supported_operations(null_model()) == [True]


def test_given_sockets_are_used_instead_of_the_runtime_directory(two: tuple[Daemon, Daemon], folder: Path) -> None:
    (folder / "x").mkdir()
    with (
        running_daemon(folder / "gpu.sock", environment=with_devices(folder, "a")) as other,
        running_daemon(folder / "x" / "gpu.sock", environment=with_devices(folder, "a")) as third,
        nnfmq.Runtime([two[1].path, other.path, two[1].path, third.path]) as runtime,
    ):
        assert [device.name for device in runtime.devices()] == ["a", "c", "a@gpu", "a@gpu.2", CPU]


def test_the_socket_of_the_settings_is_one_of_them(
    two: tuple[Daemon, Daemon], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon(folder / "named.sock", environment=with_devices(folder, "first")) as named:
        monkeypatch.setenv("NNFMQ_SOCKET", str(named.path))
        with nnfmq.Runtime() as runtime:
            assert [device.name for device in runtime.devices()] == ["first", "a", "b", "a@gpu", "c", CPU]


def test_without_drivers_there_is_the_cpu_device_and_no_process() -> None:
    with nnfmq.Runtime() as runtime, Process(os.getpid()) as this:
        before = this.children()
        assert [device.name for device in runtime.devices()] == [CPU]
        assert this.children() == before


def test_an_embedded_driver_has_devices_if_it_is_asked_for() -> None:
    with nnfmq.Runtime(embedded=True) as runtime:
        assert {device.driver for device in runtime.devices()} == {"embedded", CPU}
        with runtime.device("reference").prepare(null_model()) as model:
            assert model.execute(one(1)) == (one(1),)


# ------------------------------------------------------------------------------------------------ bad drivers


@pytest.mark.parametrize("kind", ["stale", "no socket", "garbage", "hangs up", "silent"])
def test_a_driver_that_cannot_be_used_is_left_out_and_logged_once(
    kind: str, two: tuple[Daemon, Daemon], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = sockets(folder) / "bad.sock"
    with ExitStack() as stack:
        if kind == "no socket":
            path.write_text("")
        else:
            stack.enter_context(bad_driver(path, kind))
        with nnfmq.Runtime(timeout=2.0 if kind == "silent" else LIMIT_S) as runtime:
            for _ in range(2):
                assert [device.name for device in runtime.devices()] == ["a", "b", "a@gpu", "c", CPU]
    (record,) = [record for record in caplog.records if record.name == "nnfmq.runtime"]
    assert (record.levelno, str(path) in record.message) == (logging.WARNING, True)


@contextmanager
def bad_driver(path: Path, kind: str) -> Iterator[None]:
    """Bind a socket without a listener, or with one that sends what is no reply, hangs up, or is silent."""
    peers = []

    def serve() -> None:
        with suppress(OSError):  # it is shut down
            while True:
                peer, _ = listener.accept()
                peers.append(peer)
                if kind == "garbage":
                    peer.recv(1 << 16)
                    peer.send(b"\0" * 64)
                if kind == "hangs up":
                    peer.shutdown(socket.SHUT_RDWR)

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    thread = threading.Thread(target=serve)
    if kind != "stale":
        listener.listen()
        thread.start()
    yield
    if kind != "stale":
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for peer in (listener, *peers):
        peer.close()
    path.unlink()


# ------------------------------------------------------------------------------------------------ queries


def test_API_2_the_supported_operations_of_a_list_are_those_of_any_device(folder: Path) -> None:
    listed = folder / "two.toml"
    listed.write_text(
        '[[device]]\nname = "adds"\noperations = ["ADD"]\n[[device]]\nname = "nothing"\noperations = ["MUL"]\n'
    )
    path = sockets(folder) / "d.sock"
    with running_daemon(path, environment={"NNFMQ_DEVICES": str(listed)}), nnfmq.Runtime() as runtime:
        model = add_model()
        assert runtime.supported_operations(model, ["nothing"]) == [False]
        assert runtime.supported_operations(model, ["nothing", runtime.device("adds")]) == [True]
        assert runtime.supported_operations(model, [CPU]) == [True]


def test_API_2_N_API_13_a_device_list_is_not_empty_and_has_no_duplicates(two: tuple[Daemon, Daemon]) -> None:
    with nnfmq.Runtime() as runtime:
        for devices, message in (([], "at least one"), (["a", "b", "a"], "'a' is listed twice"), ("a", "a list")):
            with pytest.raises(nnfmq.InvalidArgument, match=message):
                runtime.supported_operations(null_model(), devices)
            with pytest.raises(nnfmq.InvalidArgument, match=message):
                runtime.prepare(null_model(), devices)


def test_API_15_the_runtime_has_the_feature_level_of_its_newest_interface() -> None:
    with nnfmq.Runtime() as runtime:
        assert runtime.runtime_feature_level == 8


def test_PART_13_the_cpu_device_says_which_kernels_it_has(folder: Path) -> None:
    with nnfmq.Runtime() as runtime:
        cpu = runtime.cpu
        assert (cpu.name, cpu.type, cpu.feature_level, cpu.is_cpu) == (CPU, DeviceType.CPU, 8, True)
        assert performance_of(cpu.capabilities, OperandType.TENSOR_INT32) == CPU_PERFORMANCE
        assert cpu.status() is DeviceStatus.AVAILABLE
        with cpu.prepare(add_model()) as model:
            assert model.device == CPU
            assert model.execute([1] * 4, [2] * 4)[0].tolist() == [3] * 4
        kernels = cpu.connected().info
        assert (kernels.name, kernels.version) == ("compiled", cpu.version_string)
        assert " llvmlite-" in cpu.version_string


def test_PART_13_the_cpu_device_has_every_operation_whichever_devices_are_configured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_DEVICES", with_devices(folder, "other")["NNFMQ_DEVICES"])
    with nnfmq.Runtime() as runtime, runtime.cpu.prepare(null_model()) as model:
        assert model.execute(one(2)) == (one(2),)


def test_PART_13_without_llvmlite_the_cpu_device_has_numpy_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nnfmq.client.partitioned.devices.installed_version",
        lambda package: None if package == "llvmlite" else installed_version(package),
    )
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LLVMLITE)
    inherited = os.environ.get("PYTHONPATH")  # an empty entry would be the working directory
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{inherited}" if inherited else str(tmp_path))
    with nnfmq.Runtime() as runtime, runtime.cpu.prepare(null_model()) as model:
        assert runtime.cpu.version_string.endswith(" NumPy")
        assert runtime.cpu.connected().info.name == "reference"
        assert model.execute(one(2)) == (one(2),)


# ------------------------------------------------------------------------------------------------ commands


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert main(["devices", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


def test_the_command_lists_the_devices_of_all_drivers_and_the_cpu_device(
    two: tuple[Daemon, Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, "--capabilities")
    assert [(device["name"], device["driver"]) for device in found] == [
        ("a", "nnfmq"), ("b", "nnfmq"), ("a@gpu", "gpu"), ("c", "gpu"), (CPU, CPU),
    ]  # fmt: skip
    assert [device["is_cpu"] for device in found] == [False] * 4 + [True]
    assert [device["capabilities"]["INT32"]["exec_time"] for device in found] == [1.0] * 5
    assert [device["name"] for device in listed(capsys, "--connect", str(two[1].path))] == ["a", "c"]
    assert main(["devices"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["device", "driver", "type"] in [line[:3] for line in lines]


def test_without_drivers_the_command_lists_those_of_an_embedded_driver(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert {device["driver"] for device in found} == {"embedded", CPU}
    assert (found[-1]["name"], found[-1]["status"]) == (CPU, "AVAILABLE")


@pytest.mark.parametrize(
    ("device", "shown"), [("sample-minimal,reference", "sample-minimal"), (CPU, CPU), ("compiled", "compiled")]
)
@pytest.mark.parametrize("connect", [None, "embedded", "path"])
def test_run_divides_a_model_among_the_devices_of_a_list(
    device: str, shown: str, connect: str | None, daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "image.npy", np.ones((1, 8, 8, 1), np.float32))
    target = [] if connect is None else ["--connect", str(daemon.path) if connect == "path" else connect]
    words = [str(nnfmq.example_path("digits.tflite")), "--input", str(tmp_path / "image.npy"), "--device", device]
    assert main(["run", *words, *target, "--json"]) == 0
    assert shown in json.loads(capsys.readouterr().out)["device"]


# ------------------------------------------------------------------------------------------------ death


def test_LIFE_6_a_driver_that_died_and_is_back_is_connected_again_at_the_next_use(two: tuple[Daemon, Daemon]) -> None:
    with nnfmq.Runtime() as runtime:
        device = runtime.device("c")
        model = device.prepare(null_model())
        assert device.capabilities == device.capabilities
        kill_workers(two[1])
        with pytest.raises(nnfmq.DeadObject):
            model.execute(one(1))
        with device.prepare(null_model(), timeout=LIMIT_S) as again:
            assert again.execute(one(2)) == (one(2),)
        assert device.supported_operations(null_model()) == [True]
        model.close()


def test_LIFE_6_a_call_that_meets_the_death_of_the_driver_is_repeated_once(two: tuple[Daemon, Daemon]) -> None:
    with nnfmq.Runtime() as runtime:
        device = runtime.device("c")
        calls = []

        def die_once(made: nnfmq.Device) -> str:
            calls.append(made)
            if len(calls) == 1:
                kill_workers(two[1])
            return made.info.name if made.supported_operations(null_model()) else ""

        assert device._access.call("c", die_once) == "c"
        assert len(calls) == 2

        def die_always(made: nnfmq.Device) -> object:
            calls.append(made)
            kill_workers(two[1])
            return made.supported_operations(null_model())

        with pytest.raises(nnfmq.DeadObject):
            device._access.call("c", die_always)
        assert len(calls) == 4


def test_LIFE_6_while_the_driver_is_gone_its_devices_raise_dead_object(folder: Path) -> None:
    path, environment = sockets(folder) / "d.sock", with_devices(folder, "a")
    with running_daemon(path, environment=environment) as daemon, ExitStack() as stack:
        runtime = stack.enter_context(nnfmq.Runtime())
        device = runtime.device("a")
        daemon.end()
        for call in (device.prepare, device.supported_operations):
            with pytest.raises(nnfmq.DeadObject, match="driver d has died and cannot be reached: no driver listens"):
                call(null_model())
        assert device.status() is DeviceStatus.OFFLINE
        assert [found.name for found in runtime.devices()] == ["a", CPU]
        with running_daemon(path, environment=environment):
            assert device.status() is DeviceStatus.AVAILABLE
            assert device.supported_operations(null_model()) == [True]


@pytest.mark.parametrize("change", ["gone", "slower"])
def test_LIFE_6_a_device_that_has_changed_is_invalid_for_ever(change: str, folder: Path) -> None:
    path, environment = sockets(folder) / "d.sock", with_devices(folder, "a", "b")
    changed = with_devices(folder, "b") if change == "gone" else with_devices(folder, "a", "b", exec_time=2.0)
    with nnfmq.Runtime([path]) as runtime:
        with running_daemon(path, environment=environment):
            device = runtime.device("a")
            assert device.capabilities
        for later in (changed, environment):
            with running_daemon(path, environment=later):
                with pytest.raises(nnfmq.DeviceUnavailable, match="'a' of driver d has changed"):
                    device.supported_operations(null_model())
                assert device.status() is DeviceStatus.OFFLINE
                assert runtime.device("b").supported_operations(null_model()) == [True]


def test_LIFE_6_several_threads_connect_once(two: tuple[Daemon, Daemon]) -> None:
    with nnfmq.Runtime() as runtime:
        device = runtime.device("c")
        kill_workers(two[1])
        threads = [InThread.start(lambda: device.supported_operations(null_model())) for _ in range(4)]
        assert [thread.wait().value for thread in threads] == [[True]] * 4
        until(lambda: len(two[1].process.children()) == 1, "one worker serves the runtime")


# ------------------------------------------------------------------------------------------------ end


def test_a_closed_runtime_rejects_every_call_and_its_models_are_closed(two: tuple[Daemon, Daemon]) -> None:
    runtime = nnfmq.Runtime()
    device = runtime.device("a")
    model = device.prepare(null_model())
    runtime.close()
    runtime.close()
    for call in (runtime.devices, lambda: runtime.prepare(null_model()), lambda: device.prepare(null_model())):
        with pytest.raises(nnfmq.BadState, match="this runtime is closed"):
            call()
    with pytest.raises(nnfmq.BadState, match="this client is closed"):
        model.execute(one(1))
    assert repr(runtime).endswith("closed>")


def test_a_runtime_that_is_closed_while_it_looks_for_drivers_keeps_none(
    two: tuple[Daemon, Daemon], folder: Path
) -> None:
    path = folder / "silent.sock"
    with bad_driver(path, "silent"):
        runtime = nnfmq.Runtime([two[0].path, path], timeout=LIMIT_S)
        looking = InThread.start(runtime.devices)
        until(lambda: len(two[0].process.children()) == 1, "the driver serves the runtime")
        runtime.close()
    assert isinstance(looking.wait().error, nnfmq.InvalidArgument)
    until(lambda: not two[0].process.children(), "nobody is served")


def test_a_forked_child_cannot_use_the_runtime_of_its_parent(two: tuple[Daemon, Daemon]) -> None:
    with nnfmq.Runtime() as runtime:
        device = runtime.device("a")

        pid = fork()
        if not pid:
            try:
                device.prepare(null_model())
            except nnfmq.InvalidArgument as error:
                os._exit(0 if "which forked; make a new one" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert device.supported_operations(null_model()) == [True]
