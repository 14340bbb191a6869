"""CPU time, memory and names of processes, from /proc."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nnfmq.base.processes import command_name, process_usage

NO_PID = 2**22 + 1  # above the kernel's limit


def test_the_usage_of_this_process_is_what_the_kernel_says_by_other_means() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    usage = process_usage(os.getpid())
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert usage is not None
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert before.ru_utime + before.ru_stime - 2 * tick_s <= usage.cpu_ns / 1e9
    assert usage.cpu_ns / 1e9 <= after.ru_utime + after.ru_stime + 2 * tick_s
    assert 0 < usage.resident_bytes <= 1024 * after.ru_maxrss + 8 * resource.getpagesize() * 64
    assert usage.threads == len(os.listdir("/proc/self/task"))


def test_a_process_that_has_exited_has_neither_usage_nor_name() -> None:
    assert process_usage(NO_PID) is None
    assert command_name(NO_PID) == ""


PROGRAM = "print('ready', flush=True); input()"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["script.py", "--option"], "script.py"),
        (["-B", "{folder}/script.py"], "script.py"),
        (["-m", "script"], "script"),
        (["-c", PROGRAM, "word"], Path(sys.executable).name),
        (["-X", "utf8", "-W", "error", "script.py", "-m", "word"], "script.py"),
        (["-BW", "error", "-Xutf8", "-Wdefault", "script.py"], "script.py"),
        (["--check-hash-based-pycs", "never", "-Bm", "script"], "script"),
        (["-B", "-mscript", "word"], "script"),
        (["-Bc", PROGRAM, "word"], Path(sys.executable).name),
    ],
    ids=[
        "a script",
        "a path",
        "a module",
        "a text",
        "options with values",
        "joined options",
        "a module after options",
        "a joined module",
        "a joined text",
    ],
)
def test_a_python_program_is_called_by_what_it_runs(arguments: list[str], name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    words = [word.format(folder=tmp_path) for word in arguments]
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert command_name(process.pid) == name
        process.communicate(b"\n")


def test_another_program_is_called_by_its_file_without_control_characters(tmp_path: Path) -> None:
    program = tmp_path / "a\x1bcat"
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"ready\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        assert command_name(process.pid) == "a�cat"
        process.communicate()
