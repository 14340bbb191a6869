"""The caches of a driver that serves several users: a folder and a key for each uid.

    CACHE/users/UID/nnfmq    the programs that clients of this uid have compiled
    STATE/users/UID/nnfmq    the key that seals them

CACHE and STATE are those of the driver's account, and only that account may enter any of them: the supervisor opens
files for a worker, and a child process of the supervisor writes them. A worker has the key of its client's uid, from
before it gives up the driver's account. So a compromised worker forges programs of that uid at
most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nnfmq.base import settings
from nnfmq.base.paths import make_cache_directory, make_state_directory

__all__ = ["cache_of"]

_FOLDER = "users"


@contextmanager
def cache_of(uid: int | None) -> Iterator[None]:
    """Let the cache and its key be those of the clients of `uid` in the block; None: the driver's own, as before.

    Raises:
        DeviceUnavailable: If other users can access the driver's directories.
        OSError: If they cannot be created.
        RuntimeError: If the driver's account has no home directory.
    """
    if uid is None:
        yield
        return
    cache, state = (made / _FOLDER / str(uid) for made in (make_cache_directory(), make_state_directory()))
    with settings.XDG_CACHE_HOME.exported(str(cache)), settings.XDG_STATE_HOME.exported(str(state)):
        yield
