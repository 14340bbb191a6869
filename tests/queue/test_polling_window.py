"""The polling window and the peer death flag."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.queue import PeerDeathFlag, PollingWindow

WINDOWS: dict[str, Callable[..., PollingWindow]] = {
    "NNFMQ_BURST_CONTROLLER_POLLING_WINDOW": PollingWindow.controller,
    "NNFMQ_BURST_SERVER_POLLING_WINDOW": PollingWindow.server,
}


@pytest.fixture(params=WINDOWS.items(), ids=WINDOWS.keys())
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Callable[..., PollingWindow]]:
    """The variable of one side and how its window is got, on a machine with two CPUs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv(request.param[0], raising=False)
    return request.param


@pytest.mark.parametrize(("text", "ns"), [("0", 0), ("7", 7000), ("50", 50_000), ("", 50_000)])
def test_BUR_4_the_window_is_read_from_the_environment_in_microseconds(
    window: tuple[str, Callable[..., PollingWindow]], monkeypatch: pytest.MonkeyPatch, text: str, ns: int
) -> None:
    monkeypatch.setenv(window[0], text)
    assert window[1]().ns == ns


@pytest.mark.parametrize("text", ["-1", "often", "1.5", "1000000001"])
def test_BUR_4_a_window_that_is_not_allowed_is_rejected(
    window: tuple[str, Callable[..., PollingWindow]], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(window[0], text)
    with pytest.raises(InvalidArgument, match=rf"^\${window[0]} is '{text}'; allowed: 0 to 1000000000; "):
        window[1]()


def test_BUR_4_the_window_is_50_microseconds_by_default(
    window: tuple[str, Callable[..., PollingWindow]],
) -> None:
    assert window[1]().ns == 50_000


def test_BUR_4_an_explicit_window_takes_precedence(
    window: tuple[str, Callable[..., PollingWindow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(window[0], "9")
    assert window[1](2.5).ns == 2500


def test_on_a_machine_with_one_cpu_the_window_is_0(
    window: tuple[str, Callable[..., PollingWindow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setenv(window[0], "50")
    assert (window[1]().ns, window[1](100).ns) == (0, 0)


def test_a_process_that_is_pinned_to_one_cpu_of_several_polls(
    window: tuple[str, Callable[..., PollingWindow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert window[1](100).ns == 100_000


def test_a_peer_death_flag_is_set_once_and_stays_set() -> None:
    flag = PeerDeathFlag()
    before = flag.is_set()
    flag.set()
    flag.set()
    assert (before, flag.is_set()) == (False, True)
