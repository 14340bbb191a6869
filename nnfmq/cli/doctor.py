"""`nnfmq doctor`: check the installation, the kernel and the limits of this machine, and name remedies for problems.

Each check is a generator of findings and never raises: if something cannot be determined, that is a finding. A finding
is `missing` if nnfmq does not work here, and `limited` if it works with less speed or fewer features. Kernel features
are tried out if Python has a call for them (seals, pidfds); the others (futex_waitv, SO_PEERPIDFD, FUTEX_WAKE_OP) are
inferred from the kernel release. Exit status: 0 if nothing is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.base import settings
from nnfmq.base.cores import REMEDY
from nnfmq.base.packages import installed_version
from nnfmq.base.processes import allowed_cores, cpu_quota
from nnfmq.base.settings import candidates
from nnfmq.cli.console import console, print_json, progress_bar
from nnfmq.cli.devices import query_capabilities
from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument, NnfmqError

if TYPE_CHECKING:
    from rich.text import Text

EXAMPLES = """\
examples:
  nnfmq doctor
  nnfmq doctor --json
  NNFMQ_CORE=python nnfmq doctor       # is the pure-Python core usable here?

Exit status: 0 if nnfmq is usable, 1 if something that it needs is missing.
"""

_MIB = 1 << 20
_STRONGLY_ORDERED = ("x86_64", "AMD64")
AUTOGROUPS = "/proc/sys/kernel/sched_autogroup_enabled"


class FindingState(StrEnum):
    """The meaning of a finding for the use of nnfmq on this machine."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    part: str
    name: str
    value: str
    state: FindingState = FindingState.OK
    remedy: str = ""


_STYLES = {FindingState.OK: "green", FindingState.LIMITED: "yellow", FindingState.MISSING: "bold red"}
_NAME_WIDTH = len("/dev/shm free (named queues)")
_STATE_WIDTH = len(FindingState.LIMITED)
_INDENT = " " * 6
_NO_BREAK = "\N{NO-BREAK SPACE}"

_EXTRAS = {  # distribution → extra, purpose, state if it is not installed
    "llvmlite": ("compiled", "device `compiled`, which runs models as machine code", FindingState.LIMITED),
    "Pillow": ("images", "`nnfmq run` on photos", FindingState.OK),
    "pytest": ("test", "the project's own tests", FindingState.OK),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Run all checks and print the report. Return 1 if something that nnfmq needs is missing, else 0."""
    with progress_bar("checking", arguments.no_color, delay_s=0.0) as progress:
        findings = examine(progress)
    usable = all(finding.state is not FindingState.MISSING for finding in findings)
    if arguments.json:
        print_json({"usable": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings, usable, arguments.no_color)
    return 0 if usable else 1


def examine(progress: Callable[[int, int], None] | None = None) -> list[Finding]:
    """Return all findings, grouped by part. Blocks up to two seconds, if a driver does not respond.

    `progress` receives the number of completed checks, and of all.
    """
    checks = (_settings, _core, _python, _kernel, _limits, _numpy, _extras, _runtimes, _worker_uids, _driver, _cache)
    findings: list[Finding] = []
    for done, check in enumerate(checks):
        if progress is not None:
            progress(done, len(checks))
        try:
            findings.extend(check())
        except InvalidArgument:
            if findings[0].state is FindingState.OK:
                raise
            # The check read a setting that `_settings` has reported.
    return findings


def _settings() -> Iterator[Finding]:
    problems: dict[str, None] = {}
    for setting in settings.table().values():
        try:
            setting.value()
        except InvalidArgument as error:
            problems[str(error)] = None
    for problem in problems:
        remedy = "follow the message; `nnfmq config show` prints all settings"
        yield Finding("settings", "invalid", problem, FindingState.MISSING, remedy)
    if not problems:
        files = ", ".join(path for path in candidates() if os.path.exists(path))
        yield Finding("settings", "files", files or "none")


def _core() -> Iterator[Finding]:
    remedy = "unset NNFMQ_CORE, or follow the message"
    try:
        from nnfmq.queue import core
    except (ImportError, ValueError, OSError) as error:
        yield Finding("core", "queue core", str(error), FindingState.MISSING, remedy)
        return
    # The Python core cannot order its loads and stores: it needs a processor that does (x86-64).
    without_compiled = FindingState.LIMITED if platform.machine() in _STRONGLY_ORDERED else FindingState.MISSING
    state = FindingState.OK if core.core_name == "compiled" else without_compiled
    yield Finding("core", "queue core", core.core_name, state, _core_remedy(state))
    yield Finding("core", "from", str(core.core_path))
    yield Finding("core", "because", str(core.core_reason))
    try:
        from nnfmq.serialize import codec
    except (ImportError, ValueError, OSError) as error:
        yield Finding("core", "packet codec", str(error), FindingState.MISSING, remedy)
        return
    state = FindingState.OK if codec.codec_name == "compiled" else FindingState.LIMITED
    yield Finding("core", "packet codec", codec.codec_name, state, _core_remedy(state))
    yield Finding("core", "codec from", codec.codec_path)
    yield Finding("core", "codec because", codec.codec_reason)
    yield from _thread_pool()


def _thread_pool() -> Iterator[Finding]:
    """Without the compiled core the device `compiled` runs a model with one thread."""
    from nnfmq.engines.compiled import thread_pool

    state = FindingState.OK if thread_pool.core_name == "compiled" else FindingState.LIMITED
    threads = 1 + min(allowed_cores() - 1, thread_pool.load(thread_pool.core_name).MAX_WORKERS)
    value = f"{thread_pool.core_name}, {threads} thread{'s' if threads > 1 else ''} for a model"
    yield Finding("core", "thread pool", value, state, _core_remedy(state))


def _core_remedy(state: FindingState) -> str:
    return "" if state is FindingState.OK else f"to get the compiled core: {REMEDY.split(';')[0]}"


def _python() -> Iterator[Finding]:
    import nnfmq

    yield Finding("python", "Python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield Finding("python", "executable", sys.executable)
    yield Finding(
        "python", "nnfmq", f"{installed_version('nnfmq') or 'not installed'} in {Path(nnfmq.__file__).parent}"
    )


def _kernel() -> Iterator[Finding]:
    yield Finding("kernel", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield _tried("memfd with seals", lambda: _try_memory(one_writer=False), FindingState.MISSING, "Linux 3.17 or newer")
    future_write = "Linux 5.1 or newer; without it the driver can write to input pools"
    yield _tried("seal FUTURE_WRITE", lambda: _try_memory(one_writer=True), FindingState.LIMITED, future_write)
    yield _tried("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid())), FindingState.LIMITED, "Linux 5.3 or newer")
    yield _by_release("FUTEX_WAKE_OP", (2, 6, 14), "the Python core needs it or libatomic")
    yield _by_release("futex_waitv", (5, 16), "without it, asyncio support uses one thread for each queue")
    yield _by_release("SO_PEERPIDFD", (6, 5), "without it, a peer is identified by its pid, which can be reused")
    yield _sandbox()
    yield _autogroups()
    ordering = "strong" if platform.machine() in _STRONGLY_ORDERED else "weak: requires the compiled core"
    yield Finding("kernel", "memory ordering", ordering)


def _sandbox() -> Finding:
    """Return the parts of the sandbox of workers that the kernel lacks."""
    from nnfmq.base.sandbox.sandbox import missing_parts

    missing = missing_parts()
    if settings.SANDBOX.value() == "off":
        remedy = f"every worker may do what its user may: {settings.SANDBOX.effective().origin}"
        return Finding("kernel", "sandbox of workers", "off", FindingState.LIMITED, remedy)
    if not missing:
        return Finding("kernel", "sandbox of workers", "complete")
    return Finding(
        "kernel", "sandbox of workers", f"without {'; '.join(missing)}", FindingState.LIMITED, "a newer Linux"
    )


def _autogroups() -> Finding:
    """Return whether the kernel's scheduler shares the CPUs among sessions, and only then among their threads."""
    if _first_line(AUTOGROUPS) != "1":
        return Finding("kernel", "autogroups", "none")
    remedy = (
        "`sysctl kernel.sched_autogroup_enabled=0`: while clients and driver, in two sessions, need more CPUs than "
        "there are, a thread that could run may wait 0.1 to 0.3 s"
    )
    return Finding("kernel", "autogroups", "a group of the scheduler for each session", FindingState.LIMITED, remedy)


def _try_memory(*, one_writer: bool) -> None:
    from nnfmq.base.memory import Memory

    Memory.create(1, "nnfmq-doctor", one_writer=one_writer).close()


def _tried(name: str, attempt: Callable[[], object], otherwise: FindingState, remedy: str) -> Finding:
    """Return whether `attempt` succeeds; `otherwise` is the state if it does not."""
    try:
        attempt()
    except (NnfmqError, OSError, AttributeError) as error:
        return Finding("kernel", name, f"rejected: {error}", otherwise, remedy)
    return Finding("kernel", name, "works")


def _by_release(name: str, since: tuple[int, ...], consequence: str) -> Finding:
    """Return whether the running kernel is at least release `since`, for features that Python has no call for."""
    required = ".".join(map(str, since))
    release = platform.release().split("-")[0].split("+")[0].split(".")
    if tuple(int(number) for number in release if number.isdigit()) >= since:
        return Finding("kernel", name, f"in Linux {required} and newer")
    return Finding("kernel", name, f"needs Linux {required}", FindingState.LIMITED, consequence)


def _limits() -> Iterator[Finding]:
    from nnfmq.driver.process.limits import few_descriptors

    few = few_descriptors(serves_several=settings.WORKER_UIDS.value() is not None)
    files = _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # a driver raises its own limit to that
    yield Finding("limits", "open files", files, FindingState.LIMITED if few else FindingState.OK, few)
    yield Finding("limits", "locked memory", _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _MIB))
    allowed = sorted(os.sched_getaffinity(0))
    one = len(allowed) == 1
    value = f"{len(allowed)} of {os.cpu_count()}: {', '.join(map(str, allowed))}"
    remedy = (
        "allow a second one: client and driver each need a CPU while the client polls for the result" if one else ""
    )
    yield Finding("limits", "CPUs allowed", value, FindingState.LIMITED if one else FindingState.OK, remedy)
    yield Finding("limits", "cores allowed", str(allowed_cores()))
    quota = cpu_quota()
    yield Finding("limits", "CPU quota", "none" if quota is None else f"{quota:g} CPUs")
    memory = _first_line("/sys/fs/cgroup/memory.max")
    value = f"{int(memory) // _MIB:,} MiB" if memory and memory.isdigit() else "unlimited"
    yield Finding("limits", "memory of this control group", value)
    from nnfmq.driver.memory.quota import quota_limit_bytes, total_limit_bytes

    limits = f"{total_limit_bytes() // _MIB:,} MiB, one client {quota_limit_bytes() // _MIB:,} MiB"
    yield Finding("limits", "memory of a driver's clients", limits)
    yield Finding("limits", "/dev/shm free (named queues)", _free_bytes("/dev/shm"))
    socket_buffer = _first_line("/proc/sys/net/core/wmem_max")
    value = f"{int(socket_buffer):,} bytes at most" if socket_buffer and socket_buffer.isdigit() else "unknown"
    yield Finding("limits", "socket buffer", value)


def _limit(value: int, unit: int = 1) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{value // unit:,}" + (" MiB" if unit == _MIB else "")


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
    for distribution, (extra, purpose, state) in _EXTRAS.items():
        version = installed_version(distribution)
        if version:
            yield Finding("optional", distribution, version)
        else:
            yield Finding(
                "optional", distribution, "not installed", state, f"{purpose}: `pip install 'nnfmq[{extra}]'`"
            )


def _runtimes() -> Iterator[Finding]:
    """The runtimes that a driver of this environment hosts, or would."""
    from nnfmq.hal.hosted import RUNTIMES

    allowed = settings.RUNTIMES.effective()
    for runtime in RUNTIMES:
        version = installed_version(runtime.package.replace("_", "-"))
        purpose = f"device `{runtime.name}`, which runs {', '.join(runtime.formats)} files"
        if not version:
            remedy = f"{purpose}: `pip install '{runtime.extra}'`"
            yield Finding("runtimes", runtime.name, "not installed", remedy=remedy)
        elif allowed.value is not None and runtime.name not in allowed.value:
            yield Finding("runtimes", runtime.name, f"{version}, not hosted", remedy=f"{purpose}: {allowed.origin}")
        else:
            yield Finding("runtimes", runtime.name, version)


def _worker_uids() -> Iterator[Finding]:
    """Yield whether the uids of workers can read the installation, if the settings name some."""
    from nnfmq.base.accounts import closed_part

    if settings.WORKER_UIDS.value() is None:
        return
    closed = next(filter(None, map(closed_part, (sys.executable, __file__, os.__file__))), None)
    if closed is None:
        yield Finding("driver", "uids of workers", "can read Python and nnfmq")
        return
    remedy = "let everybody read Python, nnfmq and its libraries, for instance in /opt (docs/how-to/several-users.md)"
    yield Finding("driver", "uids of workers", f"may not enter or read {closed}", FindingState.LIMITED, remedy)


def _driver() -> Iterator[Finding]:
    import nnfmq
    from nnfmq.base.paths import accounts_of, check_socket_directory, client_socket, creation_problem
    from nnfmq.hal.types import DeviceStatus

    path = client_socket()
    try:
        if path.parent.exists():
            check_socket_directory(path, accounts_of(path))
    except (DeviceUnavailable, OSError) as error:
        remedy = "set NNFMQ_SOCKET to a path in a directory of yours, or unset it"
        yield Finding("driver", "running driver", f"refused: {error}", FindingState.LIMITED, remedy)
        return
    try:
        with nnfmq.connect(path, timeout=2.0, monitor=True) as client:
            devices = client.devices()
            unavailable = [info for info in devices if info.status != DeviceStatus.AVAILABLE]
            reasons = {info.name: query_capabilities(client, info)[1] for info in unavailable}
            statistics = client.statistics(timeout=2.0)
    except DeviceUnavailable as error:
        value = f"not running ({error})" if path.exists() else f"none at {path}"
        problem = creation_problem(path.parent)
        if problem:
            remedy = "only for `nnfmq serve`: set XDG_RUNTIME_DIR to a directory of yours, or choose another --socket"
            yield Finding("driver", "running driver", f"{value}; {problem}", FindingState.LIMITED, remedy)
            return
        remedy = "none needed: each application starts an embedded driver; `nnfmq serve` starts one for all"
        yield Finding("driver", "running driver", value, remedy=remedy)
        return
    except (NnfmqError, OSError) as error:
        yield Finding(
            "driver", "running driver", f"at {path}: {error}", FindingState.LIMITED, "end it and start it again"
        )
        return
    names = ", ".join(info.name for info in devices)
    yield Finding("driver", "running driver", f"at {path}, devices: {names}")
    if statistics.was_upgraded:
        value = f"{statistics.version}, but nnfmq was upgraded since it began"
        remedy = "restart it: `nnfmq serve --replace`, or by its service manager; until then it can load nothing more"
        yield Finding("driver", "version", value, FindingState.LIMITED, remedy)
    if statistics.lacks_capabilities:
        remedy = "start it as root with --user, or with AmbientCapabilities of systemd (docs/how-to/several-users.md)"
        yield Finding("driver", "users", "one: no CAP_SETUID and CAP_SETGID for several", FindingState.LIMITED, remedy)
    for name, reason in reasons.items():
        if reason:
            yield Finding("driver", f"device {name}", "busy or offline", FindingState.LIMITED, reason)


def _cache() -> Iterator[Finding]:
    from nnfmq.base.paths import cache_directory, creation_problem
    from nnfmq.driver.cache import programs
    from nnfmq.driver.cache.files import key_problem

    limit = programs.cache_limit_bytes()
    if not limit:
        yield Finding("driver", "cached programs and kernels", f"none: {settings.CACHE_MIB.effective().origin} is 0")
        return
    try:
        problem = key_problem() or creation_problem(cache_directory())
        sizes = [] if problem else programs.entry_sizes()
    except (NnfmqError, OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        problem = str(error)
    if problem:
        remedy = (
            "let this user write there, or set XDG_STATE_HOME and XDG_CACHE_HOME; until then each start of a driver "
            "compiles its models again"
        )
        yield Finding(
            "driver", "cached programs and kernels", f"none are kept: {problem}", FindingState.LIMITED, remedy
        )
        return
    value = f"{len(sizes)}, {sum(sizes) / _MIB:,.1f} MiB of {limit // _MIB:,} MiB at most"
    yield Finding("driver", "cached programs and kernels", value)


def _print(findings: list[Finding], usable: bool, no_color: bool) -> None:
    from rich.text import Text

    screen = console(no_color)
    for part, found in groupby(findings, key=lambda finding: finding.part):
        screen.print(Text(part, "bold"))
        for finding in found:
            screen.print(_finding_text(finding, screen.width), soft_wrap=True)
    screen.print("nnfmq is usable here." if usable else "nnfmq is not usable here: see what is missing above.")


def _finding_text(finding: Finding, width: int) -> Text:
    """Return the lines of a finding. Words, and commands, which are in backticks, are never divided.

    What is longer than a line begins one, and the terminal continues it on the next, so that it can be copied.
    """
    from rich.text import Text

    text = Text(f"  {finding.name:<{_NAME_WIDTH}}  ").append(f"{finding.state:<{_STATE_WIDTH}}", _STYLES[finding.state])
    value = wrapped(finding.value, width - text.cell_len - 2)
    if all(len(line) <= width - text.cell_len - 2 for line in value):
        text.append("  " + f"\n{' ' * (text.cell_len + 2)}".join(value))
    else:
        text.append(_below(wrapped(finding.value, width - len(_INDENT))))
    return text.append(_below(wrapped(finding.remedy, width - len(_INDENT))))


def _below(lines: list[str]) -> str:
    return "".join(f"\n{_INDENT}{line}" for line in lines)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, at most `width` wide unless a word, or a command in backticks, is longer."""
    kept = re.sub("`[^`]*`", lambda command: command[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.wrap(kept, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]
