"""Whose clients a driver serves, and which accounts and uids it accepts; test_several_users.py has the effects."""

from __future__ import annotations

import fcntl
import logging
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from support.drivers import until

from nnfmq.base import accounts, settings
from nnfmq.base.accounts import ServedUsers, UidPool, take_account
from nnfmq.base.channel import Channel
from nnfmq.hal.errors import InvalidArgument

NOBODY = pwd.getpwnam("nobody").pw_uid


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (settings.USER, settings.WORKER_UIDS, settings.ALLOW_USERS, settings.ALLOW_GROUPS):
        monkeypatch.setenv(setting.variable, "")


def give(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Set settings by their keys."""
    for key, value in values.items():
        monkeypatch.setenv(f"NNFMQ_{key.upper()}", value)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"worker_uids": "0-63"}, "allowed: FIRST-LAST, of 1 to"),
        ({"worker_uids": "70-60"}, "allowed: FIRST-LAST, of 1 to"),
        ({"worker_uids": f"{NOBODY - 3}-{NOBODY + 3}"}, "which is nobody's: choose uids that no account has"),
        ({"worker_uids": "23000-23063", "allow_users": "23001"}, "uids of the driver or of its clients"),
        ({"user": "no-such-account"}, "names the account 'no-such-account', which does not exist; create it"),
        ({"allow_users": "no-such-user"}, "names 'no-such-user', which does not exist on this machine"),
        ({"allow_groups": "no-such-group"}, "names 'no-such-group', which does not exist on this machine"),
    ],
)
def test_what_cannot_hold_is_refused(values: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, **values)
    with pytest.raises(InvalidArgument, match=complaint.replace("(", r"\(")):
        take_account()


def test_root_needs_an_account_to_serve_several_users(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, worker_uids="23000-23063")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(InvalidArgument, match="does not run as root: name an account of its own with --user"):
        take_account()


def test_only_root_changes_to_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, user="nobody")
    monkeypatch.setattr(os, "getuid", lambda: 21001)
    with pytest.raises(InvalidArgument, match="only root can change to it"):
        take_account()


@pytest.mark.parametrize(
    ("uids", "lacking"), [("", r"--worker-uids \(\$NNFMQ_WORKER_UIDS\)"), ("23000-23063", "CAP_SETUID and CAP_SETGID")]
)
def test_without_uids_or_capabilities_one_user_is_served_and_the_log_says_so(
    uids: str, lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give(monkeypatch, worker_uids=uids, allow_users="*", allow_groups="12345")
    monkeypatch.setattr(os, "getuid", lambda: 21001)
    monkeypatch.setattr(accounts, "can_change_uids", lambda: False)
    with caplog.at_level(logging.WARNING, "nnfmq.accounts"):
        assert take_account() is None
    (line,) = caplog.messages
    assert line.startswith("this driver serves uid 21001 only: without") and lacking.replace("\\", "") in line
    assert ServedUsers.of_settings() == ServedUsers()


def test_names_and_numbers_are_accounts_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, allow_users="nobody,21001", allow_groups="root,22001")
    assert ServedUsers.of_settings() == ServedUsers(frozenset((NOBODY, 21001)), frozenset((0, 22001)))
    give(monkeypatch, allow_users="*", allow_groups="")
    assert ServedUsers.of_settings() == ServedUsers(is_open=True)


def test_a_driver_of_one_user_serves_that_one_at_a_socket_that_is_its_own() -> None:
    ours, theirs = Channel.pair()
    with ours, theirs:
        assert ServedUsers().refusal(ours) == ""
        assert ours.peer_groups() >= {os.getgid(), *os.getgroups()}
    assert ServedUsers().socket_mode == 0o600
    assert ServedUsers(is_open=True).socket_mode == 0o666


def test_a_uid_stays_with_its_process_until_that_exits_also_if_it_gives_up_the_lock(tmp_path: Path) -> None:
    pool = UidPool([100], tmp_path / "uids")
    script = "import sys; from nnfmq.base.accounts import note_holder; note_holder(int(sys.argv[1])); input()"
    uid, lock = pool.take()
    words = [sys.executable, "-P", "-c", script, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[lock]) as holder:
        until(lambda: bool((tmp_path / "uids" / "100").read_bytes()), "the process has noted that it has the uid")
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
        pool.release(uid)
        with pytest.raises(OSError, match="are in use"):
            pool.take()
        holder.communicate(b"\n")
    uid, lock = pool.take()
    os.close(lock)
    assert uid == 100


def test_a_uid_is_given_again_only_when_nobody_holds_its_lock(tmp_path: Path) -> None:
    folder = tmp_path / "uids"
    first, second = UidPool(range(100, 102), folder), UidPool(range(100, 102), folder)
    (one, lock), (other, other_lock) = first.take(), second.take()
    assert {one, other} == {100, 101}
    for pool in (first, second):
        with pytest.raises(OSError, match=r"all uids of \$NNFMQ_WORKER_UIDS are in use"):
            pool.take()
    os.close(lock)
    second_uid, second_lock = second.take()
    assert second_uid == one
    for fd in (other_lock, second_lock):
        os.close(fd)
