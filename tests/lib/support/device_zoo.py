"""Drivers with devices that support, refuse and fail as their names say: for tests of the choice of devices.

`test-NAME` supports the operations in its list, and is faster than the CPU. What it computes is correct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.drivers import Daemon, Shared, running_daemon, short_folder
from support.plugins import add_plugin, path_with

_SOURCE = """
import os
import signal

from nnfmq.engines import interpreter
from nnfmq.hal.capabilities import NumberOfCacheFiles, PerformanceInfo, uniform_capabilities
from nnfmq.hal.errors import DeviceUnavailable, GeneralFailure, ResourceExhaustedPersistent
from nnfmq.hal.types import OperationType
from nnfmq.serialize.models import decode_model, encode_model
from nnfmq.driver.cache.files import CacheContents
from nnfmq.driver.devices.device import DeviceBase


class Everything(DeviceBase):
    name = "test-everything"
    operations = None
    capabilities = uniform_capabilities(PerformanceInfo(0.1, 0.1))

    def supports(self, model, subgraph, operation):
        return self.operations is None or operation.type in self.operations

    def compile(self, model):
        return interpreter.prepare(model)


class Adds(Everything):
    name = "test-adds"
    operations = [OperationType.ADD]
    capabilities = uniform_capabilities(PerformanceInfo(0.5, 0.5))
    cache_files_needed = NumberOfCacheFiles(1, 0)

    def save(self, model, program):
        return CacheContents(model=(encode_model(model)[0],))

    def restore(self, contents):
        model = decode_model(contents.model[0], [])
        return model, self.compile(model)


class Relus(Everything):
    name = "test-relus"
    operations = [OperationType.RELU]
    capabilities = uniform_capabilities(PerformanceInfo(0.5, 0.5))


class Old(Everything):
    name = "test-old"
    feature_level = 2


class Frugal(Everything):
    name = "test-frugal"
    operations = [OperationType.RELU]
    capabilities = uniform_capabilities(PerformanceInfo(2.0, 0.01))


class Equal(Everything):
    name = "test-equal"
    capabilities = uniform_capabilities(PerformanceInfo(1.0, 1.0))


class Refuses(Everything):
    name = "test-refuses"

    def compile(self, model):
        raise GeneralFailure("as the test wants")


class Relufails(Refuses):
    name = "test-relufails"
    operations = [OperationType.RELU]


class Exhausted(Everything):
    name = "test-exhausted"

    def compile(self, model):
        raise ResourceExhaustedPersistent("as the test wants")


class Dies(Everything):
    name = "test-dies"

    def compile(self, model):
        os.kill(os.getpid(), signal.SIGKILL)


class Reludies(Dies):
    name = "test-reludies"
    operations = [OperationType.RELU]


class Unplugged(Everything):
    name = "test-unplugged"
    unavailable_reason = "it is not plugged in"


class Mute(Everything):
    name = "test-mute"

    def supports(self, model, subgraph, operation):
        raise GeneralFailure("as the test wants")
"""


@contextmanager
def driver_with(folder: Path, path: Path, *names: str, listed: Sequence[str] = ()) -> Iterator[Daemon]:
    """Run a driver at `path` with the devices `test-NAME` of these names, and those of the packaged ones in `listed`.

    Files go to `folder`.
    """
    site = folder / f"site-{path.stem}"
    site.mkdir()
    add_plugin(
        site, "device_zoo", _SOURCE, {name: f"device_zoo:{name.capitalize()}" for name in names}, "nnfmq.devices"
    )
    devices = site / "devices.toml"
    engines = {name: f'engine = "{name if name == "compiled" else "reference"}"\n' for name in listed}
    entries = "".join(f'[[device]]\nname = "{name}"\n{engine}' for name, engine in engines.items())
    devices.write_text(entries or "device = []\n")
    environment = {**path_with(site), "NNFMQ_DEVICES": str(devices)}
    with running_daemon(path, environment=environment) as daemon:
        yield daemon


class SharedDrivers:
    """The drivers of a module's tests: a test that needs the same devices as one before uses the driver of that one.

    Tests kill at most the processes that serve their clients, and change no setting before they get their drivers.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._folder: Path = shared(short_folder())
        self._running: dict[str, Daemon] = {}

    def link(self, directory: Path, *names: str, driver: str = "d", listed: Sequence[str] = ()) -> Daemon:
        """Return the driver with the devices of `driver_with`, after linking `DRIVER.sock` in `directory` to it."""
        own = "-".join([*names, *listed])
        if own not in self._running:
            path = self._folder / f"{own}.sock"
            self._running[own] = self._shared(driver_with(self._folder, path, *names, listed=listed))
        daemon = self._running[own]
        (directory / f"{driver}.sock").symlink_to(daemon.path)
        return daemon
