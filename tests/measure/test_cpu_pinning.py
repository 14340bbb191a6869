"""The CPUs of processes, and their CPU time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from nnfmq.measure import cpu_pinning


@pytest.fixture
def affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


class TestPlacement:
    @pytest.fixture(autouse=True)
    def _four_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_pinning, "ALLOWED", frozenset((4, 5, 6, 7)))

    @pytest.mark.parametrize(
        ("name", "number", "cpus"),
        [
            ("apart", 0, (4, 5)),
            ("apart", 1, (6, 7)),
            ("apart", 2, (4, 5)),
            ("same", 0, (4, 4)),
            ("same", 5, (5, 5)),
            ("free", 3, (None, None)),
        ],
    )
    def test_clients_get_the_cpus_round_robin(
        self, name: str, number: int, cpus: tuple[int | None, int | None]
    ) -> None:
        assert cpu_pinning.choose(name, number) == cpu_pinning.Cpus(*cpus)

    def test_one_cpu_is_not_two(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_pinning, "ALLOWED", frozenset((4,)))
        assert cpu_pinning.two_cpus() is None
        assert cpu_pinning.choose("apart", 0) == cpu_pinning.Cpus(4, 4)


@pytest.mark.usefixtures("affinity")
def test_a_pinned_process_can_be_unpinned() -> None:
    cpu = min(cpu_pinning.ALLOWED)
    cpu_pinning.pin_process(0, cpu)
    assert os.sched_getaffinity(0) == {cpu}
    cpu_pinning.pin_process(0, None)
    assert os.sched_getaffinity(0) == cpu_pinning.ALLOWED


def test_cpu_time_of_another_process_is_the_same_clock() -> None:
    before = time.process_time_ns()
    assert before <= cpu_pinning.cpu_ns(os.getpid()) <= cpu_pinning.cpu_ns(0)
