"""An InferenceService for tests of the network protocols, and real servers over one: uvicorn and grpc.aio on loopback.

The service computes by the name of the model: `add` adds 1, `echo` returns its inputs under their names, `fail` raises
the error that the test chose.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nnfmq.hal.errors import ModelNotFound
from nnfmq.serving.inference_protocol.tensors import RequestLimits
from nnfmq.serving.inference_service import (
    InferenceModelMetadata,
    InferenceTensorMetadata,
    InferRequest,
    InferResponse,
    ModelIndexEntry,
    ServerMetadata,
)

MODELS = ("add", "echo", "fail")
INDEX = (
    ModelIndexEntry("add", "3", "READY"),
    ModelIndexEntry("new", "", "LOADING"),
    ModelIndexEntry("broken", "", "UNAVAILABLE", "no operator 12"),
)
_START_S = 30


@dataclass
class ComputingService:
    """The service. `requests` has what reached it; `failure` is raised by the model `fail`; `ready` is its state."""

    failure: BaseException = field(default_factory=lambda: ModelNotFound("no failure was chosen"))
    ready: bool = True
    requests: list[InferRequest] = field(default_factory=list)

    async def is_live(self) -> bool:
        """Return whether the server runs."""
        return self.ready

    async def is_ready(self) -> bool:
        """Return whether the server can serve requests."""
        return self.ready

    async def is_model_ready(self, model: str, version: str = "") -> bool:
        """Return whether there is such a model; the only version is 3."""
        return self.ready and model in MODELS and version in ("", "3")

    async def server_metadata(self) -> ServerMetadata:
        """Return a name and a release."""
        return ServerMetadata("nnfmq", "1.2.3", ("statistics",))

    async def model_metadata(self, model: str, version: str = "") -> InferenceModelMetadata:
        """Return inputs and outputs of the model `add`."""
        if not await self.is_model_ready(model, version):
            raise ModelNotFound(f"there is no model {model!r}")
        quantized = InferenceTensorMetadata("y", "uint8", (-1, 3), {"scale": 0.5, "zero_point": 7})
        return InferenceModelMetadata(model, ("3",), (InferenceTensorMetadata("x", "float32", (-1, 3)),), (quantized,))

    async def infer(self, request: InferRequest) -> InferResponse:
        """Compute by the model's name."""
        self.requests.append(request)
        if request.model == "fail":
            raise type(self.failure)(*self.failure.args)  # the original would keep this frame, and the server with it
        if request.model not in MODELS:
            raise ModelNotFound(f"there is no model {request.model!r}")
        results = dict(request.inputs) if request.model == "echo" else {"y": request.inputs["x"] + 1}
        chosen = {name: results[name] for name in request.outputs or results}
        return InferResponse(request.model, "3", chosen, request.id)


class ListingService(ComputingService):
    """A service that can list its models, too."""

    async def model_index(self) -> Sequence[ModelIndexEntry]:
        """Return three models, one of them ready."""
        return INDEX


class Addresses(NamedTuple):
    """Where the servers listen."""

    http: str
    grpc: str


@asynccontextmanager
async def protocol_servers(app: Any, service: Any, limits: RequestLimits | None = None) -> AsyncIterator[Addresses]:
    """Serve an ASGI application with uvicorn, and a service with grpc.aio, on the running event loop."""
    import grpc
    import uvicorn

    from nnfmq.serving.inference_protocol.grpc import GrpcInferenceService, add_to_server, server_options
    from nnfmq.serving.inference_protocol.web_connections import LimitedConnection

    rpc = grpc.aio.server(options=server_options(limits))
    add_to_server(GrpcInferenceService(service, limits=limits), rpc)
    rpc_port = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=LimitedConnection, ws="none", lifespan="on", log_config=None
    )
    web = uvicorn.Server(config)
    serving = asyncio.create_task(web.serve())
    try:
        while not web.started and not serving.done():
            await asyncio.sleep(0)
        web_port = web.servers[0].sockets[0].getsockname()[1]
        yield Addresses(f"127.0.0.1:{web_port}", f"127.0.0.1:{rpc_port}")
    finally:
        web.should_exit = True
        await serving
        await rpc.stop(None)


@contextmanager
def served(app: Any, service: Any, limits: RequestLimits | None = None) -> Iterator[Addresses]:
    """Serve as `protocol_servers`, from a thread of its own."""
    started: queue.SimpleQueue[tuple[Addresses, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        async with protocol_servers(app, service, limits) as addresses:
            stop = asyncio.Event()
            started.put((addresses, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="protocol-servers")
    thread.start()
    addresses, loop, stop = started.get(timeout=_START_S)
    try:
        yield addresses
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
