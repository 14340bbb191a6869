"""ModelReplica: the deployment of Ray Serve whose replicas execute over the driver of their node.

A replica has a connection to the driver and bursts, no model and no runtime: those are in the driver, once for each
node. Its methods run on the replica's event loop; a request takes no thread. It is called over handles (`infer`), and
by Ray's proxies in the Open Inference Protocol, HTTP and gRPC.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from ray import serve

from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument, NnfmqError
from nnfmq.hal.summaries import counted
from nnfmq.serving.inference_protocol.grpc import GrpcInferenceService
from nnfmq.serving.inference_protocol.http import InferenceApp
from nnfmq.serving.inference_service import InferenceModelMetadata, InferRequest, InferResponse, ModelIndexEntry
from nnfmq.serving.providers import RepositoryModels
from nnfmq.serving.ray.autoscaling import DriverLoad, load_since
from nnfmq.serving.ray.driver import ReplicaDriver
from nnfmq.serving.server import ModelServer, ServerOptions

__all__ = ["ModelReplica", "MultiplexedModel", "app", "with_multiplexing"]


# ----------------------------------------------------------------------------------------------------------------------
# Ray's model multiplexing for replicas: which models each keeps open, and that Ray sends requests where they are.
#
# A request with a multiplexed model id goes to a replica that has the model open, if there is one. A replica that opens
# one model too many closes the least recently used one.


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


# ----------------------------------------------------------------------------------------------------------------------
# ModelReplica: the deployment of Ray Serve whose replicas execute over the driver of their node.


Models: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"
_START_S = 120.0
_STATISTICS_S = 2.0
_DEFAULTS: Mapping[str, Any] = {
    "max_ongoing_requests": 32,
    "max_queued_requests": 256,
    "backpressure_config": {"status_code": 429, "retry_after_s": 1},
}


class ModelReplica(GrpcInferenceService):
    """A replica. Use `app`, which makes a deployment of it.

    `infer` is called through a handle: `await handle.infer.remote("digits", {"image": array})`. The methods of the gRPC
    service are for Ray's gRPC proxies.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, models: Models, options: ServerOptions | None = None, driver_options: Sequence[str] = ()
    ) -> None:
        self._driver = ReplicaDriver(models, driver_options)
        socket = await self._driver.find()
        loop = asyncio.get_running_loop()
        self._client: Client = await loop.run_in_executor(None, partial(connect, socket, wait=True, timeout=_START_S))
        self._server = ModelServer(self._client, RepositoryModels(self._client), options)
        self._last_load = DriverLoad(time.monotonic_ns(), 0, 0)
        super().__init__(self._server)

    def __serve_build_asgi_app__(self) -> InferenceApp:
        """Return the application for Ray's HTTP proxies."""
        return InferenceApp(self._server)

    # ------------------------------------------------------------------------------------------------ requests

    async def infer(
        self,
        model: str,
        *inputs: Any,
        version: str = "",
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> InferResponse:
        """Execute a model once, and return its outputs by name and the version that computed them.

        Args:
            model: The model's name; empty = the multiplexed model id of the request.
            inputs: One mapping from input names to arrays; or the arrays, in the model's order. An ObjectRef that is an
                argument itself arrives as an array in the object store's memory, and is copied into the burst's.
            version: A version's number; empty = the current one.
            outputs: The names of the wanted outputs; empty = all.
            timeout_s: The time that is left for it, waiting included.

        Raises:
            NnfmqError: As `ModelServer.infer`. A handle raises it as an error that is a RayTaskError, too.
        """
        name = await self._chosen(model)
        arrays = await self._named(name, version, inputs)
        return await self._server.infer(InferRequest(name, arrays, version, "", tuple(outputs), timeout_s))

    async def infer_all(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | Exception]:
        """Execute requests, each once, and return for each its result or its error; for a method with `serve.batch`."""
        return await self._server.infer_all(requests)

    async def _chosen(self, model: str) -> str:
        """Return the model's name; if it is the request's multiplexed model id, or that replaces it, open the model."""
        multiplexed: str = serve.get_multiplexed_model_id()
        if multiplexed and model in ("", multiplexed):
            await self._load(multiplexed)
            return multiplexed
        if not model:
            raise InvalidArgument("the request names no model, neither as argument nor as multiplexed model id")
        return model

    async def _load(self, name: str) -> object:
        """Open a model. `with_multiplexing` replaces this by a method that closes the least recently used one, too."""
        await self._server.open_model(name)
        return None

    async def _named(self, model: str, version: str, inputs: Sequence[Any]) -> Mapping[str, Any]:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return inputs[0]
        names = await self._server.input_names(model, version)
        if len(inputs) != len(names):
            raise InvalidArgument(
                f"the model has {counted(len(names), 'input')} ({', '.join(names)}), not {len(inputs)}"
            )
        return {name: np.asarray(array) for name, array in zip(names, inputs, strict=True)}

    async def model_metadata(self, model: str, version: str = "") -> InferenceModelMetadata:
        """Return a model's versions, inputs and outputs. Raises ModelNotFound."""
        return await self._server.model_metadata(model, version)

    async def model_index(self) -> list[ModelIndexEntry]:
        """Return all models of the driver's repository, served or not."""
        return await self._server.model_index()

    async def driver_pids(self) -> tuple[int, int]:
        """Return the pids of the driver and of its worker for this replica."""
        return self._client.driver_pid, self._client.worker_pid

    # ------------------------------------------------------------------------------------------------ Ray's hooks

    async def check_health(self) -> None:
        """Raise DeviceUnavailable if the driver has died, as the kernel says, and begin to connect to its successor.

        Ray ends a replica after several failed checks in a row.
        """
        if not await self._server.is_ready():
            raise DeviceUnavailable("the driver of this node has died; this replica connects to its successor")

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Open the models that `user_config["models"]` lists, before they are requested, and close all others.

        Raises:
            InvalidArgument: If `user_config` is not a mapping with that key alone.
            ModelNotFound: If there is no such model.
        """
        unknown = sorted(set(user_config) - {"models"})
        if unknown:
            raise InvalidArgument(f"user_config has the key 'models', a list of names; got {', '.join(unknown)}")
        wanted = list(user_config.get("models", ()))
        for name in wanted:
            await self._server.open_model(name)
        for name in self._server.open_names() - set(wanted):
            await self._server.close_model(name)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of this replica and of its driver, for `autoscaling.load_policy`.

        If the driver does not reply, its executions are those of this replica's bursts.
        """
        load = self._server.load()
        try:
            now = await asyncio.to_thread(self._driver_load)
        except NnfmqError:
            executing: dict[str, float] = {"executing": load["busy"], "driver_executing": load["busy"]}
        else:
            before, self._last_load = self._last_load, now
            executing = load_since(before, now)
        return {"waiting": load["waiting"], "lanes": load["lanes"], **executing}

    def _driver_load(self) -> DriverLoad:
        return DriverLoad.of(self._client.statistics(timeout=_STATISTICS_S), self._client.worker_pid)

    def __del__(self) -> None:
        """Close bursts and connection. Ray calls it after the last request of a replica that it ends."""
        if hasattr(self, "_client"):  # the constructor may have failed
            self._client.close()
        if hasattr(self, "_driver"):
            self._driver.close()


def app(
    models: Models,
    *,
    name: str = "ModelReplica",
    options: ServerOptions | None = None,
    driver_options: Sequence[str] = (),
    max_multiplexed_models: int = 16,
    **deployment_options: Any,
) -> serve.Application:
    """Return an application for `serve.run`, whose replicas execute the models over the driver of their node.

    Args:
        models: The directory of the models, which must exist on every node; or a mapping from names, or "name/version",
            to the files' bytes, or to ObjectRefs of them.
        name: The deployment's name.
        options: How each replica serves.
        driver_options: Further options of `nnfmq serve`.
        max_multiplexed_models: How many models a replica keeps open for requests with a multiplexed model id.
        deployment_options: Those of `serve.deployment`. By default `max_ongoing_requests` is 32 and
            `max_queued_requests` 256, and rejected requests get the HTTP status 429.
    """
    replica = serve.ingress()(with_multiplexing(ModelReplica, max_multiplexed_models))
    deployment = serve.deployment(name=name, **{**_DEFAULTS, **deployment_options})(replica)
    return deployment.bind(models, options, tuple(driver_options))
