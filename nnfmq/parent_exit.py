"""What the kernel does with a process when its parent exits: PR_SET_PDEATHSIG of prctl(2).

SIGKILL ends the process, also if it is stopped; SIGCONT only continues it, so that it can notice by itself whether to
end. The kernel sends the signal when the *thread* exits that started the process, so that thread must live as long as
the process should.
"""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["request_signal_at_parent_exit"]

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def request_signal_at_parent_exit(number: signal.Signals) -> None:
    """Let the kernel send `number` to this process when its parent exits; nothing is sent if it has exited before.

    Raises:
        OSError: If the kernel refuses.
    """
    if _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
