"""Device status (DEV-14): a page with a word of 8 bytes for each device, which all workers of a driver map.

Each word has, in this order, the status in effect (one byte, 0 = AVAILABLE), the status that is kept when a temporary
change ends (one byte), two bytes of padding, and the pid of the worker whose client made the temporary change (0: there
is none). A word is written by one store of 8 bytes. A change ends with the client that made it: its worker ends it when
the session ends, and the supervisor when the worker has exited.

Every prepared model and buffer keeps a view of the first byte of its device's word, so that each execution can check it
at almost no cost.
"""

from __future__ import annotations

import struct

from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.hal.types import DeviceStatus

UNAVAILABLE_MESSAGE = "the device is busy or offline"
ALWAYS_AVAILABLE = memoryview(bytes(1))
"""The status byte of prepared models and buffers that belong to no device, as in tests."""
WORD_BYTES = 8
_WORD = struct.Struct("=BBxxI")
_UINT64 = struct.Struct("=Q")


def require_available(status_byte: memoryview) -> None:
    """Check the device's status.

    Raises:
        DeviceUnavailable: If the device is BUSY or OFFLINE.
    """
    if status_byte[0]:
        raise DeviceUnavailable(UNAVAILABLE_MESSAGE)


def keep_status(word: memoryview, status: DeviceStatus) -> None:
    """Set a device's status until the next change."""
    _write(word, status, status, 0)


def set_temporary_status(word: memoryview, status: DeviceStatus, worker_pid: int) -> None:
    """Set a device's status until `end_changes` is called for `worker_pid`, or until the next change."""
    _write(word, status, word[1], worker_pid)


def end_changes(page: memoryview, worker_pid: int) -> None:
    """Restore the kept status of all devices whose status `worker_pid` has changed temporarily."""
    for begin in range(0, len(page), WORD_BYTES):
        word = page[begin : begin + WORD_BYTES]
        _, kept, changed_by = _WORD.unpack(word)
        if changed_by == worker_pid:
            _write(word, kept, kept, 0)


def _write(word: memoryview, status: int, kept: int, worker_pid: int) -> None:
    word.cast("Q")[0] = _UINT64.unpack(_WORD.pack(status, kept, worker_pid))[0]
