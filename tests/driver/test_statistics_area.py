"""The area of a supervisor: its header, who can write, and the slots of workers that have exited."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnfmq.base.memory import Memory
from nnfmq.driver.process.statistics_area import SharedStatistics, StatisticsArea
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.driver_statistics import read_statistics
from nnfmq.observe.recorder_core import begin_change


def test_a_shared_area_begins_with_free_slots_and_a_header() -> None:
    with SharedStatistics(3, "1.2.3", 777, "compiled 3.11.7 x86_64") as area:
        area.set(layout.CACHE_PROGRAMS, 5)
        area.add(layout.REJECTED_CLIENTS)
        area.add(layout.REJECTED_CLIENTS)
        fd, size = area.open_for_reading()
        with Memory.adopt(fd, size) as memory:
            found = read_statistics(memory.view)
            assert not memory.is_writable
    assert (found.pid, found.version, found.memory_limit_bytes, found.clients) == (os.getpid(), "1.2.3", 777, ())
    assert (found.cache.programs, found.rejected_clients) == (5, 2)
    assert (found.build, found.clients_max) == ("compiled 3.11.7 x86_64", 3)
    area.close()  # idempotent


def test_the_slot_of_a_worker_that_has_exited_is_free() -> None:
    with SharedStatistics(2, "", 0) as area:
        area.take_slot(1)
        area.writer(1).open(5, 1000, 1)
        fd, size = area.open_for_reading()
        with Memory.adopt(fd, size) as memory:
            assert [client.pid for client in read_statistics(memory.view).clients] == [5]
            area.release(1)
            assert read_statistics(memory.view).clients == ()


def test_the_slot_of_a_worker_that_was_killed_during_a_change_is_repaired() -> None:
    with SharedStatistics(2, "", 0) as area:
        area.take_slot(1)
        writer = area.writer(1)
        writer.open(5, 1000, 1)
        begin_change(writer._header)  # and killed
        area.release(1)
        area.take_slot(1)
        area.writer(1).open(6, 1000, 1)
        fd, size = area.open_for_reading()
        with Memory.adopt(fd, size) as memory:
            assert [client.pid for client in read_statistics(memory.view).clients] == [6]


@pytest.mark.parametrize("inherits", [False, True])
def test_only_children_that_are_forked_in_the_block_inherit_the_mapping(inherits: bool) -> None:
    with SharedStatistics(1, "", 0) as area:
        if inherits:
            with area.memory.inherited():
                flags = vm_flags()
        else:
            flags = vm_flags()
        assert ("dc" not in flags) == inherits  # MADV_DONTFORK
        assert "dc" in vm_flags()


def vm_flags() -> list[str]:
    """Return the kernel's flags of the area's mapping."""
    found: list[list[str]] = []
    is_area = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        is_area = layout.DRIVER_PAGE in line if "-" in line.split()[0] else is_area
        if is_area and line.startswith("VmFlags:"):
            found.append(line.split()[1:])
    (flags,) = found
    return flags


def test_an_embedded_driver_gives_a_copy_that_nobody_can_write_to() -> None:
    area = StatisticsArea()
    area.writer(0).open(5, 1000, 1)
    fd, size = area.open_for_reading()
    with Memory.adopt_constant(fd) as memory:
        assert memory.size_bytes == size == layout.area_bytes(1)
        assert [client.pid for client in read_statistics(memory.view).clients] == [5]
        area.writer(0).set_calls(9, 4)
        assert read_statistics(memory.view).clients[0].open_calls == 0
