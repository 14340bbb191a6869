"""Section `memory` of ray_bench.py: PSS of replicas with a large model, by kind of process.

Each deployment runs by itself. Its processes are the descendants of this process that it added, so Ray's own and those
of idle workers do not count. An empty replica shows how much of a replica is Python, Ray and NumPy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import memory_models
import numpy as np
from bench_targets import upper_limit
from ray_bench_serve import StartedServe

from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.process_memory import ProcessMemory, command_of, memory_of
from nnfmq.observe.process_usage import descendants

MIB = 1 << 20
RATIO_LIMIT = 0.3
READINGS = 4  # the first one is before the driver's compile processes have ended, and does not count
MODEL_NAME = "large"
_REQUESTS = 20  # of each replica before a reading, so that each has executed
_KINDS = {
    ("ray::ServeReplica",): "replica",
    ("nnfmq.repository",): "repository",
    ("nnfmq", "serve"): "driver",
    ("ray::NodeDriver",): "owner of the driver",
}
"""Words of a command line → kind of process; the first that fits."""
Reading = dict[str, list[ProcessMemory]]
"""Kind → the memory of each process of it."""


def memory(started: StartedServe, replicas: int, megabytes: int, settle_s: float) -> dict[str, Any]:
    """Return the section of the report.

    Raises:
        BenchmarkFailed: If a deployment does not have the replicas that it should have.
    """
    model = started.folder / "large.tflite"
    model.write_bytes(memory_models.float_model(megabytes * 10**6))
    models = started.repository(MODEL_NAME, model.read_bytes())
    readings = {
        name: _readings(name, app, words, replicas, settle_s)
        for name, (app, words) in _applications(model, models, replicas).items()
    }
    return {
        "replicas": replicas, "model_mib": round(model.stat().st_size / MIB, 1),
        "deployments": {name: _in_mib(each[-1]) for name, each in readings.items()}, "targets": _targets(readings),
    }  # fmt: skip


def _applications(model: Path, models: Path, replicas: int) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return each application, and the arguments of a request before the array."""
    import ray_bench_deployments as deployments

    options: dict[str, Any] = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0}}
    return {
        "empty": (deployments.empty(**options).bind(np.zeros(8)), ()),
        "LiteRT": (deployments.litert(**options).bind(str(model)), ()),
        "nnfmq": (deployments.nnfmq(models, **options), (MODEL_NAME,)),
    }


def _readings(name: str, app: Any, words: Sequence[str], replicas: int, settle_s: float) -> list[Reading]:
    """Return what is read after each of some batches of requests to all replicas; a pause follows the first batch."""
    from ray import serve

    others = set(descendants(os.getpid()))
    handle = serve.run(app, name=name, route_prefix=f"/{name}")
    array = np.zeros((1, memory_models.SIZE, memory_models.SIZE, memory_models.CHANNELS), np.float32)
    found = []
    for number in range(READINGS):
        replies = [handle.infer.remote(*words, array) for _ in range(replicas * _REQUESTS)]
        for reply in replies:
            reply.result()
        if number == 0:
            time.sleep(settle_s)
        else:
            found.append(_reading(others))
    serve.delete(name)
    if len(found[-1]["replica"]) != replicas:
        raise BenchmarkFailed(f"{name} has {len(found[-1]['replica'])} replicas instead of {replicas}")
    return found


def _reading(others: set[int]) -> Reading:
    found: Reading = {}
    for pid in set(descendants(os.getpid())) - others:
        kind, memory_now = _kind(command_of(pid)), memory_of(pid)
        if kind and memory_now is not None and memory_now.pss:
            found.setdefault(kind, []).append(memory_now)
    return found


def _kind(command: str) -> str | None:
    """Return what a process is; None for processes that Ray has without any deployment."""
    return next((kind for words, kind in _KINDS.items() if all(word in command for word in words)), None)


def _in_mib(reading: Reading) -> dict[str, dict[str, float]]:
    sums = {kind: (len(each), sum(each, ProcessMemory())) for kind, each in reading.items()}
    return {
        kind: {"count": count, "pss": total.pss / MIB, "private_dirty": total.private_dirty / MIB}
        for kind, (count, total) in sums.items()
    }


def _pss(reading: Reading) -> int:
    return sum(each.pss for kind in reading.values() for each in kind)


def _targets(readings: Mapping[str, Sequence[Reading]]) -> list[dict[str, Any]]:
    """Return the ratio to LiteRT of all, and without what an empty replica has."""
    pss = {name: [_pss(each) for each in found] for name, found in readings.items()}
    if "nnfmq" not in pss:
        return []
    all_of_it = [nnfmq / litert for nnfmq, litert in zip(pss["nnfmq"], pss["LiteRT"], strict=True)]
    added = [
        (nnfmq - empty) / (litert - empty)
        for nnfmq, litert, empty in zip(pss["nnfmq"], pss["LiteRT"], pss["empty"], strict=True)
    ]
    return [
        upper_limit("PSS with nnfmq over that with LiteRT", all_of_it, all_of_it[-1], RATIO_LIMIT, "×"),
        upper_limit("the same, less that of empty replicas", added, added[-1], RATIO_LIMIT, "×"),
    ]
