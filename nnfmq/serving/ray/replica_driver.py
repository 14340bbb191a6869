"""ReplicaDriver: how a replica finds the driver of its node; without a cluster it starts one of its own."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from nnfmq.paths import make_runtime_directory
from nnfmq.serving.driver_process import DriverProcess
from nnfmq.serving.ray.node_driver import node_driver
from nnfmq.serving.ray.object_models import object_models, write_version

__all__ = ["ReplicaDriver"]

_ATTEMPTS = 50  # to reach an actor that ends because nobody uses it, or starts again
_PAUSE_S = 0.1


class ReplicaDriver:
    """Finds the driver that serves `models`: a directory, or a mapping as for `app`. Close it."""

    def __init__(self, models: str | os.PathLike[str] | Mapping[str, Any], options: Sequence[str]) -> None:
        self._directory = None if isinstance(models, Mapping) else os.fspath(models)
        self._objects = object_models(models) if isinstance(models, Mapping) else []
        self._options = tuple(options)
        self._process: DriverProcess | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None  # is removed at exit, too

    async def find(self) -> Path:
        """Return the socket of a driver that accepts clients.

        Raises:
            RayActorError: If the node's actor cannot be started.
            MissedDeadline: If the driver does not start; the message says why.
        """
        try:
            serve.get_replica_context()
        except RayServeException:
            return await asyncio.to_thread(self._start_own)
        for _ in range(_ATTEMPTS):
            try:
                return await self._attach()
            except RayActorError:
                await asyncio.sleep(_PAUSE_S)
        return await self._attach()

    async def _attach(self) -> Path:
        names = [f"{model.name}/{model.version}" for model in self._objects]
        actor = node_driver(self._directory, names, options=self._options)
        for model in self._objects:
            await actor.add_model.remote(*model)
        return Path(await actor.attach.remote(os.getpid()))

    def _start_own(self) -> Path:
        directory = self._directory
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="nnfmq-models-", ignore_cleanup_errors=True)
            directory = self._temporary.name
            for model in self._objects:
                write_version(Path(directory), model)
        socket = make_runtime_directory() / f"serve-{os.getpid()}-{time.monotonic_ns()}.sock"
        self._process = DriverProcess(socket, Path(directory), options=self._options)
        self._process.wait_until_running()
        return socket

    def close(self) -> None:
        """End a driver of this process. Idempotent."""
        if self._process is not None:
            self._process.close()
        if self._temporary is not None:
            self._temporary.cleanup()
