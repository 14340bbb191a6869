"""A program: Triton's clients at Ray Serve's proxies, over a deployment that computes without a driver.

python ray_proxies.py
"""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as rpc
import tritonclient.http as http
from ray_nodes import free_port, started_nodes
from support.inference_services import ListingService
from support.ray_programs import report_of
from tritonclient.utils import InferenceServerException

from nnfmq.hal.errors import DeadObject
from nnfmq.serving.inference_protocol.grpc import GrpcInferenceService
from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.inference_service import InferRequest, InferResponse

SERVICER = "nnfmq.serving.inference_protocol.grpc.add_to_server"
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
REQUESTS = 6


class HoldingService(ListingService):
    """A service whose model `echo` waits until somebody opens a FIFO for writing."""

    def __init__(self, fifo: Path) -> None:
        super().__init__(failure=DeadObject("the driver died"))
        self.fifo = fifo

    async def infer(self, request: InferRequest) -> InferResponse:
        """Compute by the model's name."""
        if request.model == "echo":
            await asyncio.to_thread(self.fifo.read_bytes)
        return await super().infer(request)


def deployment(fifo: Path) -> Any:
    """Return an application with one replica, which executes one request while one more waits."""
    from ray import serve
    from ray.serve.config import BackpressureConfig

    @serve.deployment(
        max_ongoing_requests=1,
        max_queued_requests=1,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
    )
    @serve.ingress()
    class Replica(GrpcInferenceService):
        def __init__(self, fifo: Path) -> None:
            self.holding = HoldingService(fifo)
            super().__init__(self.holding)

        def __serve_build_asgi_app__(self) -> InferenceApp:
            return InferenceApp(self.holding)

    return Replica.bind(fifo)


def main() -> None:
    """Run it and print the report."""
    print(json.dumps(report_of(run)))


def run(folder: Path) -> dict[str, Any]:
    """Return what each client saw."""
    from ray import serve

    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    with started_nodes(folder) as nodes:
        address = nodes.addresses[0]
        ports = [free_port(address), free_port(address)]
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": address, "port": ports[0]},
            grpc_options={"port": ports[1], "grpc_servicer_functions": [SERVICER]},
        )
        fifo = folder / "fifo"
        os.mkfifo(fifo)
        serve.run(deployment(fifo))
        report = {
            name: seen(protocol, f"{address}:{port}", fifo)
            for name, protocol, port in (("http", http, ports[0]), ("grpc", rpc, ports[1]))
        }
        serve.shutdown()
        return report


def tensors(protocol: Any) -> list[Any]:
    """Return the inputs of a request."""
    tensor = protocol.InferInput("x", list(VALUES.shape), "FP32")
    tensor.set_data_from_numpy(VALUES)
    return [tensor]


def seen(protocol: Any, address: str, fifo: Path) -> dict[str, Any]:
    """Return what a client sees."""
    with protocol.InferenceServerClient(address) as client:
        result = client.infer("add", tensors(protocol), request_id="7", timeout=30_000_000)
        return {
            "live": client.is_server_live(),
            "ready": [client.is_model_ready("add", version) for version in ("", "3", "4")],
            "sum": result.as_numpy("y").tolist(),
            "errors": [status_of(protocol, address, model) for model in ("other", "fail")],
            "overload": sorted(overload(protocol, address, fifo)),
        }


def status_of(protocol: Any, address: str, model: str) -> str:
    """Return the status of one request."""
    with protocol.InferenceServerClient(address) as client:
        try:
            client.infer(model, tensors(protocol))
        except InferenceServerException as error:
            return str(error.status())
        return "OK"


def overload(protocol: Any, address: str, fifo: Path) -> list[str]:
    """Return the statuses of requests at the same time, of which one is executed and at most one waits."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        requests = {pool.submit(status_of, protocol, address, "echo") for _ in range(REQUESTS)}
        unfinished = requests
        while len(unfinished) > 2:
            _, unfinished = wait(unfinished, return_when=FIRST_COMPLETED)
        while unfinished:
            with suppress(OSError):  # there is no reader yet
                os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            _, unfinished = wait(unfinished, timeout=0.05)
        return [request.result() for request in requests]


if __name__ == "__main__":
    main()
