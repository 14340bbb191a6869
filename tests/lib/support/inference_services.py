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
    CountedTime,
    InferenceModelMetadata,
    InferenceStatistics,
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
TIMES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
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
        given = InferenceTensorMetadata("x", "float32", (-1, 3))
        batch, wait_s = (8, 0.002) if model == "add" else (0, 0.0)
        return InferenceModelMetadata(model, ("3",), (given,), (quantized,), max_batch=batch, max_batch_wait_s=wait_s)

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

    async def model_statistics(self, model: str = "", version: str = "") -> Sequence[InferenceStatistics]:
        """Return numbers, each another one, of the model `add`."""
        if model and not await self.is_model_ready(model, version):
            raise ModelNotFound(f"there is no model {model!r}")
        times = {name: CountedTime(10 * place, 10 * place + 1) for place, name in enumerate(TIMES, start=1)}
        return [InferenceStatistics("add", "3", rows=2**40, executions=5, last_request_ms=7, **times)]


class Addresses(NamedTuple):
    """Where the servers listen."""

    http: str
    grpc: str


@asynccontextmanager
async def protocol_servers(
    app: Any, service: Any, limits: RequestLimits | None = None, **options: Any
) -> AsyncIterator[Addresses]:
    """Serve an ASGI application and a service at free ports, on the running event loop.

    `options` are `tls` and `tokens`; those of HTTP are the application's.
    """
    from nnfmq.serving.inference_protocol.listeners import grpc_server, http_server

    host = "localhost" if options.get("tls") else "127.0.0.1"
    async with (
        http_server(app, "127.0.0.1", 0, tls=options.get("tls")) as web,
        grpc_server(service, "127.0.0.1", 0, limits=limits, **options) as rpc,
    ):
        yield Addresses(f"{host}:{web}", f"{host}:{rpc}")


@contextmanager
def served(app: Any, service: Any, limits: RequestLimits | None = None, **options: Any) -> Iterator[Addresses]:
    """Serve as `protocol_servers`, from a thread of its own."""
    started: queue.SimpleQueue[tuple[Addresses, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        async with protocol_servers(app, service, limits, **options) as addresses:
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
