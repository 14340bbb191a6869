"""The quota of memory that the driver holds for one client."""

from __future__ import annotations

import fcntl
import os

import pytest

from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.serialize.messages import MemoryData
from nnfmq.service import memory_quota
from nnfmq.service.memory_quota import MemoryQuota


def sealed(size_bytes: int) -> int:
    fd = os.memfd_create("received", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def test_received_memory_is_charged_by_the_size_of_its_file_until_it_is_closed() -> None:
    quota = MemoryQuota(10_000)
    with quota.adopt_all([sealed(6000)], [MemoryData(100)])[0] as memory:
        assert memory.size_bytes == 100
        assert quota.charged_bytes == 6000
    assert quota.charged_bytes == 0


def test_memory_beyond_the_limit_is_rejected_and_not_charged() -> None:
    quota = MemoryQuota(10_000)
    with quota.adopt_mapped([sealed(6000)])[0]:
        with pytest.raises(ResourceExhaustedTransient, match=r"would make 10001 .* the limit is 10000"):
            quota.adopt_mapped([sealed(4001)])
        with quota.adopt_mapped([sealed(4000)])[0]:
            assert quota.charged_bytes == 10_000
    assert quota.charged_bytes == 0


def test_several_memories_are_charged_together_or_not_at_all() -> None:
    quota = MemoryQuota(10_000)
    fds = [sealed(size) for size in (1000, 2000, 9000, 10)]
    with pytest.raises(ResourceExhaustedTransient):
        quota.adopt_mapped(fds)
    assert quota.charged_bytes == 0
    assert [os.path.lexists(f"/proc/self/fd/{fd}") for fd in fds] == [False] * 4


@pytest.mark.parametrize(("given", "limit"), [("3", 3 << 20), ("0", 0)])
def test_the_limit_can_be_set(given: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory_quota.LIMIT_VARIABLE, given)
    assert memory_quota.quota_limit_bytes() == limit


@pytest.mark.parametrize("given", ["", "-1", "lots"])
def test_an_invalid_limit_is_replaced_by_half_of_the_machine_s_memory(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(memory_quota.LIMIT_VARIABLE, given)
    assert memory_quota.quota_limit_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
