"""Measure what a replica of Ray Serve costs: empty, with our driver, and with LiteRT inside; its time and its memory.

    python tools/ray_bench.py                                   # both sections: some minutes
    python tools/ray_bench.py --sections overhead --rounds 3 --requests 50 --json

*overhead*: one client sends one request after the other, over a deployment handle and over HTTP, to each deployment in
turn; a burst of the same model without Ray runs in turn with them. *memory*: PSS (proportional set size) of replicas
with a generated model of 100 MB, by kind of process. Each deployment runs by itself; its processes are the descendants
of this process that it added, so Ray's own and those of idle workers do not count. An empty replica shows how much of a
replica is Python, Ray and NumPy. The cluster is one node at a loopback address. The deployments get the same input.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import (
    REPORTED_PERCENTILES,
    Table,
    Tables,
    add_common_options,
    missed_targets,
    model_file,
    parser_for,
    percentiles,
    positive,
    run,
    some_of,
    targets_table,
    upper_limit,
)
from generated_models import FLOAT_CHANNELS, FLOAT_SIZE, float_model
from ray_nodes import started_nodes, started_serve

import nnfmq
from nnfmq.base.processes import descendants
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.listening_driver import started_daemon
from nnfmq.lab.placement import ProcessMemory, command_of, memory_of

# ---- a started cluster


@dataclass(frozen=True, slots=True)
class StartedServe:
    """A started Ray Serve, and a folder of this run."""

    host: str
    port: int
    folder: Path

    def connection(self) -> http.client.HTTPConnection:
        """Return a new connection to the proxy."""
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def repository(self, name: str, data: bytes) -> Path:
        """Return a new directory of models with one model, which has the same name, in version 1."""
        directory = self.folder / f"models-{name}"
        version = directory / name / "1"
        version.mkdir(parents=True)
        (version / "model.tflite").write_bytes(data)
        return directory


def post(connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the body of the reply to a request.

    Raises:
        BenchmarkFailed: If the status is not 200.
    """
    connection.request("POST", path, body, headers)
    reply = connection.getresponse()
    data = reply.read()
    if reply.status != 200:
        raise BenchmarkFailed(f"{path} replied {reply.status}: {data[:300].decode(errors='replace')}")
    return data


# ---- section overhead


Array = np.ndarray[Any, Any]
Call = Callable[[], Array]
SMALL = "small"
WARM_UP = 3
TOLERANCE = 3  # LiteRT's and our results of quantized models differ by one or two at most
TRANSPORTS = ("handle", "HTTP")
ADDED_LIMIT_US = 100.0
GROUPS = 5  # of rounds: the range of their medians is the noise


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is measured: `opened` gives a call, for one batch of requests in one transport."""

    transport: str
    name: str
    opened: Callable[[], Any]


def overhead(started: StartedServe, model: Path, rounds: int, requests: int) -> dict[str, Any]:
    """Return the section of the report. Each round measures every candidate once; the first one changes.

    Raises:
        BenchmarkFailed: If a result is wrong.
    """
    with ExitStack() as stack:
        driver = started.folder / "bare"
        driver.mkdir()
        client = stack.enter_context(nnfmq.connect(stack.enter_context(started_daemon(driver)).socket))
        prepared = stack.enter_context(client.device("compiled").prepare(nnfmq.load(model)))
        burst = stack.enter_context(prepared.burst())
        array = _input(prepared.inputs[0])
        (expected,) = (each.copy() for each in burst.execute(array))
        candidates = [Candidate("burst", "no Ray", lambda: _constant(lambda: burst.execute(array)[0]))]
        candidates += _candidates(stack, started, model, array, expected)
        samples = _sampled(candidates, expected, rounds, requests)
    added = {transport: _added_us(transport, samples) for transport in TRANSPORTS}
    return {
        "model": model.name,
        "transports": _transports(samples),
        "added_us": added,
        "targets": _overhead_targets(added),
    }


def _input(info: Any) -> Array:
    values: Array = (np.random.default_rng(7).random(info.shape) * 200).astype(info.dtype)
    return values


def _candidates(
    stack: ExitStack, started: StartedServe, model: Path, array: Array, expected: Array
) -> Iterator[Candidate]:
    """Yield each deployment over each transport, once it runs."""
    import ray_bench_deployments as deployments

    for name, app in {
        "empty": deployments.empty().bind(expected),
        "LiteRT": deployments.litert().bind(str(model)),
    }.items():
        handle = _run(stack, name, app)
        yield Candidate("handle", name, partial(_constant, partial(_infer, handle, array)))
        yield Candidate("HTTP", name, partial(_over_http, started, f"/{name}", array, expected))
    directory = started.repository(SMALL, model.read_bytes())
    handle = _run(stack, "nnfmq", deployments.nnfmq(directory))
    yield Candidate("handle", "nnfmq", partial(_constant, partial(_infer_by_name, handle, array)))
    yield Candidate("HTTP", "nnfmq", partial(_over_inference_protocol, started, array, expected))


def _run(stack: ExitStack, name: str, app: Any) -> Any:
    from ray import serve

    handle = serve.run(app, name=name, route_prefix=f"/{name}")
    stack.callback(serve.delete, name)
    return handle


def _infer(handle: Any, array: Array) -> Array:
    output: Array = handle.infer.remote(array).result()
    return output


def _infer_by_name(handle: Any, array: Array) -> Array:
    (output,) = handle.infer.remote(SMALL, array).result().outputs.values()
    return np.asarray(output)


@contextmanager
def _constant(call: Call) -> Iterator[Call]:
    yield call


@contextmanager
def _over_http(started: StartedServe, path: str, array: Array, expected: Array) -> Iterator[Call]:
    """Yield a call over a new connection: a proxy closes one that is idle for long."""
    with closing(started.connection()) as connection:
        headers = {"Content-Type": "application/octet-stream"}
        yield lambda: np.frombuffer(
            post(connection, path, array.tobytes(), headers), expected.dtype
        ).reshape(expected.shape)  # fmt: skip


@contextmanager
def _over_inference_protocol(started: StartedServe, array: Array, expected: Array) -> Iterator[Call]:
    """Yield a call over a new connection, with binary tensors of the Open Inference Protocol."""
    path = f"/nnfmq/v2/models/{SMALL}"
    with closing(started.connection()) as connection:
        connection.request("GET", path)
        (tensor,) = json.load(connection.getresponse())["inputs"]
        tensor |= {"shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}

        def call() -> Array:
            data = post(connection, f"{path}/infer", header + array.tobytes(), headers)
            return np.frombuffer(data[-expected.nbytes :], expected.dtype).reshape(expected.shape)

        yield call


def _sampled(
    candidates: Sequence[Candidate], expected: Array, rounds: int, requests: int
) -> dict[tuple[str, str], list[list[int]]]:
    """Return the latencies in ns of each round, by transport and name."""
    found: dict[tuple[str, str], list[list[int]]] = {(each.transport, each.name): [] for each in candidates}
    for number in range(rounds):
        first = number % len(candidates)
        for each in (*candidates[first:], *candidates[:first]):
            with each.opened() as call:
                found[each.transport, each.name].append(_latencies(call, requests))
                _check(each, call(), expected)
    return found


def _latencies(call: Call, requests: int) -> list[int]:
    for _ in range(WARM_UP):
        call()
    latencies = []
    for _ in range(requests):
        begin = time.perf_counter_ns()
        call()
        latencies.append(time.perf_counter_ns() - begin)
    return latencies


def _check(candidate: Candidate, result: Array, expected: Array) -> None:
    difference = np.abs(result.astype(np.float64) - expected.astype(np.float64)).max()
    if result.shape != expected.shape or not difference <= TOLERANCE:
        raise BenchmarkFailed(f"{candidate.name} over {candidate.transport} returned a wrong result: {difference} off")


# ---- the report


def _transports(samples: Mapping[tuple[str, str], list[list[int]]]) -> dict[str, dict[str, Any]]:
    transports: dict[str, dict[str, Any]] = {}
    for (transport, name), rounds in samples.items():
        found = percentiles(itertools.chain(*rounds), 1000)
        transports.setdefault(transport, {})[name] = {
            **found,
            "count": sum(map(len, rounds)),
            "p50_of_rounds": _medians_us(rounds),
        }
    return transports


def _medians_us(rounds: Sequence[Sequence[int]]) -> list[float]:
    return [round(statistics.median(each) / 1000, 1) for each in rounds]


def _added_us(transport: str, samples: Mapping[tuple[str, str], list[list[int]]]) -> dict[str, list[float]]:
    """Return by name, for each round, the p50 less that of the empty deployment and that of the burst without Ray."""
    medians = {name: _medians_us(rounds) for (each, name), rounds in samples.items() if each == transport}
    burst, empty = _medians_us(samples["burst", "no Ray"]), medians.pop("empty")
    return {
        name: [round(a - b - c, 1) for a, b, c in zip(values, empty, burst, strict=True)]
        for name, values in medians.items()
    }


def _overhead_targets(added: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    text = "{}: p50 of nnfmq less those of the empty replica and of a burst"
    return [
        upper_limit(
            text.format(transport), _group_medians(names["nnfmq"]), statistics.median(names["nnfmq"]),
            ADDED_LIMIT_US, "µs",
        )
        for transport, names in added.items()
    ]  # fmt: skip


def _group_medians(values: Sequence[float]) -> list[float]:
    groups = (values[first::GROUPS] for first in range(GROUPS))
    return [statistics.median(group) for group in groups if group]


# ---- section memory


MIB = 1 << 20
RATIO_LIMIT = 0.3
READINGS = 4  # the first one is before the driver's compile processes have ended, and does not count
LARGE = "large"
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
    model.write_bytes(float_model(megabytes * 10**6))
    models = started.repository(LARGE, model.read_bytes())
    readings = {
        name: _readings(name, app, words, replicas, settle_s)
        for name, (app, words) in _applications(model, models, replicas).items()
    }
    return {
        "replicas": replicas, "model_mib": round(model.stat().st_size / MIB, 1),
        "deployments": {name: _in_mib(each[-1]) for name, each in readings.items()},
        "targets": _memory_targets(readings),
    }  # fmt: skip


def _applications(model: Path, models: Path, replicas: int) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return each application, and the arguments of a request before the array."""
    import ray_bench_deployments as deployments

    options: dict[str, Any] = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0}}
    return {
        "empty": (deployments.empty(**options).bind(np.zeros(8)), ()),
        "LiteRT": (deployments.litert(**options).bind(str(model)), ()),
        "nnfmq": (deployments.nnfmq(models, **options), (LARGE,)),
    }


def _readings(name: str, app: Any, words: Sequence[str], replicas: int, settle_s: float) -> list[Reading]:
    """Return what is read after each of some batches of requests to all replicas; a pause follows the first batch."""
    from ray import serve

    others = set(descendants(os.getpid()))
    handle = serve.run(app, name=name, route_prefix=f"/{name}")
    array = np.zeros((1, FLOAT_SIZE, FLOAT_SIZE, FLOAT_CHANNELS), np.float32)
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


def _memory_targets(readings: Mapping[str, Sequence[Reading]]) -> list[dict[str, Any]]:
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


# ---- the program


MODEL = "models/mobilenet_v1_0.25_128_quant.tflite"
SECTIONS = ("overhead", "memory")
Report = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status as `bench_support.run`."""
    options = _parser().parse_args(argv)
    return run(options, measure, tables, "ray_bench")


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--sections", type=some_of(SECTIONS), default=SECTIONS, metavar="NAME,...", help=f"{', '.join(SECTIONS)}"
    )
    parser.add_argument("--model", type=Path, help=f"of section overhead (default: {MODEL} in $NNFMQ_DATA)")
    parser.add_argument("--rounds", type=positive, default=40, help="interleaved rounds (default: 40)")
    parser.add_argument("--requests", type=positive, default=100, help="of each round and transport (default: 100)")
    parser.add_argument("--replicas", type=positive, default=8, help="of section memory (default: 8)")
    parser.add_argument("--megabytes", type=positive, default=100, help="weights of section memory (default: 100)")
    parser.add_argument(
        "--settle", type=float, default=12.0, metavar="S",
        help="seconds between the first requests and the reading of memory: compile processes end 10 s after their "
        "last use (default: 12)",
    )  # fmt: skip
    add_common_options(parser)
    return parser


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it. `folder` is for the files of Ray and of the driver.

    Raises:
        BenchmarkFailed: If a deployment returns something wrong, or the model is missing.
    """
    with started_nodes(folder) as nodes, started_serve(nodes) as port:
        started = StartedServe(nodes.addresses[0], port, folder)
        sections = {name: SECTION[name](options, started) for name in options.sections}
    targets = [target for section in sections.values() for target in section["targets"]]
    return {
        "conditions": _conditions(options), **sections,
        "targets": targets, "missed": missed_targets(targets),
    }  # fmt: skip


SECTION: dict[str, Callable[[argparse.Namespace, StartedServe], Report]] = {
    "overhead": lambda options, started: overhead(
        started, model_file(options, MODEL, "section overhead"), options.rounds, options.requests
    ),
    "memory": lambda options, started: memory(started, options.replicas, options.megabytes, options.settle),
}


def _conditions(options: argparse.Namespace) -> Report:
    return {
        "rounds": options.rounds, "requests": options.requests, "replicas": options.replicas,
        "megabytes": options.megabytes, "ray": version("ray"),
    }  # fmt: skip


# ---- results


def tables(report: Report) -> Tables:
    """Return a table of the targets, and one of each section that was measured."""
    made = {"targets": targets_table(report["targets"])}
    if "overhead" in report:
        names = list(REPORTED_PERCENTILES)
        rows = [
            [transport, name, *(f"{found[each]:,.0f}" for each in names), str(found["count"])]
            for transport, candidates in report["overhead"]["transports"].items()
            for name, found in candidates.items()
        ]
        heads = ("transport", "replica", *(f">{each} µs" for each in names), ">requests")
        made["overhead"] = Table(f"one request with {report['overhead']['model']}", heads, rows)
    if "memory" in report:
        rows = [
            [name, kind, str(found["count"]), f"{found['pss']:.1f}", f"{found['private_dirty']:.1f}"]
            for name, kinds in report["memory"]["deployments"].items()
            for kind, found in kinds.items()
        ]
        heads = ("replicas", "processes", ">count", ">PSS MiB", ">Private_Dirty MiB")
        made["memory"] = Table(f"{report['memory']['replicas']} replicas", heads, rows)
    return made


if __name__ == "__main__":
    sys.exit(main())
