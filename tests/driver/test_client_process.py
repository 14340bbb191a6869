"""A client's process, as its worker sees it: alive, killed, gone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nnfmq.base.channel import Channel
from nnfmq.driver.process import children
from nnfmq.driver.process.children import ClientProcess


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that waits until its standard input is closed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def watched(child: subprocess.Popen[bytes]) -> Iterator[ClientProcess]:
    made = ClientProcess(os.pidfd_open(child.pid))
    yield made
    made.close()


def wait_for_exit(process: ClientProcess) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    assert poll.poll(30_000)


def test_a_process_that_runs_was_not_killed(watched: ClientProcess) -> None:
    assert not watched.was_killed()


def test_a_stopped_process_was_not_killed(child: subprocess.Popen[bytes], watched: ClientProcess) -> None:
    child.send_signal(signal.SIGSTOP)
    assert not watched.was_killed()


def test_a_process_was_killed_from_SIGKILL_until_it_is_reaped(
    child: subprocess.Popen[bytes], watched: ClientProcess
) -> None:
    child.kill()
    assert watched.was_killed()
    wait_for_exit(watched)
    assert watched.was_killed()
    child.wait()
    assert not watched.was_killed()


def test_another_signal_does_not_kill_in_this_sense(child: subprocess.Popen[bytes], watched: ClientProcess) -> None:
    child.terminate()
    wait_for_exit(watched)
    assert not watched.was_killed()


def test_a_process_that_was_gone_before_is_unknown(child: subprocess.Popen[bytes]) -> None:
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    child.wait()
    gone = ClientProcess(pidfd)
    assert not gone.was_killed()
    gone.close()


def test_another_process_with_the_same_pid_is_not_looked_at(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_has_exited", lambda _pidfd: True)  # as if the pid was reused meanwhile
    unknown = ClientProcess(os.pidfd_open(child.pid))
    child.kill()
    assert not unknown.was_killed()
    unknown.close()


def test_a_closed_process_is_unknown(child: subprocess.Popen[bytes], watched: ClientProcess) -> None:
    watched.close()
    child.kill()
    assert not watched.was_killed()
    watched.close()


def test_the_process_at_the_other_end_of_a_channel() -> None:
    channel, other = Channel.pair()
    with channel, other:
        process = ClientProcess.of(channel)
        assert process is not None and not process.was_killed()
        process.close()


def test_a_peer_without_a_process_is_None(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "open_peer_pidfd", lambda _channel: None)
    channel, other = Channel.pair()
    with channel, other:
        assert ClientProcess.of(channel) is None
