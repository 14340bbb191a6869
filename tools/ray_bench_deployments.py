"""Deployments of ray_bench.py: one that computes nothing, one that runs LiteRT inside its replicas, and nnfmq's.

Over HTTP the first two take the input's bytes and return the output's. Replicas import this module from the folder of
the script that was started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

Array = np.ndarray[Any, Any]
ONGOING = 100


def empty(**options: Any) -> Any:
    """Return the deployment that computes nothing. `bind` takes its output."""
    return serve.deployment(EmptyReplica, max_ongoing_requests=ONGOING, **options)


def litert(**options: Any) -> Any:
    """Return the deployment with LiteRT. `bind` takes the path of the model."""
    return serve.deployment(LiteRTReplica, max_ongoing_requests=ONGOING, **options)


def nnfmq(models: Path, **options: Any) -> Any:
    """Return the application whose replicas execute over the driver of their node. `models` is the directory."""
    from nnfmq.serving.ray import app

    return app(models, **options)


class EmptyReplica:
    """Takes an array and returns always the same one."""

    def __init__(self, output: Array) -> None:
        self._output = output

    async def infer(self, array: Array) -> Array:
        """Return the output."""
        return self._output

    async def __call__(self, request: Request) -> Response:
        """Read the body and return the output's bytes."""
        await request.body()
        return Response(self._output.tobytes(), media_type="application/octet-stream")


class LiteRTReplica:
    """Runs a model of one input and one output with LiteRT, one thread, in the replica's process."""

    def __init__(self, model_path: str) -> None:
        from ai_edge_litert.interpreter import Interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._interpreter = Interpreter(model_path=model_path, num_threads=1)
        self._interpreter.allocate_tensors()
        (source,), (result,) = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._input, self._output = source["index"], result["index"]
        self._shape, self._dtype = tuple(source["shape"]), source["dtype"]

    async def infer(self, array: Array) -> Array:
        """Execute the model."""
        self._interpreter.set_tensor(self._input, array)
        self._interpreter.invoke()
        output: Array = self._interpreter.get_tensor(self._output)
        return output

    async def __call__(self, request: Request) -> Response:
        """Execute the model with the body's bytes as input, and return the output's."""
        array = np.frombuffer(await request.body(), self._dtype).reshape(self._shape)
        return Response((await self.infer(array)).tobytes(), media_type="application/octet-stream")
