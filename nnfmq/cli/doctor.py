"""`nnfmq doctor`: what runs here, what this machine offers, what is missing, and the remedy.

Every check is a function that yields findings and never raises: what cannot be found out is itself a finding.
`missing` means that nnfmq does not work here, `limited` that it works with less speed or fewer comforts. The kernel is
tried (seals, pidfds) where the standard library can try it; what it has no call for (futex_waitv, SO_PEERPIDFD,
FUTEX_WAKE_OP) is told from the release that introduced it. Exit status: 0 when nothing is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from nnfmq.cli.output import console, print_json, table
from nnfmq.core_selection import REMEDY
from nnfmq.hal.errors import DeviceUnavailable, NnfmqError

EXAMPLES = """\
examples:
  nnfmq doctor
  nnfmq doctor --json
  NNFMQ_CORE=python nnfmq doctor       # is the pure-Python core usable here?

Exit status: 0 when nnfmq is usable, 1 when something that it needs is missing.
"""

_MIB = 1 << 20
_STRONGLY_ORDERED = ("x86_64", "AMD64")
_EXTRAS = {
    "Pillow": "images: `nnfmq run` on photos",
    "pytest": "test: the project's own tests",
    "ai-edge-litert": "bench: comparison with LiteRT",
    "onnxruntime": "bench: comparison with ONNX Runtime",
}


class State(StrEnum):
    """What a finding means for using nnfmq here."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    part: str
    name: str
    value: str
    state: State = State.OK
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Check everything and report; 1 when something needed is missing."""
    findings = examine()
    usable = all(finding.state is not State.MISSING for finding in findings)
    if arguments.json:
        print_json({"usable": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings, usable, arguments.no_color)
    return 0 if usable else 1


def examine() -> list[Finding]:
    """Return every finding, part by part. Blocks at most two seconds, for a driver that does not answer."""
    return [
        finding for check in (_core, _python, _kernel, _limits, _numpy, _extras, _driver, _cache) for finding in check()
    ]


def _core() -> Iterator[Finding]:
    try:
        from nnfmq.queue import core
    except (ImportError, ValueError, OSError) as error:
        yield Finding("core", "queue core", str(error), State.MISSING, "unset NNFMQ_CORE, or do as it says")
        return
    state = State.OK if core.core_name == "compiled" else _python_core_state()
    yield Finding("core", "queue core", core.core_name, state, _remedy(state))
    yield Finding("core", "from", str(core.core_path))
    yield Finding("core", "because", str(core.core_reason))
    yield from _codec()


def _codec() -> Iterator[Finding]:
    try:
        from nnfmq.serialize import codec
    except (ImportError, ValueError, OSError) as error:
        yield Finding("core", "packet codec", str(error), State.MISSING, "unset NNFMQ_CORE, or do as it says")
        return
    state = State.OK if codec.codec_name == "compiled" else State.LIMITED
    yield Finding("core", "packet codec", codec.codec_name, state, _remedy(state))
    yield Finding("core", "codec from", codec.codec_path)
    yield Finding("core", "codec because", codec.codec_reason)


def _remedy(state: State) -> str:
    return "" if state is State.OK else f"for the compiled one: {REMEDY.split(';')[0]}"


def _python_core_state() -> State:
    """Return LIMITED on x86-64, MISSING elsewhere: plain Python cannot order its loads and stores there."""
    return State.LIMITED if platform.machine() in _STRONGLY_ORDERED else State.MISSING


def _python() -> Iterator[Finding]:
    import nnfmq

    yield Finding("python", "Python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield Finding("python", "executable", sys.executable)
    yield Finding("python", "nnfmq", f"{_version('nnfmq') or 'not installed'} in {Path(nnfmq.__file__).parent}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _kernel() -> Iterator[Finding]:
    yield Finding("kernel", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield _tried("memfd with seals", lambda: _try_memory(one_writer=False), State.MISSING, "Linux 3.17 or newer")
    future = "Linux 5.1 or newer; without it input pools stay writable for the driver"
    yield _tried("seal FUTURE_WRITE", lambda: _try_memory(one_writer=True), State.LIMITED, future)
    yield _tried("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid())), State.LIMITED, "Linux 5.3 or newer")
    yield _by_release("FUTEX_WAKE_OP", (2, 6, 14), "the Python core needs it or libatomic")
    yield _by_release("futex_waitv", (5, 16), "without it asyncio waits with a thread for each queue")
    yield _by_release("SO_PEERPIDFD", (6, 5), "without it a peer is found by its process number, which can be reused")
    ordering = "strong" if platform.machine() in _STRONGLY_ORDERED else "weak: for the compiled core only"
    yield Finding("kernel", "memory ordering", ordering)


def _try_memory(*, one_writer: bool) -> None:
    from nnfmq.memory import Memory

    Memory.create(1, "nnfmq-doctor", one_writer=one_writer).close()


def _tried(name: str, attempt: Callable[[], object], otherwise: State, remedy: str) -> Finding:
    """Return what the kernel answered to `attempt`."""
    try:
        attempt()
    except (NnfmqError, OSError, AttributeError) as error:
        return Finding("kernel", name, f"refused: {error}", otherwise, remedy)
    return Finding("kernel", name, "works")


def _by_release(name: str, since: tuple[int, ...], otherwise: str) -> Finding:
    """Return whether the running release is new enough for what only a system call of our own could try."""
    wanted = ".".join(map(str, since))
    if _release() >= since:
        return Finding("kernel", name, f"in Linux {wanted} and newer")
    return Finding("kernel", name, f"needs Linux {wanted}", State.LIMITED, otherwise)


def _release() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split("+")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < 256
    remedy = "raise it: ulimit -n 4096" if few else ""
    yield Finding("limits", "open files", _limit(files), State.LIMITED if few else State.OK, remedy)
    yield Finding("limits", "locked memory", _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _MIB))
    yield _cpus()
    yield Finding("limits", "memory of this control group", _control_group_limit())
    yield Finding("limits", "/dev/shm free (named queues)", _free_bytes("/dev/shm"))
    yield Finding("limits", "socket buffer", f"{_first_line('/proc/sys/net/core/wmem_max') or 'unknown'} bytes at most")


def _limit(value: int, unit: int = 1) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{value // unit:,}" + (" MiB" if unit == _MIB else "")


def _cpus() -> Finding:
    allowed = sorted(os.sched_getaffinity(0))
    one = len(allowed) == 1
    value = f"{len(allowed)} of {os.cpu_count()}: {', '.join(map(str, allowed))}"
    remedy = "allow a second one: polling for the answer needs a core for each side" if one else ""
    return Finding("limits", "CPUs allowed", value, State.LIMITED if one else State.OK, remedy)


def _control_group_limit() -> str:
    text = _first_line("/sys/fs/cgroup/memory.max")
    return f"{int(text) // _MIB:,} MiB" if text and text.isdigit() else "unlimited"


def _free_bytes(path: str) -> str:
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return f"none: {error.strerror}"
    return f"{stat.f_bavail * stat.f_frsize // _MIB:,} MiB"


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None


def _numpy() -> Iterator[Finding]:
    import numpy as np

    yield Finding("numpy", "numpy", np.__version__)
    configuration: Any = np.show_config(mode="dicts")
    blas = configuration.get("Build Dependencies", {}).get("blas", {})
    yield Finding("numpy", "BLAS", f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip())


def _extras() -> Iterator[Finding]:
    for distribution, use in _EXTRAS.items():
        version = _version(distribution)
        extra, purpose = use.split(": ")
        if version:
            yield Finding("optional", distribution, version)
        else:
            yield Finding("optional", distribution, "not installed", remedy=f"{purpose}: pip install 'nnfmq[{extra}]'")


def _driver() -> Iterator[Finding]:
    import nnfmq
    from nnfmq.paths import default_socket

    path = default_socket()
    try:
        with nnfmq.connect(path, timeout=2.0) as client:
            names = ", ".join(device.name for device in client.devices())
    except DeviceUnavailable as error:
        value = f"not running ({error})" if path.exists() else f"none at {path}"
        remedy = "none needed: applications get an embedded one; `nnfmq serve` starts one for all"
        yield Finding("driver", "running driver", value, remedy=remedy)
    except (NnfmqError, OSError) as error:
        yield Finding("driver", "running driver", f"at {path}: {error}", State.LIMITED, "end it and start it again")
    else:
        yield Finding("driver", "running driver", f"at {path}, devices: {names}")


def _cache() -> Iterator[Finding]:
    from nnfmq.service.caching import program_cache

    limit = program_cache.cache_limit_bytes()
    if not limit:
        yield Finding("driver", "compiled models kept", f"none: ${program_cache.CACHE_VARIABLE} is 0")
        return
    try:
        sizes = program_cache.entry_sizes()
    except (NnfmqError, OSError) as error:
        remedy = "as it says; until then each model is compiled anew"
        yield Finding("driver", "compiled models kept", str(error), State.LIMITED, remedy)
        return
    value = f"{len(sizes)}, {sum(sizes) / _MIB:,.1f} MiB of {limit // _MIB:,} at most"
    yield Finding("driver", "compiled models kept", value)


def _print(findings: list[Finding], usable: bool, no_color: bool) -> None:
    from rich.text import Text

    styles = {State.OK: "green", State.LIMITED: "yellow", State.MISSING: "bold red"}
    listing = table("part", "what", "found", "state", "remedy")
    part = ""
    for finding in findings:
        heading, part = "" if finding.part == part else finding.part, finding.part
        state = Text(finding.state, styles[finding.state])
        listing.add_row(heading, finding.name, finding.value, state, finding.remedy)
    screen = console(no_color)
    screen.print(listing)
    screen.print("nnfmq is usable here." if usable else "nnfmq is not usable here: see what is missing above.")
