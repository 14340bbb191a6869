"""Memory that a driver shows to its administrators, statistics and traces: they write to neither, in no way."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from support.drivers import LIMIT_S, Daemon

import nnfmq
from nnfmq.base.channel import close_all
from nnfmq.serialize import messages


def trace_area(client: nnfmq.Client, stack: ExitStack) -> int:
    """Return the descriptor of the driver's trace area."""
    fds: list[int] = []
    request = messages.TraceDriver(client.connection.next_call_id())
    deadline_ns = time.monotonic_ns() + int(LIMIT_S * 1e9)
    client.connection.exchange(request, messages.DriverTraced, (), deadline_ns, on_fds=fds.extend)
    stack.callback(close_all, fds)
    (fd,) = fds
    return fd


def statistics(client: nnfmq.Client, stack: ExitStack) -> int:
    return stack.enter_context(client.statistics_memory()).fileno()


@pytest.mark.parametrize("area", [trace_area, statistics])
def test_an_area_is_not_written_by_opening_its_descriptor_again(
    daemon: Daemon, area: Callable[[nnfmq.Client, ExitStack], int]
) -> None:
    with daemon.connect() as client, ExitStack() as stack:
        given = area(client, stack)
        fd = os.open(f"/proc/self/fd/{given}", os.O_RDWR)
        stack.callback(os.close, fd)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"forged", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        for write in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, write)
        mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ).close()
