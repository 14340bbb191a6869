"""What a driver reads of its installation, in a child process and by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.drivers import running_daemon, short_folder
from support.executors import until

from nnfmq import settings
from nnfmq.service import installation

CHILD_READS = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads does not fork
import sys
from nnfmq.service import installation
installation.read_in_child()
print(installation.installation())
print(*[name for name in ("importlib.metadata", "hashlib") if name in sys.modules])
"""

PREFETCHES = """
import sys
from nnfmq.service.caching import program_cache
print("hmac" in sys.modules)
program_cache.prefetch_imports()
print({"hmac", "hashlib"} <= set(sys.modules))
"""


def test_it_has_the_versions_of_installed_packages() -> None:
    llvmlite = pytest.importorskip("llvmlite")
    read = installation.read()
    assert (read.release, read.llvmlite) == (version("nnfmq"), llvmlite.__version__)


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


@pytest.mark.parametrize(("limit_mib", "is_imported"), [("1", "True"), ("0", "False")])
def test_a_driver_imports_what_its_program_cache_needs_before_it_needs_it(limit_mib: str, is_imported: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", PREFETCHES],
        env={**os.environ, settings.CACHE_MIB.variable: limit_mib},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == ["False", is_imported]


def test_a_worker_maps_OpenSSL_before_a_model_is_prepared() -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon, daemon.connect() as client:
        maps = Path(f"/proc/{client.worker_pid}/maps")
        until(lambda: "libcrypto" in maps.read_text())
