"""What a driver reads of its installation, in a child process and by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.drivers import running_daemon, short_folder

from nnfmq.base import digests, settings
from nnfmq.data import example_path
from nnfmq.driver.devices import installation
from nnfmq.hal.preparation import ProgramKind
from nnfmq.lab import placement

CHILD_READS = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads does not fork
import sys
from nnfmq.driver.devices import installation
from nnfmq.hal.preparation import ProgramKind
installation.read_in_child()
print(installation.installation())
print(*[name for name in ("importlib.metadata", "hashlib") if name in sys.modules])
"""

HOSTS = """
import sys
from importlib.resources import files
from nnfmq.driver.devices.registry import load_devices
from nnfmq.importers import load
model = load(files("nnfmq") / "data" / "digits.tflite").model
device = load_devices().find("onnxruntime")
print(device.version_string, *set(device.supported_operations(model)))
print(*[name for name in sys.modules if name.startswith("nnfmq.hosted") or name == "onnxruntime"])
"""

PRELOADS = """
import sys
from msgspec.structs import replace
from nnfmq.driver.devices import hosted_runtimes, installation
installation.use(replace(installation.read(), runtimes={sys.argv[1]: "1.0"}))
before = "tempfile" in sys.modules
hosted_runtimes.preload()
print(before, "tempfile" in sys.modules)
"""

PREFETCHES = """
import sys
from msgspec.structs import replace
from nnfmq.driver.devices import installation
from nnfmq.hal.preparation import ProgramKind
from nnfmq.driver.devices.registry import load_devices
needed = {"nnfmq.engines.compiled.artifact"}
devices = load_devices()
if sys.argv[1] == "without":
    installation._current = replace(installation.installation(), llvmlite=None)
print(len(needed & sys.modules.keys()))
devices.prefetch_imports()
print(len(needed & sys.modules.keys()))
"""


def test_it_has_the_versions_of_installed_packages() -> None:
    llvmlite = pytest.importorskip("llvmlite")
    read = installation.read()
    assert (read.release, read.llvmlite) == (version("nnfmq"), llvmlite.__version__)


def test_a_device_tells_the_version_of_its_runtime_and_imports_no_adapter_for_an_ordinary_model() -> None:
    release = pytest.importorskip("onnxruntime").__version__
    output = subprocess.run([sys.executable, "-c", HOSTS], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [f"nnfmq-{version('nnfmq')} onnxruntime-{release} False", ""]


@pytest.mark.parametrize(("package", "preloads"), [("openvino", True), ("onnxruntime", False)])
def test_a_supervisor_imports_what_its_workers_need_for_a_private_folder(package: str, preloads: bool) -> None:
    output = subprocess.run(
        [sys.executable, "-c", PRELOADS, package], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["False", str(preloads)]


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    read = installation.read()
    assert (read.release, read.llvmlite, read.has_plugins) == ("source", None, False)


def test_a_child_process_reads_the_same_and_the_parent_imports_nothing_for_it() -> None:
    output = subprocess.run([sys.executable, "-c", CHILD_READS], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [repr(installation.read()), ""]


def test_a_supervisor_does_not_map_OpenSSL() -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon, daemon.connect() as client:
        maps = Path(f"/proc/{client.driver_pid}/maps").read_text()
    assert "_multiarray_umath" in maps
    assert "libcrypto" not in maps


@pytest.mark.parametrize(
    ("llvmlite", "limit_mib", "imported"), [("with", "1", "1"), ("with", "0", "0"), ("without", "1", "0")]
)
def test_a_driver_imports_what_links_a_cached_program_before_it_needs_it(
    llvmlite: str, limit_mib: str, imported: str
) -> None:
    pytest.importorskip("llvmlite")
    output = subprocess.run(
        [sys.executable, "-c", PREFETCHES, llvmlite],
        env={**os.environ, settings.CACHE_MIB.variable: limit_mib},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == ["0", imported]


@pytest.mark.skipif(not digests.is_compiled, reason="OpenSSL takes 1.6 MiB of each worker here")
def test_a_worker_without_a_model_has_at_most_8_MiB_of_its_own() -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon, daemon.connect() as client:
        own = placement.memory_of(client.worker_pid)
    assert own is not None
    assert own.private_dirty < 8 << 20


@pytest.mark.skipif(not digests.is_compiled, reason="OpenSSL computes the digests here")
def test_a_worker_prepares_a_model_from_the_cache_without_OpenSSL() -> None:
    pytest.importorskip("llvmlite")
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon:
        for _ in range(2):
            with daemon.connect() as client, client.device("compiled").prepare(example_path("digits.tflite")) as model:
                kind, maps = model.handle.program, Path(f"/proc/{client.worker_pid}/maps").read_text()
    assert kind is ProgramKind.CACHED
    assert "_sha256" in maps
    assert "libcrypto" not in maps
