"""Functions of object code called in a child process, which may crash."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
from collections.abc import Sequence

import numpy as np

from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.operations.declaration import Array
from support.forking import fork

__all__ = ["run_natively"]


def run_natively(object_code: bytes, function: str, arguments: Sequence[Array | int]) -> None:
    """Call a function with the addresses of arrays, which it may change, and numbers.

    Raises:
        AssertionError: If it is ended by a signal.
    """
    loaded = LoadedCode([object_code])
    shared = {
        index: mmap.mmap(-1, max(argument.nbytes, 1))
        for index, argument in enumerate(arguments)
        if isinstance(argument, np.ndarray)
    }
    values = [0 if index in shared else int(argument) for index, argument in enumerate(arguments)]
    for index, memory in shared.items():
        memory[:] = np.asarray(arguments[index]).tobytes()
        values[index] = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    status = _status_of_child(loaded.address(function), values)
    assert not os.WIFSIGNALED(status), f"signal {os.WTERMSIG(status)}"
    assert status == 0
    for index, memory in shared.items():
        array = np.asarray(arguments[index])
        array[...] = np.frombuffer(memory[:], array.dtype).reshape(array.shape)


def _status_of_child(address: int, arguments: Sequence[int]) -> int:
    child = fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # it would print a stack
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)
        os._exit(0)
    finally:
        os._exit(1)
