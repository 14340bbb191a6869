"""The CPUs of processes, and their CPU time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from nnfmq.lab import placement


@pytest.fixture
def affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


class TestPlacement:
    @pytest.fixture(autouse=True)
    def _four_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "ALLOWED", frozenset((4, 5, 6, 7)))

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
        assert placement.choose(name, number) == placement.Cpus(*cpus)

    def test_one_cpu_is_not_two(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "ALLOWED", frozenset((4,)))
        assert placement.two_cpus() is None
        assert placement.choose("apart", 0) == placement.Cpus(4, 4)


@pytest.mark.usefixtures("affinity")
def test_a_pinned_process_can_be_unpinned() -> None:
    cpu = min(placement.ALLOWED)
    placement.pin_process(0, cpu)
    assert os.sched_getaffinity(0) == {cpu}
    placement.pin_process(0, None)
    assert os.sched_getaffinity(0) == placement.ALLOWED


def test_cpu_time_of_another_process_is_the_same_clock() -> None:
    before = time.process_time_ns()
    assert before <= placement.cpu_ns(os.getpid()) <= placement.cpu_ns(0)
