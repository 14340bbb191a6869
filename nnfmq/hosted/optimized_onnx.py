"""ONNX models as ONNX Runtime has optimized them, with the weights as its kernels read them, in the driver's cache.

A session on the CPU optimizes the graph, and copies ("prepacks") weights in the order in which its kernels read them:
each worker would have a copy of its own, and executions of several clients would displace each other's from the CPU's
caches. So the first session of a file writes what it has made: the model, and a file with its weights, both as given
and prepacked. Other sessions map that file, whose pages all workers share, and neither optimize nor copy.

ONNX Runtime writes to paths, which are those of memory here: workers create no files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnfmq.base.memory import Memory, empty_memfd, read_from_memfd
from nnfmq.base.onnx_fields import external_files
from nnfmq.base.ownership import Closable
from nnfmq.driver.cache.mapped_files import store_file, stored_file
from nnfmq.engines import memory

__all__ = ["SAVED_BYTES_MIN", "Writing", "mapped_weights"]

SAVED_BYTES_MIN = 1 << 20
"""Smaller models are optimized again by each worker: there is little to share."""
_WEIGHT_BYTES_MIN = 64 << 10  # smaller tensors stay in the model: each of the others is a mapping of its own
_NAME_LENGTH = 64  # of a stored file
_FOLDER = "/proc/self/fd"


class Writing(Closable):
    """Memory to which a session writes the optimized model when it is initialized."""

    def __init__(self, session_options: Any, model_bytes: int) -> None:
        """Let the session with these options write; the client is charged for it until `close`.

        Raises:
            ResourceExhausted: If the client's limit does not allow it, or no file descriptor is left.
        """
        self._fds: list[int] = []
        self._charge = memory.charge(2 * model_bytes)  # of the weights as given and prepacked
        self._fds = [model := empty_memfd("nnfmq-onnx-model")]
        self._fds.append(weights := empty_memfd("nnfmq-onnx-weights"))
        self._name = _padded(weights)
        session_options.optimized_model_filepath = f"{_FOLDER}/{model}"
        for key, value in (
            ("optimized_model_external_initializers_file_name", self._name),
            ("optimized_model_external_initializers_min_size_in_bytes", str(_WEIGHT_BYTES_MIN)),
            ("save_external_prepacked_constant_initializers", "1"),
        ):
            session_options.add_session_config_entry(f"session.{key}", value)

    def stored(self) -> bytes | None:
        """Store the weights that the session has written; return the model, or None if there is nothing to share."""
        model_fd, weights_fd = self._fds
        if not os.fstat(weights_fd).st_size:
            return None
        with Memory.sealed(os.dup(weights_fd)) as weights:
            name = store_file(weights)
        if name is None:
            return None
        model = bytes(read_from_memfd(model_fd, os.fstat(model_fd).st_size))
        return model.replace(self._name.encode(), name.encode())  # of the same length

    def close(self) -> None:
        """Free the memory."""
        self._charge = None
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        self.close()


def _padded(fd: int) -> str:
    """Return the name of an fd's file in /proc/self/fd, as long as that of a stored file."""
    digits = str(fd)
    pairs, odd = divmod(_NAME_LENGTH - len(digits), 2)
    return "./" * pairs + digits if not odd else "./" * (pairs - 1) + ".//" + digits


@contextmanager
def mapped_weights(onnxruntime: Any, session_options: Any, model: bytes) -> Iterator[None]:
    """Let a session of the saved model, initialized in the block, map its weights.

    Raises:
        GeneralFailure: If the cache does not have them any more, or others.
        InvalidArgument: If the model cannot be read.
    """
    (name,) = external_files(memoryview(model))
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with stored_file(name) as path:
        folder = "session.model_external_initializers_file_folder_path"
        session_options.add_session_config_entry(folder, str(path.parent))
        yield
