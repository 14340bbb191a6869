"""Programs that start Ray, in processes of their own: Ray leaves threads and descriptors in the process that used it.

Such a program adopts the orphans of its descendants, ends them all, and prints a report as JSON. Each run is checked
for what it left: a process, a file in its folder for temporary files, a name in /dev/shm.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nnfmq.base.processes import descendants
from support.drivers import short_folder, until
from support.places import ROOT

_MODULES = os.pathsep.join([str(ROOT / "tools"), str(ROOT / "tests" / "lib")])
"""Where programs, and the replicas that they start, find modules."""


def require_ray() -> None:
    """Skip the test if Ray Serve is not installed. Ray is not imported here."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'nnfmq[ray]'")


def ray_report(program: Path, *words: str, limit_s: float = 240.0) -> dict[str, Any]:
    """Run a program; return its report. Fails if it fails, or leaves something."""
    with ray_folder() as folder:
        output = output_of_ray([sys.executable, "-W", "ignore", str(program), *words], folder, limit_s)
        assert [entry.name for entry in folder.iterdir()] == []
    report: dict[str, Any] = json.loads(output)
    return report


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Create a folder for the temporary files of a program; at the end no process that knows it may be left."""
    names = _shared_memory_names()
    with short_folder() as folder:
        yield folder
        until(lambda: not _processes_in(folder), f"no process is left: {_processes_in(folder)}")
    assert _shared_memory_names() <= names


def output_of_ray(command: list[str], folder: Path, limit_s: float) -> str:
    """Run a command with its temporary files in `folder`, the modules of the tools, and Ray's there; return its stdout.

    Fails if it fails, and then ends all processes below it.
    """
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": _MODULES,
        "NO_COLOR": "1",
    }
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except BaseException:
            _kill_with_descendants(process)
            raise
    assert process.returncode == 0, f"status {process.returncode}\n{output[-4000:]}\n{errors[-8000:]}"
    return output


def _kill_with_descendants(process: subprocess.Popen[str]) -> None:
    """Kill a program and all below it. It is stopped first, so that it keeps adopting orphans but starts nothing."""
    process.send_signal(signal.SIGSTOP)
    while running := [pid for pid in descendants(process.pid) if _is_running(pid)]:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.kill()


def _is_running(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _processes_in(folder: Path) -> list[str]:
    """Return the command lines of processes whose environment or command line names `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                command = (entry / "cmdline").read_bytes()
                if os.fsencode(folder) in command + (entry / "environ").read_bytes():
                    found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def _shared_memory_names() -> set[str]:
    return set(os.listdir("/dev/shm"))
