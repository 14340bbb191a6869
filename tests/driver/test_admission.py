"""Which clients are served when a driver has many: for each kind of client, up to which number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nnfmq.base import settings
from nnfmq.driver.process.admission import CLIENTS_MAX, MONITORS_MAX, AdmittedClient, user_clients, why_full


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.PROCESS_CLIENTS.variable, "3")


def client(pid: int) -> AdmittedClient:
    return AdmittedClient(pid, 1000)


def monitor(pid: int) -> AdmittedClient:
    return AdmittedClient(pid, 0, is_monitor=True)


def repository(pid: int) -> AdmittedClient:
    return AdmittedClient(pid, 1000, is_repository=True)


def admitted(kind: Callable[[int], AdmittedClient], taken: list[AdmittedClient], has_repository: bool = False) -> int:
    """Return how many more clients of a kind are served, each of a process of its own."""
    places = list(taken)
    while not why_full(kind(1_000_000 + len(places)), places, has_repository):
        places.append(kind(1_000_000 + len(places)))
    return len(places) - len(taken)


def test_clients_leave_places_to_monitors() -> None:
    assert admitted(client, []) == CLIENTS_MAX
    full = [client(pid) for pid in range(1, CLIENTS_MAX + 1)]
    assert admitted(monitor, full) == MONITORS_MAX
    assert "serves 62 clients already" in why_full(client(1000), full)


def test_monitors_take_places_of_clients_when_their_own_are_taken_and_no_more() -> None:
    assert admitted(monitor, []) == CLIENTS_MAX + MONITORS_MAX
    some = [monitor(pid) for pid in range(1, MONITORS_MAX + 11)]
    assert admitted(client, some) == CLIENTS_MAX - 10


def test_the_last_place_is_kept_for_the_repository() -> None:
    assert admitted(client, [], has_repository=True) == CLIENTS_MAX - 1
    almost = [client(pid) for pid in range(1, CLIENTS_MAX)]
    assert "its model repository has the last place" in why_full(client(1000), almost, has_repository=True)
    assert why_full(repository(1000), almost, has_repository=True) == ""
    assert admitted(client, [repository(1)], has_repository=True) == CLIENTS_MAX - 1


@pytest.mark.parametrize("kind", [client, monitor])
def test_a_process_has_a_limit_but_not_the_repository_and_not_one_that_is_unknown(
    kind: Callable[[int], AdmittedClient],
) -> None:
    assert "process 7 has 3 clients already, the limit that $NNFMQ_PROCESS_CLIENTS" in why_full(kind(7), [kind(7)] * 3)
    assert why_full(kind(8), [kind(7)] * 3) == ""
    assert why_full(repository(7), [repository(7)] * 3, has_repository=True) == ""
    assert why_full(client(0), [client(0)] * 3) == ""


def test_one_user_has_a_limit_of_his_own_but_not_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.USER_CLIENTS.variable, "")
    limit = user_clients(CLIENTS_MAX)
    assert limit == CLIENTS_MAX // 2
    taken = [client(pid) for pid in range(1, limit + 1)]
    assert "uid 1000 has 31 clients already, the limit that $NNFMQ_USER_CLIENTS" in why_full(
        client(1000), taken, user_limit=limit
    )
    assert why_full(client(1000), taken) == ""
    assert why_full(AdmittedClient(1000, 1001), taken, user_limit=limit) == ""
    assert why_full(repository(1000), taken, has_repository=True, user_limit=limit) == ""
