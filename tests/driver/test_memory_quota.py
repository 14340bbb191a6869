"""The quota of memory that the driver holds for one client."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack

import pytest

from nnfmq.base import settings
from nnfmq.base.memory import Memory
from nnfmq.driver.memory.quota import MemoryQuota, MemoryShare, MemoryShares, quota_limit_bytes, total_limit_bytes
from nnfmq.hal.errors import InvalidArgument, ResourceExhaustedPersistent, ResourceExhaustedTransient
from nnfmq.hal.types import Protection
from nnfmq.serialize.messages import MemoryData


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
    monkeypatch.setenv(settings.CLIENT_MEMORY_MIB.variable, given)
    assert quota_limit_bytes() == limit


@pytest.mark.parametrize("given", ["-1", "lots"])
def test_a_limit_that_is_not_allowed_is_rejected(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.MEMORY_MIB.variable, given)
    with pytest.raises(InvalidArgument, match=rf"^\$NNFMQ_MEMORY_MIB is '{given}'; allowed: 0 to "):
        total_limit_bytes()


def test_the_default_limits_are_a_quarter_of_the_machine_s_memory_and_half_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in (settings.CLIENT_MEMORY_MIB.variable, settings.MEMORY_MIB.variable):
        monkeypatch.setenv(variable, "")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    assert (total_limit_bytes(), quota_limit_bytes()) == (total, total // 2)


def test_a_client_may_have_half_of_the_total_unless_its_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CLIENT_MEMORY_MIB.variable, raising=False)
    monkeypatch.setenv(settings.MEMORY_MIB.variable, "6")
    assert quota_limit_bytes() == 3 << 20


def test_a_size_above_the_limit_is_refused_for_good() -> None:
    with pytest.raises(ResourceExhaustedPersistent, match=r"10001 bytes more .* the limit is 10000\. .*NNFMQ_CLIENT"):
        MemoryQuota(10_000).charge(10_001)


def share(shares: MemoryShares, slot: int, resources: ExitStack) -> MemoryShare:
    """Return a worker's side of its slot, in this process."""
    reading = resources.enter_context(Memory.adopt(os.dup(shares.memory.fileno()), protection=Protection.READ))
    return MemoryShare(shares.own_words(slot), reading, 8000, slot)


@pytest.mark.parametrize(("written", "counted"), [(-(2**62), 0), (2**62, 8000), (7000, 7000)])
def test_what_another_worker_writes_counts_as_what_its_client_could_have_at_most(
    written: int, counted: int, resources: ExitStack
) -> None:
    shares = resources.enter_context(MemoryShares(10_000, slots=2))
    hostile, own = shares.take(), shares.take()
    shares.own_words(hostile)[0] = written
    assert share(shares, own, resources).total() == counted


def test_all_clients_together_have_one_limit(resources: ExitStack) -> None:
    shares = resources.enter_context(MemoryShares(10_000, slots=2))
    slots = [shares.take(), shares.take()]
    first, second = (MemoryQuota(8000, share(shares, slot, resources)) for slot in slots)
    held = [first.charge(6000), second.charge(3000)]
    with pytest.raises(ResourceExhaustedTransient, match=r"would make 10001 of all clients' .*--memory"):
        second.charge(1001)
    held.append(second.charge(1000))
    shares.release(slots[0])  # its worker has exited
    held.append(second.charge(4000))
    assert second.charged_bytes == 8000


def test_the_clients_of_one_user_have_a_limit_together_and_take_no_more_from_others(resources: ExitStack) -> None:
    shares = resources.enter_context(MemoryShares(10_000, slots=4, user_limit=6000))
    slots = [shares.take(uid) for uid in (1001, 1001, 1002)]
    first, second, other = (MemoryQuota(8000, share(shares, slot, resources)) for slot in slots)
    held = [first.charge(4000), second.charge(2000)]
    with pytest.raises(ResourceExhaustedTransient, match=r"would make 6001 of this user's .* \$NNFMQ_USER_MEMORY_MIB"):
        second.charge(1)
    held.append(other.charge(4000))
    shares.own_words(slots[0])[0] = 2**62  # a compromised worker
    other.charge(0)
    with pytest.raises(ResourceExhaustedTransient, match="of all clients'"):
        other.charge(1)
