"""Memory that the workers of a driver share: a worker that was taken over writes there what it can.

Its device finds the shared memory among the mappings and descriptors of the process, as foreign code would.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import Daemon, kill_worker, one, running_daemon
from support.models import null_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.hal.types import DeviceStatus

_SCRIBBLING = """
import ctypes
import mmap
import os
import pathlib

from nnfmq.driver.devices.device import DeviceBase
from nnfmq.hal.errors import GeneralFailure


class Scribbling(DeviceBase):
    name = "test-scribbling"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        written = sum(self._write_mappings(label) + self._write_files(label) for label in ("status", "shares"))
        self._write_largest("cores", b"\\xff" * 7 + b"\\x7f")
        self._write_largest("statistics", b"\\xff" * 8)
        raise GeneralFailure(f"{written} bytes")

    def _write_largest(self, label, word):
        for begin, end in self._writable(label):
            ctypes.memmove(begin, word * ((end - begin) // 8), end - begin)

    def _writable(self, label):
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            if f"/memfd:nnfmq-{label} " in line and line.split()[1].startswith("rw"):
                yield tuple(int(word, 16) for word in line.split()[0].split("-"))

    def _write_mappings(self, label):
        written = 0
        for begin, end in self._writable(label):
            ctypes.memset(begin, 0x7F, end - begin)
            written += end - begin + self._write_enlarged(begin, 2 * (end - begin))
        return written

    def _write_enlarged(self, begin, size):
        libc = ctypes.CDLL(None)
        libc.mremap.restype = ctypes.c_void_p
        libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        address = libc.mremap(begin, 0, size, 1)  # another mapping of the same file from there on
        if address == ctypes.c_void_p(-1).value:
            return 0
        ctypes.memset(address, 0x7F, size)
        return size

    def _write_files(self, label):
        written = 0
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                if f"/memfd:nnfmq-{label} " not in os.readlink(f"/proc/self/fd/{fd}"):
                    continue
                for opened in (fd, os.open(f"/proc/self/fd/{fd}", os.O_RDWR)):
                    with mmap.mmap(opened, 0) as mapping:
                        mapping[:] = b"\\x7f" * len(mapping)
                        written += len(mapping)
            except OSError:
                pass
        return written
"""


@pytest.fixture(params=["fork", "exec"])
def hostile(folder: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Run a daemon with a device of a plug-in that writes to the memory which its worker shares with others."""
    site = folder / "site"
    site.mkdir()
    add_plugin(site, "nnfmq_scribbling", _SCRIBBLING, {"scribbling": "nnfmq_scribbling:Scribbling"}, "nnfmq.devices")
    options = ["--worker-start", request.param]
    with running_daemon(folder / "d.sock", environment=path_with(site), options=options) as daemon:
        yield daemon


def test_a_worker_can_write_to_its_own_page_only_and_harms_no_other_client(hostile: Daemon) -> None:
    with hostile.connect() as attacker, hostile.connect() as neighbour:
        with neighbour.device("reference").prepare(null_model()) as prepared:
            with pytest.raises(nnfmq.GeneralFailure, match=r"^4096 bytes$"):
                attacker.device("test-scribbling").prepare(null_model())
            with prepared.burst() as burst:
                assert (prepared.execute(one(3)), burst.execute(one(3))) == ((one(3),), (one(3),))
            assert neighbour.device("reference").info.status is DeviceStatus.AVAILABLE
        with neighbour.device("reference").prepare(null_model()) as prepared:  # which is charged
            assert prepared.execute(one(4))[0].tolist() == [4]
        kill_worker(attacker)  # which the driver counts
        with hostile.connect() as later, later.device("reference").prepare(null_model()) as prepared:
            assert prepared.execute(one(5))[0].tolist() == [5]
