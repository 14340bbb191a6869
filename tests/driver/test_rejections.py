"""Rejected connections: what the log says of them, and that it is limited."""

from __future__ import annotations

import logging
import os

import pytest

from nnfmq.base import logs
from nnfmq.base.channel import Channel
from nnfmq.base.logs import BURST, INTERVAL_S, LoggedClient, RateLimit
from nnfmq.driver.process import pending_clients
from nnfmq.hal.errors import ErrorStatus


def reject(text: str) -> None:
    ours, peer = Channel.pair()
    with peer:
        pending_clients.reject(ours, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)


def test_of_many_rejections_the_log_has_some_lines_in_a_while_and_their_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(logging.getLogger("nnfmq.supervisor"), "filters", [RateLimit()])
    for number in range(1000):
        reject(f"it is number {number}")
    logging.getLogger("nnfmq.supervisor").warning("another kind of line")
    now_s += INTERVAL_S
    reject("it is late")
    reject("it is later")
    assert caplog.messages == [
        *(f"client rejected: it is number {number}" for number in range(BURST)),
        "another kind of line",
        f"client rejected: it is late; {1000 - BURST} more before this one",
        "client rejected: it is later",
    ]
    clients = {record.__dict__["client"] for record in caplog.records if record.msg != "another kind of line"}
    assert clients == {LoggedClient(os.getpid(), os.getuid())}
