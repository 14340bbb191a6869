"""Rejected connections: what the log says of them, and that it is limited."""

from __future__ import annotations

import os

import pytest

from nnfmq.base.channel import Channel
from nnfmq.driver.process import pending_clients
from nnfmq.hal.errors import ErrorStatus


def reject(text: str) -> None:
    ours, peer = Channel.pair()
    with peer:
        pending_clients.reject(ours, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text)


def test_of_many_rejections_the_log_has_one_line_in_a_while_and_their_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    monkeypatch.setattr(pending_clients.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(pending_clients, "_limited_log", pending_clients._LimitedLog())
    for number in range(1000):
        reject(f"it is number {number}")
    now_s += pending_clients._LOG_INTERVAL_S
    reject("it is late")
    reject("it is later")
    who = f"(process {os.getpid()}, uid {os.getuid()})"
    assert caplog.messages == [
        f"client rejected: it is number 0 {who}",
        f"client rejected: it is late {who}; 999 more before this one",
    ]
