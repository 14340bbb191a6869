"""The installation of a driver: versions, entry points of plug-ins, and a digest of the engines' source code.

Reading it takes memory that an idle supervisor would keep, 5 MiB if OpenSSL computes the digest (`base.digests`). The
supervisor has a child process read it (`read_in_child`) before it forks workers. Other processes read it when they need
it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct, msgpack

from nnfmq.base.digests import Sha256
from nnfmq.base.packages import InstalledPackages, entry_points_of
from nnfmq.driver.process.children import read_from_child
from nnfmq.hal.hosted import RUNTIMES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "DEVICES_GROUP",
    "OPERATIONS_GROUP",
    "DriverOptions",
    "Installation",
    "build_identity",
    "framed",
    "installation",
    "installed_plugins",
    "read",
    "read_in_child",
    "use",
    "version_of",
]

DEVICES_GROUP = "nnfmq.devices"
OPERATIONS_GROUP = "nnfmq.operations"
_GROUPS = (DEVICES_GROUP, OPERATIONS_GROUP)
_BUILD_PARTS = (
    "hal",
    "operations",
    "validation",
    "engines",
    "serialize/models.py",
    "driver/cache/files.py",
)
_HOSTED_PARTS = ("hosted",)
_PACKAGE = Path(__file__).resolve().parents[2]
_current: Installation | None = None


class Installation(Struct, frozen=True):
    """The installed versions, plug-ins and source code.

    Attributes:
        release: The version of nnfmq; "source" if it runs from a source tree that is not installed.
        llvmlite: The version of llvmlite, or None.
        build_identity: A digest, in hexadecimal, of the engines' source code, NumPy's version and the CPU's features.
        has_plugins: Whether there are entry points of plug-ins.
        runtimes: The version of each package of `hal.hosted.RUNTIMES` that is installed.
    """

    release: str
    llvmlite: str | None
    build_identity: str
    has_plugins: bool
    runtimes: Mapping[str, str] = {}


def installation() -> Installation:
    """Return the installation at the time of the first call in a process, which blocks."""
    global _current  # noqa: PLW0603  read once for each process, and inherited by forked ones
    if _current is None:
        _current = read()
    return _current


def use(found: Installation) -> None:
    """Let `installation` return what this process's parent has found."""
    global _current  # noqa: PLW0603  see `installation`
    _current = found


def build_identity() -> bytes:
    """Return the digest of what determines the engines' programs. Blocks when first called."""
    return bytes.fromhex(installation().build_identity)


def installed_plugins() -> list[EntryPoint]:
    """Return the entry points of installed plug-ins. Imports none of them."""
    if not installation().has_plugins:
        return []
    return [entry for group in _GROUPS for entry in entry_points_of(group)]


def read_in_child() -> None:
    """Let a child process read what is installed, for `installation`. Blocks. Main thread of a process with no other.

    Raises:
        GeneralFailure: If this process has several threads.
        OSError: If the system lacks processes, memory or fds.
    """
    global _current  # noqa: PLW0603  see `installation`
    data, status = read_from_child(_write, "nnfmq-plugins")
    if status == 0:  # otherwise `installation` reads it in this process
        _current = msgpack.decode(data, type=Installation)


def _write(fd: int) -> None:
    with open(fd, "wb") as pipe:
        pipe.write(msgpack.encode(read()))


def read() -> Installation:
    """Return the installation of now. Blocks."""
    packages = InstalledPackages()
    has_plugins = packages.have_entry_points(_GROUPS)
    names = [runtime.package for runtime in RUNTIMES]
    runtimes = {name: version_of(name, packages) for name in names if find_spec(name)}
    return Installation(
        packages.version("nnfmq") or "source",
        packages.version("llvmlite"),
        _build_digest([*_BUILD_PARTS, *(_HOSTED_PARTS if runtimes or has_plugins else ())]),
        has_plugins,
        runtimes,
    )


def version_of(module: str, packages: InstalledPackages) -> str:
    """Return the version of the package that has a module; "unknown" if it states none. Blocks.

    Of `onnxruntime` this may be `onnxruntime-gpu`: then importlib.metadata searches all packages.
    """
    found = packages.version(module)
    if found is None:
        from importlib.metadata import packages_distributions, version

        found = "+".join(sorted({f"{name}-{version(name)}" for name in packages_distributions().get(module, ())}))
    return found or "unknown"


def _build_digest(parts: Sequence[str]) -> str:
    """Hash the source code, not only the release number, because a cache must not outlive an edit of the source."""
    digest = Sha256()
    for text in (np.__version__, os.uname().machine, *sorted(_cpu_features())):
        digest.update(framed(text.encode()))
    for path in sorted(_sources(parts)):
        with open(path, "rb", buffering=0) as file:
            digest.update(framed(file.read()))
    return digest.digest().hex()


def framed(field: bytes) -> bytes:
    """Prefix a field with its length, so that different sequences of fields never hash the same bytes."""
    return struct.pack("<Q", len(field)) + field


def _sources(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        path = os.path.join(_PACKAGE, part)
        if path.endswith(".py"):
            yield path
        for folder, _, names in os.walk(path):  # of a file: nothing
            yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))


def _cpu_features() -> set[str]:
    """Return the features of the first CPU in /proc/cpuinfo ("flags" on x86, "Features" on Arm)."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return set(value.split())
    return set()


# ----------------------------------------------------------------------------------------------------------------------
# DriverOptions: what the supervisor tells each worker about the driver.


class DriverOptions(Struct, frozen=True):
    """The driver's options that concern a session. The defaults are those of an embedded driver.

    Attributes:
        supervisor_pid: The pid of the supervisor; None if this process is the whole driver.
        uid: The uid of the driver's account, which a worker may not run under.
        allows_device_status: Whether clients may set the status of devices. An embedded driver has only one client.
    """

    supervisor_pid: int | None = None
    allows_device_status: bool = True
    uid: int = msgspec.field(default_factory=os.getuid)
