"""The supervisor's decisions about the classes of clients (`hal.client_class`), and what it does to a worker.

A rule of $NNFMQ_CLIENT_CLASSES gives a client its class, which is also the highest that it gets by a request. Without
one it is normal, and may request interactive if $NNFMQ_INTERACTIVE_UIDS has its user. A client may always request less.
The driver's user and root decide about other clients without limits.

A client's name in a rule is that of its program, which a program chooses itself: a rule by name alone is about all
users' programs.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from types import MappingProxyType

from nnfmq.base import settings
from nnfmq.base.accounts import as_owner
from nnfmq.base.channel import Credentials
from nnfmq.base.logs import rate_limited
from nnfmq.base.scheduling import BATCH, Scheduling, set_scheduling
from nnfmq.driver.process.children import ChildProcess
from nnfmq.hal.client_class import ClientClass

__all__ = ["SCHEDULING", "class_without_request", "schedule_worker", "why_not_changed", "why_not_given"]

SCHEDULING = MappingProxyType(
    {
        ClientClass.INTERACTIVE: Scheduling(os.SCHED_OTHER, 100_000),
        ClientClass.NORMAL: Scheduling(os.SCHED_OTHER, 300_000),
        ClientClass.BATCH: BATCH,
    }
)
"""What the threads of a worker ask of the kernel's scheduler, by the class of its client.

The slices are shorter than the kernel's, that of interactive the shortest that it takes: of two threads, the one whose
slice is much shorter interrupts the other when it wakes. None gets more time for it.
"""
_log = rate_limited("nnfmq.supervisor")


def class_without_request(client: Credentials, program: str) -> ClientClass:
    """Return the class of a client that asks for none. `program` is the name that it gives itself."""
    return _by_rule(client, program) or ClientClass.NORMAL


def why_not_given(client: Credentials, program: str, requested: ClientClass) -> str:
    """Return why a client does not get a class by requesting it, for the client; empty if it does."""
    by_rule, name = _by_rule(client, program), requested.name.lower()
    if by_rule is not None and requested > by_rule:
        rules = settings.CLIENT_CLASSES.effective().origin
        return f"this client does not get the class {name}: it has {by_rule.name.lower()} by {rules}"
    if by_rule is None and requested is ClientClass.INTERACTIVE and not _may_be_interactive(client.uid):
        setting = settings.INTERACTIVE_UIDS
        return (
            f"uid {client.uid} does not get the class {name} by requesting it: allowed are {_interactive_text()} "
            f"({setting.name} of the driver); ask for normal or batch, or let the driver's user change the class with "
            "`nnfmq client set`"
        )
    return ""


def why_not_changed(
    requester: Credentials, changed: Credentials, program: str, requested: ClientClass, *, is_own: bool
) -> str:
    """Return why a client may not change a client's class, for the one that asks; empty if it may."""
    if is_own:
        return why_not_given(changed, program, requested)
    if requester.uid not in (os.getuid(), 0):
        return (
            f"uid {requester.uid} does not administer this driver, which runs as {os.getuid()}: a client may change "
            "its own class only"
        )
    return ""


def _by_rule(client: Credentials, program: str) -> ClientClass | None:
    for rule in settings.CLIENT_CLASSES.value() or ():
        who, _, name = rule.rpartition("=")
        if _is_about(who, client.uid, program):
            return ClientClass[name.upper()]
    return None


def _is_about(who: str, client_uid: int, client_program: str) -> bool:
    """Return whether a rule for a uid, a program, or UID/PROGRAM is about a client."""
    uid, separator, program = who.rpartition("/")
    if not separator and program.isdecimal():
        return program == str(client_uid)
    return uid in ("", str(client_uid)) and program == client_program


def _may_be_interactive(uid: int) -> bool:
    allowed = settings.INTERACTIVE_UIDS.value()
    return uid in (os.getuid(), 0) if allowed is None else str(uid) in allowed


def _interactive_text() -> str:
    allowed = settings.INTERACTIVE_UIDS.value()
    if allowed is None:
        return f"uid {os.getuid()} and root"
    return ", ".join(f"uid {uid}" for uid in allowed) or "none"


def schedule_worker(worker: ChildProcess, client_class: ClientClass) -> None:
    """Let the kernel's scheduler treat a worker's threads as its client's class says. Logs an error."""
    try:
        as_owner(worker.uid, partial(set_scheduling, worker.pid, SCHEDULING[client_class]))
    except OSError as error:
        level = logging.DEBUG if client_class is ClientClass.NORMAL else logging.WARNING  # nobody asked for normal
        _log.log(level, "worker %d keeps its scheduling: %s", worker.pid, error.strerror)
