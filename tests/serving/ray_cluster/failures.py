"""A program: requests to three nodes while a driver, a replica, a node and the version of the model are replaced.

    python failures.py REQUESTS SECONDS [EVENT ...]

It sends at least so many requests, in about so many seconds, and prints the report of `cluster_load.summary`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ray_nodes import FAST_DETECTION, RayNodes, kill_together, started_nodes, started_serve
from support.cluster_load import ClusterEvent, ClusterLoad, summary, version_model
from support.ray_programs import report_of

from nnfmq.base.processes import children, descendants
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, MissedDeadlineTransient
from nnfmq.lab.placement import command_of

MODEL, THREADS, NODES = "adder", 8, 3
LIMIT_S = 60.0
REPLY_S = 20.0
AROUND = 50  # answers
HEALTH_CHECK_PERIOD_S = 1.0  # after which Ray Serve starts another replica; its default is 10 s


def main() -> None:
    """Run it and print the report."""
    requests, seconds = int(sys.argv[1]), float(sys.argv[2])
    report = report_of(lambda folder: run(folder, requests, seconds, sys.argv[3:] or list(EVENTS)))
    print(json.dumps(report, indent=2))


class Cluster(NamedTuple):
    """What the events act on."""

    nodes: RayNodes
    models: Path
    handle: Any
    load: ClusterLoad


def run(folder: Path, requests: int, seconds: float, names: Sequence[str]) -> dict[str, Any]:
    """Return the report of all events."""
    models = folder / "models"
    add_version(models, 1, version_model(1))
    with started_nodes(folder, NODES, cpus=1) as nodes, started_serve(nodes) as port, deployed(models) as handle:
        caller = Caller(handle, nodes.addresses[0], port)
        load = ClusterLoad(caller, retryable(), THREADS, THREADS * seconds / requests)
        load.start()
        events = [
            happened(name, Cluster(nodes, models, handle, load), requests * number // (len(names) + 1))
            for number, name in enumerate(names, 1)
        ]
        answered(load, requests)
        is_done = load.finish(LIMIT_S)
    report = summary(load.attempts, events)
    return report | {"all_threads_ended": is_done, "replies": dict(caller.replies), "settings": dict(FAST_DETECTION)}


def happened(name: str, cluster: Cluster, after: int) -> ClusterEvent:
    """Let an event happen after so many answers, when every thread has a request in flight; wait until it is over."""
    answered(cluster.load, after)
    event = EVENTS[name](cluster)
    with cluster.load.full_speed():
        answered(cluster.load, cluster.load.answers() + AROUND)
        at_ns = time.monotonic_ns()
        next(event)
        answered(cluster.load, cluster.load.answers() + AROUND)
    for _ in event:
        raise AssertionError(f"{name} has one part before and one after the first requests that it affects")
    return ClusterEvent(name, at_ns, time.monotonic_ns())


@contextmanager
def deployed(models: Path) -> Iterator[Any]:
    """Run a replica on each node; yield a handle when each has answered."""
    from ray import serve

    from nnfmq.serving.ray import app

    options: dict[str, Any] = {"num_replicas": NODES, "max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 1}}
    options |= {"health_check_period_s": HEALTH_CHECK_PERIOD_S, "user_config": {"models": [MODEL]}}
    handle = serve.run(app(str(models), **options), name="cluster", route_prefix="/")
    until(lambda: replicas() == NODES, "the replicas run")
    yield handle
    serve.delete("cluster")


class HttpError(Exception):
    """A reply over HTTP without a result; a client may send the request again."""


class Caller:
    """Sends inputs, from half of the threads over a handle, from the others over HTTP; `replies` counts the results."""

    def __init__(self, handle: Any, host: str, port: int) -> None:
        self._transports = {
            "handle": partial(over_handle, handle),
            "HTTP": partial(over_inference_protocol, host, port),
        }
        self._names = itertools.cycle(self._transports)
        self._thread = threading.local()
        self.replies: Counter[str] = Counter()

    def __call__(self, source: Any) -> tuple[int, Any]:
        """Return the version and the output."""
        if not hasattr(self._thread, "transport"):
            self._thread.transport = next(self._names)
        result = self._transports[self._thread.transport](source)
        self.replies[self._thread.transport] += 1
        return result


def over_handle(handle: Any, source: Any) -> tuple[int, Any]:
    """Return the version and the output of a request over a handle."""
    response = handle.infer.remote(MODEL, {"x": source}).result(timeout_s=REPLY_S)
    (output,) = response.outputs.values()
    return int(response.version), np.asarray(output)


def over_inference_protocol(host: str, port: int, source: Any) -> tuple[int, Any]:
    """Return the version and the output of a request over HTTP.

    Raises:
        HttpError: If the status is not 200.
    """
    tensor = {"name": "x", "shape": source.shape, "datatype": "FP32", "data": source.ravel().tolist()}
    with closing(http.client.HTTPConnection(host, port, timeout=REPLY_S)) as connection:
        connection.request("POST", f"/v2/models/{MODEL}/infer", json.dumps({"inputs": [tensor]}))
        reply = connection.getresponse()
        body = reply.read()
    if reply.status != 200:
        raise type(f"HttpError{reply.status}", (HttpError,), {})(body[:500])
    result = json.loads(body)
    (output,) = result["outputs"]
    return int(result["model_version"]), np.array(output["data"], np.float32).reshape(output["shape"])


def retryable() -> tuple[type[Exception], ...]:
    """Return the errors after which a client sends a request again: what computed it has died, or comes back late."""
    from ray.exceptions import RayActorError

    return (DeadObject, DeviceUnavailable, MissedDeadlineTransient, RayActorError, HttpError)


# ---- events: what happens, and after the first requests that it affects, until when the cluster is not complete


def kill_driver(cluster: Cluster) -> Iterator[None]:
    """Kill all processes of a node's driver; workers would outlive their supervisor. Its replica must use another."""
    (pid,) = drivers(cluster.nodes, cluster.nodes.addresses[1])
    kill_together([pid, *descendants(pid)])
    yield
    until(lambda: used_driver(cluster) in set(drivers(cluster.nodes, cluster.nodes.addresses[1])) - {pid}, "its use")


def kill_owner(cluster: Cluster) -> Iterator[None]:
    """Kill the actor that owns a node's driver, which exits with it. Ray must start the actor, and it a driver."""
    (pid,) = drivers(cluster.nodes, cluster.nodes.addresses[1])
    os.kill(owners(cluster.nodes, cluster.nodes.addresses[1])[0], signal.SIGKILL)
    yield
    until(lambda: used_driver(cluster) in set(drivers(cluster.nodes, cluster.nodes.addresses[1])) - {pid}, "its use")


def kill_replica(cluster: Cluster) -> Iterator[None]:
    """Kill the process of a replica. Ray Serve must start another one."""
    address = cluster.nodes.addresses[1]
    (pid,) = replica_pids(cluster.nodes, address)
    os.kill(pid, signal.SIGKILL)
    yield
    until(lambda: any(each != pid for each in replica_pids(cluster.nodes, address)), "another replica")
    until(lambda: replicas() == NODES, "all replicas run")


def break_version(cluster: Cluster) -> Iterator[None]:
    """Add a version that no driver can load. The old one must go on."""
    add_version(cluster.models, 2, b"not a model")
    yield
    answered(cluster.load, cluster.load.answers() + 2 * AROUND)


def replace_version(cluster: Cluster) -> Iterator[None]:
    """Add a version. All nodes must serve it."""
    add_version(cluster.models, 3, version_model(3))
    yield
    attempts = cluster.load.attempts
    until(lambda: [each.version for each in attempts[-AROUND:] if not each.error].count(3) == AROUND, "version 3")


def kill_node(cluster: Cluster) -> Iterator[None]:
    """Kill all processes of a node, and add another node when Ray knows of it. It must get a replica."""
    address = cluster.nodes.addresses[2]
    cluster.nodes.kill(address)
    yield
    until(lambda: address not in alive(), "the node is known to be dead")
    cluster.nodes.add()
    until(lambda: replicas() == NODES, "all replicas run")


EVENTS: dict[str, Callable[[Cluster], Iterator[None]]] = {
    "driver": kill_driver,
    "owner": kill_owner,
    "replica": kill_replica,
    "broken": break_version,
    "version": replace_version,
    "node": kill_node,
}


# ---- the state of the cluster


def add_version(models: Path, version: int, data: bytes) -> None:
    """Write a version elsewhere, and rename it to where it is served."""
    incoming = models.parent / "incoming"
    incoming.mkdir()
    (incoming / "model.tflite").write_bytes(data)
    (models / MODEL).mkdir(parents=True, exist_ok=True)
    incoming.rename(models / MODEL / str(version))


def drivers(nodes: RayNodes, address: str) -> list[int]:
    """Return the drivers of a node: the children of its actors."""
    found = [child for pid in owners(nodes, address) for child in children(pid)]
    return [pid for pid in found if "nnfmq serve" in command_of(pid)]


def owners(nodes: RayNodes, address: str) -> list[int]:
    """Return the actors that own the drivers of a node."""
    return [pid for pid in nodes.pids(address) if command_of(pid).startswith("ray::NodeDriver")]


def used_driver(cluster: Cluster) -> int:
    """Return the driver that a replica uses; 0 if it has none at this time. Which replica is Ray's choice."""
    try:
        driver, _ = cluster.handle.driver_pids.remote().result(timeout_s=REPLY_S)
    except retryable():
        return 0
    return int(driver)


def replica_pids(nodes: RayNodes, address: str) -> list[int]:
    """Return the replicas of a node."""
    return [pid for pid in nodes.pids(address) if command_of(pid).startswith("ray::ServeReplica")]


def replicas() -> int:
    """Return how many replicas Ray Serve says are running."""
    from ray import serve

    application = serve.status().applications["cluster"]
    return sum(each.replica_states.get("RUNNING", 0) for each in application.deployments.values())


def alive() -> set[str]:
    """Return the addresses of the nodes that Ray thinks are alive."""
    import ray

    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def answered(load: ClusterLoad, count: int) -> None:
    """Wait until there are so many answers."""
    until(lambda: load.answers() >= count, f"{count} answers")


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until it is so.

    Raises:
        TimeoutError: At the limit.
    """
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
