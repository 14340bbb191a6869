"""CPU time, memory, name and children of a process, from /proc at the time of the call."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessUsage", "children", "command_name", "descendants", "process_usage"]

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_EXITED = (FileNotFoundError, ProcessLookupError)
_GONE = (*_EXITED, PermissionError)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process has used: CPU time of all its threads, resident memory, and how many threads it has."""

    cpu_ns: int
    resident_bytes: int
    threads: int


def process_usage(pid: int) -> ProcessUsage | None:
    """Return what a process uses; None if it has exited, or is in another pid namespace."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except _GONE:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may contain anything; proc(5) counts from 1
    user, system, threads, pages = (int(fields[number - 3]) for number in (14, 15, 20, 24))
    return ProcessUsage((user + system) * _TICK_NS, pages * _PAGE_BYTES, threads)


def command_name(pid: int) -> str:
    """Return a short name of a program: its file, or the script or module that Python runs; empty if it has exited."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except _GONE:
        return ""
    name = os.path.basename(words[0])
    if name.startswith("python"):
        name = _script(words[1:]) or name
    return "".join(character if character.isprintable() else "�" for character in name)[:40]


def _script(arguments: list[str]) -> str:
    """Return the script or module that Python runs with these arguments; empty for `-c`, and if there is none."""
    for word in arguments:
        if word == "-c":
            return ""
        if word and not word.startswith("-"):
            return os.path.basename(word.rstrip("/")) or word
    return ""


def children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if it has exited."""
    found: list[int] = []
    with suppress(*_EXITED):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(*_EXITED):  # the thread has ended
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found
