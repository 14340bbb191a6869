"""Section `overhead` of ray_bench.py: requests to each deployment in turn, and bursts of the same model without Ray."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_targets import upper_limit
from ray_bench_serve import StartedServe, post

import nnfmq
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.listening_driver import started_daemon
from nnfmq.measure.percentiles import percentile

Array = np.ndarray[Any, Any]
Call = Callable[[], Array]
MODEL_NAME = "small"
WARM_UP = 3
TOLERANCE = 3  # LiteRT's and our results of quantized models differ by one or two at most
TRANSPORTS = ("handle", "HTTP")
ADDED_LIMIT_US = 100.0
GROUPS = 5  # of rounds: the range of their medians is the noise
PERCENTS = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}


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
    return {"model": model.name, "transports": _transports(samples), "added_us": added, "targets": _targets(added)}


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
    directory = started.repository(MODEL_NAME, model.read_bytes())
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
    (output,) = handle.infer.remote(MODEL_NAME, array).result().outputs.values()
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
    path = f"/nnfmq/v2/models/{MODEL_NAME}"
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
        ordered = sorted(value for each in rounds for value in each)
        found = {text: percentile(ordered, percent) / 1000 for text, percent in PERCENTS.items()}
        transports.setdefault(transport, {})[name] = {
            **found,
            "count": len(ordered),
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


def _targets(added: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
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
