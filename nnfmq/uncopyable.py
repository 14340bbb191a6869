"""Uncopyable: the base of objects that own a file descriptor, a mapping or a connection."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class Uncopyable:
    """An object that cannot be copied or pickled.

    A copy would close what the original owns, and a pickled descriptor would be another file's in the process that
    unpickles it.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise TypeError. `copy` and `pickle` call this, and everything that is built on them."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns file descriptors or memory of this process"
        )
