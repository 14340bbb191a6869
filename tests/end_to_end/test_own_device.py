"""The device that the documents show: installed beside a driver, and tested by `nnfmq conformance`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.caching import Paths
from support.drivers import LIMIT_S, Daemon, one, running_daemon, short_folder, until
from support.models import add_model, null_model, relu_model
from support.places import ROOT, data_path
from support.plugins import add_example, add_plugin, path_with

import nnfmq
from nnfmq.hal.types import DeviceStatus, ExecutionPreference

DATA = data_path()
EXAMPLE = ROOT / "docs" / "examples" / "driver"
DOCUMENT = (ROOT / "docs" / "how-to" / "devices.md").read_text()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    add_example(site, EXAMPLE)
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


def test_the_document_contains_the_package_s_file() -> None:
    assert (EXAMPLE / "nnfmq_mine.py").read_text().rstrip() in DOCUMENT


def test_the_documented_device_has_about_forty_lines() -> None:
    assert len((EXAMPLE / "nnfmq_mine.py").read_text().splitlines()) <= 44


def test_a_device_is_told_the_client_s_preference(tmp_path: Path) -> None:
    device = """
from nnfmq.driver.compilation.jobs import current_prepare_context
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.engines.function import FunctionProgram


class Obliging(DeviceBase):
    name = "test-obliging"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        preference = current_prepare_context().preference
        return FunctionProgram(model, lambda inputs: [inputs[0] * 0 + preference.value])
"""
    add_plugin(tmp_path, "nnfmq_obliging", device, {"obliging": "nnfmq_obliging:Obliging"}, "nnfmq.devices")
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock", environment=path_with(tmp_path)) as daemon,
        daemon.connect() as client,
    ):
        for preference in ExecutionPreference:
            with client.device("test-obliging").prepare(null_model(), preference=preference) as model:
                assert model.execute(one(7)) == (one(preference),)


def test_the_documented_device_computes_on_both_paths(driver: Daemon) -> None:
    with (
        driver.connect() as client,
        client.device("mine").prepare(add_model()) as model,
        model.burst() as burst,
    ):
        numbers = [[1, 2, 3, 4], [10, 20, 30, 40]]
        for execute in (model.execute, burst.execute):
            assert execute(*numbers)[0].tolist() == [11, 22, 33, 44]


def test_a_model_with_unsupported_operations_is_rejected_and_the_device_continues(driver: Daemon) -> None:
    with driver.connect() as client:
        device = client.device("mine")
        assert device.supported_operations(relu_model()) == [True]
        with pytest.raises(nnfmq.GeneralFailure, match="'mine' does not support operation 0"):
            device.prepare(null_model(), timeout=LIMIT_S)
        with device.prepare(relu_model((1,))) as model:
            assert model.execute(-one(3))[0].tolist() == [0]


@pytest.mark.skipif(not (DATA / "vts").is_dir(), reason="no test models in $NNFMQ_DATA")
def test_TST_1_conformance_passes_for_the_supported_operations(driver: Daemon, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "nnfmq", "conformance", str(DATA / "vts" / "V1_0")]
    options = ["--device", "mine", "--connect", str(driver.path), "--path", "burst", "--jobs", "1"]
    options += ["--filter", "^(add|relu)"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["model"])
    total, passed, failed, skipped = map(int, row[1:])
    assert passed >= 2 and failed == 0 and passed + skipped == total


def test_workers_have_the_devices_that_were_configured_when_their_driver_started(tmp_path: Path) -> None:
    listed = tmp_path / "devices.toml"
    listed.write_text('[[device]]\nname = "test-first"\n')
    variables = {"NNFMQ_DEVICES": str(listed), "NNFMQ_RUNTIMES": ""}
    with short_folder() as made, running_daemon(made / "d.sock", environment=variables) as daemon:
        listed.write_text('[[device]]\nname = "test-second"\n')
        with daemon.connect() as client:
            assert [device.name for device in client.devices()] == ["test-first"]


SAVING = """
from nnfmq.engines import interpreter
from nnfmq.engines.program import Program
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.serialize.models import decode_model, encode_model
from nnfmq.driver.cache.files import CacheContents
from nnfmq.driver.devices.device import DeviceBase


class Saving(DeviceBase):
    name = "test-saving"
    cache_files_needed = NumberOfCacheFiles(2, 0)

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return interpreter.prepare(model)

    def save(self, model, program):
        assert isinstance(program, Program)
        return CacheContents(model=(encode_model(model)[0], b"second"))

    def restore(self, contents):
        first, second = contents.model
        assert bytes(second) == b"second"
        model = decode_model(first, [])
        return model, self.compile(model)


class Baseline(DeviceBase):
    name = "test-baseline"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return interpreter.prepare(model)

    def load_cached(self, model):
        return self.compile(model) if model.relax_computation_float32_to_float16 else None

    def compile_baseline(self, model):
        if len(model.main.operations) > 1:
            raise KeyError("no baseline")
        return self.compile(model)


class Unplugged(Baseline):
    name = "test-unplugged"
    unavailable_reason = "the accelerator is not plugged in"


class Misnamed(Saving):
    name = "test-saving-twice"


class Hoarding(Saving):
    name = "test-hoarding"
    cache_files_needed = NumberOfCacheFiles(2, 33)


class Versionless(Saving):
    name = "test-versionless"
    version_string = ""


class Needy(Saving):
    name = "test-needy"
    sandbox_needs = ("/dev/accelerator",)


class Unrelated:
    name = "test-unrelated"
"""
LEFT_OUT = {
    "Misnamed": "",
    "Hoarding": "",
    "Versionless": "a version string must not be empty",
    "Needy": "sandbox_needs is ('/dev/accelerator',), not a SandboxNeeds",
    "Unrelated": "a plug-in names a subclass of nnfmq.driver.devices.device.DeviceBase, not <class ",
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a driver with eight plug-ins, of which three have a valid description."""
    site = tmp_path_factory.mktemp("site")
    kinds = {name.lower(): f"several:{name}" for name in ("Saving", "Baseline", "Unplugged", *LEFT_OUT)}
    add_plugin(site, "several", SAVING, kinds, "nnfmq.devices")
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


@pytest.mark.parametrize("interface", ["HIDL 1.2", "AIDL v4"])
def test_N_BAS_3_DEV_6_DEV_8_DEV_10_a_driver_skips_invalid_devices(interface: str, many: Daemon) -> None:
    with nnfmq.connect(many.path, timeout=LIMIT_S, interface=interface) as client:
        infos = {info.name: info for info in client.devices()}
    assert {name for name in infos if name.startswith("test-")} == {"test-saving", "test-baseline", "test-unplugged"}
    assert "reference" in infos
    assert (infos["test-saving"].model_cache_files, infos["test-saving"].data_cache_files) == (2, 0)
    for name, reason in LEFT_OUT.items():
        text = f"device {name.lower()} (several:{name}) is left out"
        until(lambda text=text: text in many.program.errors(), text)
        assert any(text in line and reason in line for line in many.program.errors().splitlines()), reason


def test_CACHE_6_N_CCH_16_a_plug_in_s_compilation_is_saved_and_restored(many: Daemon, tmp_path: Path) -> None:
    files, other = Paths.new(tmp_path, model=2, data=0), Paths.new(tmp_path, "other", model=2, data=0)
    token = bytes(32)
    with many.connect() as client, ExitStack() as stack:
        device = client.device("test-saving")
        cache, _ = files.open(stack)
        device.prepare(add_model(), token=token, model_cache=cache).close()
        with device.prepare_from_cache(token, cache, [], model=add_model()) as model:
            assert model.execute([1] * 4, [2] * 4)[0].tolist() == [3] * 4
        with pytest.raises(nnfmq.GeneralFailure):
            device.prepare_from_cache(token, other.open(stack)[0], [], model=add_model())


@pytest.mark.parametrize("preference", ["fast_single_answer", "sustained_speed"])
def test_a_plug_in_can_have_programs_in_a_cache_and_baselines(many: Daemon, preference: str) -> None:
    with many.connect() as client:
        device = client.device("test-baseline")
        for model in (add_model(), replace(add_model(), relax_computation_float32_to_float16=True)):
            with device.prepare(model, preference=preference) as prepared:
                assert prepared.execute([1] * 4, [2] * 4)[0].tolist() == [3] * 4


def test_a_plug_in_s_reason_to_be_unavailable_reaches_clients(many: Daemon) -> None:
    with many.connect() as client:
        device = client.device("test-unplugged")
        assert device.info.status is DeviceStatus.OFFLINE
        with pytest.raises(nnfmq.DeviceUnavailable, match="the accelerator is not plugged in"):
            device.prepare(add_model())
