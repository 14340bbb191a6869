"""Admission of clients to a driver that has many: places, and the clients that they are kept for.

A driver has CLIENTS_MAX places for clients of any kind, of which one process may have $NNFMQ_PROCESS_CLIENTS. The last
one is kept for the driver's own model repository, if it has one. MONITORS_MAX further places are for monitors: clients
of the driver's user or root that look at the driver and can prepare nothing, such as `nnfmq status`. Surplus monitors
take places of clients. Of a driver that serves several users each one has at most $NNFMQ_USER_CLIENTS places.

Arithmetic only; the supervisor asks before it starts a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nnfmq.base import settings

__all__ = ["CLIENTS_MAX", "MONITORS_MAX", "PLACES", "AdmittedClient", "user_clients", "why_full"]

CLIENTS_MAX, MONITORS_MAX = 62, 2
PLACES = CLIENTS_MAX + MONITORS_MAX


class AdmittedClient(NamedTuple):
    """A client that has a place, or wants one.

    Attributes:
        pid: The client's process; 0 for one in another PID namespace.
        uid: Its user.
        is_monitor: Whether it only looks at the driver.
        is_repository: Whether it is the driver's model repository, or an import that it has started.
    """

    pid: int
    uid: int
    is_monitor: bool = False
    is_repository: bool = False


def user_clients(clients_max: int) -> int:
    """Return how many of `clients_max` places one user may have, of a driver that serves several."""
    return settings.USER_CLIENTS.value() or max(1, clients_max // 2)


def why_full(
    client: AdmittedClient,
    taken: Sequence[AdmittedClient],
    has_repository: bool = False,
    clients_max: int = CLIENTS_MAX,
    user_limit: int | None = None,
) -> str:
    """Return why a driver does not serve another client now, for the client; empty if it does.

    `taken` are the places that are taken; `clients_max` is CLIENTS_MAX, or less if there are fewer uids for workers.
    `user_limit` is how many one user may have; None: as many as there are.
    """
    setting = settings.PROCESS_CLIENTS
    limit = setting.value()
    if not client.is_repository and client.pid and sum(other.pid == client.pid for other in taken) >= limit:
        return (
            f"process {client.pid} has {limit} clients already, the limit that ${setting.variable} of the driver sets"
        )
    if user_limit is not None and not client.is_repository:
        own = sum(other.uid == client.uid and not other.is_repository for other in taken)
        if own >= user_limit:
            variable = settings.USER_CLIENTS.variable
            return f"uid {client.uid} has {own} clients already, the limit that ${variable} of the driver sets"
    monitors = sum(other.is_monitor for other in taken)
    if client.is_monitor and monitors < MONITORS_MAX:
        return ""
    clients = len(taken) - min(monitors, MONITORS_MAX)
    if clients >= clients_max:
        return f"this driver serves {clients} clients already"
    is_kept = has_repository and not client.is_repository and not any(other.is_repository for other in taken)
    if is_kept and clients == clients_max - 1:
        return f"this driver serves {clients} clients already, and its model repository has the last place"
    return ""
