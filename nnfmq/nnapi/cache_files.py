"""Compilation caches in files that the application has opened (the support library's setCachingFromFds)."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from nnfmq.deadlines import deadline_after, remaining_s
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.hal.types import Model
from nnfmq.runtime.client_device import Device
from nnfmq.runtime.prepare_arguments import NamedModel
from nnfmq.runtime.prepare_options import PrepareOptions
from nnfmq.runtime.prepared_model import PreparedModel

__all__ = ["OpenCacheFiles", "prepare_with_files"]

_log = logging.getLogger("nnfmq.nnapi")


class OpenCacheFiles(NamedTuple):
    """A token, and fds of cache files, open for reading and writing. The application owns the fds."""

    token: bytes
    model: tuple[int, ...]
    data: tuple[int, ...]


def prepare_with_files(
    device: Device, model: Model | NamedModel, files: OpenCacheFiles, options: PrepareOptions
) -> PreparedModel:
    """Prepare from the files if the device accepts their content, otherwise compile and save to them (CACHE-11).

    Raises:
        InvalidArgument: If an fd is not open.
        NnfmqError: As `Device.prepare`.
    """
    deadline_ns = deadline_after(options.get("timeout"))
    if _are_filled(files):
        try:
            return device.prepare_from_cache(*files, model=model, timeout=remaining_s(deadline_ns))
        except NnfmqError as error:
            _log.info("preparing from scratch, because the cache cannot be used: %s", error)
    with_files = PrepareOptions(**options)
    with_files["token"], with_files["model_cache"], with_files["data_cache"] = files
    with_files["timeout"] = remaining_s(deadline_ns)
    return device.prepare(model, **with_files)


def _are_filled(files: OpenCacheFiles) -> bool:
    try:
        sizes = [os.fstat(fd).st_size for fd in (*files.model, *files.data)]
    except OSError as error:
        raise InvalidArgument(f"a cache file is not open: {error}") from error
    return bool(sizes) and all(sizes)
