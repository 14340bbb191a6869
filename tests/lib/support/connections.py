"""Connections of tests that have no client."""

from __future__ import annotations

from nnfmq.base.channel import Channel
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.defaults import INTERFACE


def open_connection(channel: Channel, deadline_ns: int | None, interface: str = INTERFACE) -> Connection:
    """Return a connection over `channel`, which it owns, when the driver has replied to Hello; blocks."""
    connection = Connection.start(channel, deadline_ns, interface)
    try:
        connection.watch()
        connection.wait_until_ready(deadline_ns)
    except BaseException:
        connection.close()
        raise
    return connection
