"""A program: deployments on a cluster of one node, called over handles, HTTP and gRPC, while parts of it are killed.

python one_node.py
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
from ray_nodes import free_port, started_nodes
from support.cluster_load import SIZE, version_model
from support.drivers import until
from support.ray_programs import report_of

from nnfmq.client.connection.connect import connect
from nnfmq.hal.errors import NnfmqError

LIMIT_S = 60.0
GIVEN = np.zeros((1, SIZE), np.float32)
GRPC = "nnfmq.serving.inference_protocol.grpc.add_to_server"


def main() -> None:
    """Run it and print the report."""
    print(json.dumps(report_of(run)))


def run(folder: Path) -> dict[str, Any]:
    """Return the reports of all parts."""
    import ray
    from ray import serve

    from nnfmq.serving.ray import ServerOptions, app

    os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CACHE_HOME"] = str(folder)
    with started_nodes(folder) as nodes:
        address = nodes.addresses[0]
        ports = {"http": free_port(address), "grpc": free_port(address)}
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": address, "port": ports["http"]},
            grpc_options={"port": ports["grpc"], "grpc_servicer_functions": [GRPC]},
        )
        models = {"adder/1": ray.put(version_model(1)), "other": ray.put(version_model(2))}
        options: dict[str, Any] = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}
        options |= {"user_config": {"models": ["adder"]}, "options": ServerOptions(lanes=1)}
        handle = serve.run(app(models, max_multiplexed_models=1, **options))
        report = {
            "handle": over_handle(handle),
            "http": over_http(f"http://{address}:{ports['http']}"),
            "grpc": over_grpc(f"{address}:{ports['grpc']}"),
            "worker": after(handle, handle.driver_pids.remote().result()[1]),
            "actor": after(handle, actor_pid()),
        }
        serve.delete("default")
        report["overload"] = overload(models, f"http://{address}:{ports['http']}/small")
        report["replicas"] = scaled(models)
        serve.shutdown()
        return report | {"unused": unused_driver(folder)}


def over_handle(handle: Any) -> dict[str, Any]:
    """Return what calls over a handle give."""
    import ray

    (info,) = handle.model_metadata.remote("adder").result().inputs
    multiplexed = handle.options(multiplexed_model_id="other")
    for _ in range(4):
        both = (
            answer(multiplexed, "", GIVEN),
            answer(handle.options(multiplexed_model_id="adder"), "adder", GIVEN),
        )
    return {
        "mapping": answer(handle, "adder", {info.name: GIVEN}),
        "object": answer(handle, "adder", ray.put(GIVEN)),
        "multiplexed": both,
        "unknown": answer(handle, "missing", GIVEN),
        "load": sorted(handle.record_autoscaling_stats.remote().result()),
        "index": [entry.name for entry in handle.model_index.remote().result()],
        "config": failed(lambda: handle.reconfigure.remote({"model": []}).result()),
    }


def answer(handle: Any, *arguments: Any) -> Any:
    """Return the version and an element of a response, or the error's classes."""
    try:
        response = handle.infer.remote(*arguments).result(timeout_s=LIMIT_S)
    except NnfmqError as error:
        return [kind.__name__ for kind in type(error).__mro__[1:4]]
    (output,) = response.outputs.values()
    return response.version, output.ravel()[:1].tolist()


def failed(call: Callable[[], Any]) -> str:
    """Return the class of an error."""
    try:
        call()
    except NnfmqError as error:
        return type(error).__name__
    return ""


def over_http(url: str) -> dict[str, Any]:
    """Return what Ray's HTTP proxy answers."""
    metadata = json.load(urllib.request.urlopen(f"{url}/v2/models/adder", timeout=LIMIT_S))
    (tensor,) = metadata["inputs"]
    inputs = [{"name": tensor["name"], "datatype": "FP32", "shape": [1, SIZE], "data": [0] * SIZE}]
    body = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/adder/infer", body, timeout=LIMIT_S) as reply:
        response = json.load(reply)
    try:
        urllib.request.urlopen(f"{url}/v2/models/missing/infer", body, timeout=LIMIT_S)
    except HTTPError as error:
        status = error.code
        error.close()
    with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=LIMIT_S) as reply:
        ready = reply.status
    data = response["outputs"][0]["data"]
    return {"version": response["model_version"], "data": data[:1], "missing": status, "ready": ready}


def over_grpc(target: str) -> dict[str, Any]:
    """Return what Ray's gRPC proxy answers."""
    import grpc

    from nnfmq.serving.inference_protocol.grpc import message_classes

    kinds = message_classes()
    with grpc.insecure_channel(target) as channel:

        def call(method: str, request: str, response: str, **fields: Any) -> Any:
            send = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            data = send(
                kinds[request](**fields).SerializeToString(),
                timeout=LIMIT_S,
                metadata=[("application", "default")],
            )
            return kinds[response].FromString(data)

        live = call("ServerLive", "ServerLiveRequest", "ServerLiveResponse").live
        metadata = call("ModelMetadata", "ModelMetadataRequest", "ModelMetadataResponse", name="adder")
        try:
            call("ModelMetadata", "ModelMetadataRequest", "ModelMetadataResponse", name="missing")
        except grpc.RpcError as error:
            code = error.code().name
    return {"live": live, "versions": list(metadata.versions), "missing": code}


def after(handle: Any, pid: int) -> dict[str, Any]:
    """Kill a process; return the errors until ten requests in a row are answered, and how long that took."""
    os.kill(pid, signal.SIGKILL)
    begin_s, in_a_row, errors = time.monotonic(), 0, []
    while in_a_row < 10 and time.monotonic() < begin_s + LIMIT_S:
        result = answer(handle, "adder", GIVEN)
        in_a_row = in_a_row + 1 if result[0] == "1" else 0
        errors += [] if result[0] == "1" else [result]
    return {"seconds": time.monotonic() - begin_s, "errors": errors, "answered": in_a_row}


def overload(models: dict[str, Any], url: str) -> dict[str, Any]:
    """Stop the worker of a replica that takes one request, and send more. Return what the surplus ones get."""
    from ray import serve
    from ray.serve.exceptions import BackPressureError

    from nnfmq.serving.ray import app

    small = app(models, max_ongoing_requests=1, max_queued_requests=1, ray_actor_options={"num_cpus": 0.5})
    handle = serve.run(small, name="small", route_prefix="/small")
    first = answer(handle, "adder", GIVEN)
    worker = handle.driver_pids.remote().result()[1]
    with stopped(worker):
        pending = [handle.infer.remote("adder", GIVEN) for _ in range(5)]
        rejected = [failure(response, BackPressureError) for response in pending[-1:]]
        status = first_status(f"{url}/v2/models/adder", 6)
    results = [failure(response, BackPressureError) for response in pending[:-1]]
    serve.delete("small")
    return {"first": first, "rejected": rejected, "status": status, "completed": results.count("")}


def failure(response: Any, kind: type[Exception]) -> str:
    """Wait for a response. Return the name of `kind` if that is its error; empty if it has none."""
    try:
        response.result(timeout_s=LIMIT_S)
    except kind as error:
        return type(error).__name__
    return ""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def first_status(url: str, count: int) -> int:
    """Send requests at the same time to a deployment that completes none; return the status of the first that ends."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
                ended.put(reply.status)
        except HTTPError as error:
            ended.put(error.code)
            error.close()

    for _ in range(count):
        threading.Thread(target=ask, daemon=True).start()
    return ended.get(timeout=LIMIT_S)


def scaled(models: dict[str, Any]) -> list[int]:
    """Return the numbers of replicas before and while requests wait for a burst."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    from nnfmq.serving.ray import ServerOptions, app

    scaling = AutoscalingConfig(
        min_replicas=1,
        max_replicas=2,
        target_ongoing_requests=1000,  # so that Ray's own measure wants one replica
        upscale_delay_s=0,
        metrics_interval_s=0.5,
        look_back_period_s=1,
        policy=AutoscalingPolicy(policy_function="nnfmq.serving.ray.autoscaling:load_policy"),
    )
    options: dict[str, Any] = {"autoscaling_config": scaling, "ray_actor_options": {"num_cpus": 0.5}}
    handle = serve.run(app(models, options=ServerOptions(lanes=1), **options), name="scaled", route_prefix="/scaled")
    answer(handle, "adder", GIVEN)
    before = running("scaled")
    with stopped(handle.driver_pids.remote().result()[1]):
        pending = [handle.infer.remote("adder", GIVEN) for _ in range(8)]
        until(lambda: running("scaled") == 2, "another replica", LIMIT_S)
    for response in pending:
        response.result(timeout_s=LIMIT_S)
    serve.delete("scaled")
    return [before, 2]


def running(name: str) -> int:
    """Return the number of running replicas of an application."""
    from ray import serve

    (deployment,) = serve.status().applications[name].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


def actor_pid() -> int:
    """Return the pid of the only actor that owns a driver."""
    import ray

    (name,) = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == "nnfmq"]
    pid: int = ray.get(ray.get_actor(name, namespace="nnfmq").pid.remote())
    return pid


def unused_driver(folder: Path) -> dict[str, Any]:
    """Kill an actor whose driver has a client. Return whether it keeps the driver for that, and ends without it."""
    import ray

    from nnfmq.serving.ray.driver import node_driver

    (folder / "none").mkdir()
    actor = node_driver(str(folder / "none"), idle_s=1.0)
    socket = ray.get(actor.attach.remote(os.getpid()))
    first = ray.get(actor.pid.remote())
    with connect(socket, recover=True) as client:
        os.kill(first, signal.SIGKILL)
        until(lambda: ray.get(actor.pid.remote()) != first, "the actor is started again")
        client.devices()
        time.sleep(2.5)  # more than twice as long as it keeps an unused driver
        kept = ray.get(actor.pid.remote())
        driver = client.driver_pid
    return {"kept": kept != first, "driver": driver > 0}


if __name__ == "__main__":
    sys.exit(main())
