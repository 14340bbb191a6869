"""Ray's model multiplexing for replicas: which models each keeps open, and that Ray sends requests where they are.

A request with a multiplexed model id goes to a replica that has the model open, if there is one. A replica that opens
one model too many closes the least recently used one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray import serve

if TYPE_CHECKING:
    from nnfmq.serving.model_server import ModelServer

__all__ = ["MultiplexedModel", "with_multiplexing"]


class MultiplexedModel:
    """A model that a replica keeps open until Ray drops this object, on any thread. Made on the server's loop."""

    def __init__(self, server: ModelServer, name: str) -> None:
        self._server, self._name = server, name
        self._loop = asyncio.get_running_loop()
        self._is_dropped = False

    def __del__(self) -> None:
        """Close the model. Ray calls this when it drops the model; the garbage collector does it again."""
        if not self._is_dropped and not self._loop.is_closed():
            self._is_dropped = True
            asyncio.run_coroutine_threadsafe(self._server.close_model(self._name), self._loop)


def with_multiplexing(replica: type[Any], max_models: int) -> type[Any]:
    """Return a class of replicas that keep at most `max_models` models open for multiplexed requests."""

    class MultiplexingReplica(replica):  # type: ignore[misc]  # its base class is an argument
        """A replica with Ray's multiplexing."""

        @serve.multiplexed(max_num_models_per_replica=max_models)  # type: ignore[untyped-decorator]
        async def _load(self, name: str) -> MultiplexedModel:
            await self._server.open_model(name)
            return MultiplexedModel(self._server, name)

    MultiplexingReplica.__name__ = MultiplexingReplica.__qualname__ = replica.__name__
    return MultiplexingReplica
