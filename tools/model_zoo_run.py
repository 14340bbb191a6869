"""One model of the zoo, in a process of its own: run by nnfmq's driver and by the peer, on equal inputs.

Reads a job as JSON from stdin and prints the result as JSON. The peer of a .tflite file is LiteRT: reference kernels
for the results, XNNPACK with one thread for the time and as the measure of float differences. That of an .onnx file is
ONNX Runtime with one thread: without optimizations for the results, with all of them for the time and as the measure.
The driver's worker may use one CPU.

nnfmq runs a model in a burst. A model whose shapes or conditions depend on values of inputs runs in a session of
nnfmq.compat.onnxruntime, which binds such values.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
STEPS = 3  # executions whose results are compared: states must be carried on
ROUNDS, ROUND_S = 15, 0.02
# A session runs a baseline program until its model is compiled; a burst for sustained use does not.
TIER_UP_S = 10.0
_MEMORY_BYTES = 8 << 30
_SEED = 1


@dataclass
class Peer:
    """The peer's model: `run` returns the outputs; `timed` is the fastest way to run it, `rival` another result."""

    inputs: Sequence[tuple[str, tuple[int, ...], str]]
    run: Callable[[Sequence[Array]], list[Array]]
    timed: Callable[[Sequence[Array]], list[Array]]
    rival: Callable[[Sequence[Array]], list[Array]] | None = None


def litert(path: Path, _shapes: Mapping[str, tuple[int, ...]]) -> Peer:
    """Return LiteRT's model, with the shapes of the file."""
    from ai_edge_litert.interpreter import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        Interpreter,
        OpResolverType,
    )

    def made(**options: Any) -> Any:
        interpreter = Interpreter(model_path=str(path), num_threads=1, **options)
        interpreter.allocate_tensors()
        return interpreter

    def runner(interpreter: Any) -> Callable[[Sequence[Array]], list[Array]]:
        inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()

        def run(arrays: Sequence[Array]) -> list[Array]:
            for detail, array in zip(inputs, arrays, strict=True):
                interpreter.set_tensor(detail["index"], array)
            interpreter.invoke()
            return [interpreter.get_tensor(detail["index"]) for detail in outputs]

        return run

    reference = made(experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    described = [
        (d["name"], tuple(map(int, d["shape"])), np.dtype(d["dtype"]).name) for d in reference.get_input_details()
    ]
    return Peer(described, runner(reference), runner(made()), runner(made()))


def onnx_runtime(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Peer:
    """Return ONNX Runtime's model; dimensions that neither the file nor `shapes` states are 1."""
    import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]

    def session(level: str) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    plain, optimized = session("ORT_DISABLE_ALL"), session("ORT_ENABLE_ALL")
    names = [node.name for node in plain.get_inputs()]
    described = []
    for position, node in enumerate(plain.get_inputs()):
        shape = shapes.get(node.name, shapes.get(str(position)))
        if shape is None:
            shape = tuple(size if isinstance(size, int) else 1 for size in node.shape)
        described.append((node.name, shape, _ORT_TYPES[node.type]))

    def runner(session: Any) -> Callable[[Sequence[Array]], list[Array]]:
        return lambda arrays: list(session.run(None, dict(zip(names, arrays, strict=True))))

    return Peer(described, runner(plain), runner(optimized), runner(optimized))


_ORT_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(bool)": "bool",
}


def inputs_of(peer: Peer, values: Mapping[str, float]) -> list[list[Array]]:
    """Return the inputs of each step, the same in every run."""
    random = np.random.default_rng(_SEED)
    return [[_input(random, *described, values) for described in peer.inputs] for _ in range(STEPS)]


def _input(
    random: np.random.Generator, name: str, shape: tuple[int, ...], dtype: str, values: Mapping[str, float]
) -> Array:
    kind = np.dtype(dtype)
    if name in values:
        return np.full(shape, values[name], kind)
    if kind.kind == "f":
        return random.uniform(0, 1, shape).astype(kind)
    if kind.itemsize <= 2 and kind.kind in "iu":
        info = np.iinfo(kind)
        return random.integers(info.min, info.max, shape, kind, endpoint=True)
    return random.integers(0, 2, shape).astype(kind)


def difference(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest difference over the largest element of its output; for integers the largest difference."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.size != other.size:
            return math.inf
        if not other.size:
            continue
        a, b = one.reshape(-1).astype(np.float64), other.reshape(-1).astype(np.float64)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return math.inf
        scale = max(float(np.abs(b[np.isfinite(b)]).max(initial=0.0)), 1e-6) if other.dtype.kind == "f" else 1.0
        worst = max(worst, float(np.abs(np.nan_to_num(a - b)).max()) / scale)
    return worst


def times(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Return each side's time of one execution in µs, of each round; the sides take turns."""

    def one_round(call: Callable[[], object], count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count * 1e6

    counts = [max(1, min(2000, int(ROUND_S * 1e6 / one_round(call, 1)))) for call in (ours, theirs)]
    pairs = [(one_round(ours, counts[0]), one_round(theirs, counts[1])) for _ in range(ROUNDS)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def main() -> int:
    """Run the job; print what was found so far even if a later part fails."""
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    result: dict[str, Any] = {"peer": False, "loads": False, "runs": False}
    try:
        _examine(job, result)
    except Exception as error:  # noqa: BLE001  the peer and the model may raise anything
        result["reason"] = f"{type(error).__name__}: {error}"
    print(json.dumps(result))
    return 0


def _examine(job: Mapping[str, Any], result: dict[str, Any]) -> None:
    path, shapes = Path(job["path"]), {name: tuple(shape) for name, shape in job["shapes"].items()}
    peer = (onnx_runtime if path.suffix == ".onnx" else litert)(path, shapes)
    steps = inputs_of(peer, job["values"])
    expected = [peer.run(step) for step in steps]
    result["peer"] = True
    with _ours(path, peer, job["device"], result) as run:
        found = [[array.copy() for array in run(step)] for step in steps]
        result["runs"] = True
        result |= _compared(found, expected, peer, steps)
        if job["measure"]:
            if result.get("values"):
                _run_for(TIER_UP_S, lambda: run(steps[0]))
            result |= _timed(lambda: run(steps[0]), lambda: peer.timed(steps[0]))


@contextmanager
def _ours(path: Path, peer: Peer, device: str, result: dict[str, Any]) -> Iterator[Callable[[Sequence[Array]], Any]]:
    """Load the model and yield the function that runs it; its results are valid until the next call."""
    import nnfmq
    from nnfmq.hal.program_kind import require_machine_code

    bound: dict[str | int, tuple[int, ...]] = {name: shape for name, shape, _ in peer.inputs if shape}
    try:
        loaded = nnfmq.load(path, shapes=bound if path.suffix == ".onnx" else None)
    except nnfmq.UnsupportedModel:
        if path.suffix != ".onnx":
            raise
        from nnfmq.compat.onnxruntime import InferenceSession

        session, names = InferenceSession(path), [name for name, _, _ in peer.inputs]
        result |= {"loads": True, "values": True}
        yield lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))
        return
    result["loads"] = True
    with nnfmq.connect(embedded=True) as client:
        with suppress(OSError):
            os.sched_setaffinity(client.worker_pid, {max(os.sched_getaffinity(0))})
        prepared = client.device(device).prepare(loaded, preference="sustained_speed", timeout=120)
        require_machine_code(device, prepared.program)
        result |= {"program": prepared.program.name.lower(), "compiled_operations": prepared.compiled_operations}
        with prepared as model, model.burst() as burst:
            yield lambda arrays: burst.execute(*arrays, out=burst.outputs, timeout=60)


def _compared(
    found: Sequence[list[Array]], expected: Sequence[list[Array]], peer: Peer, steps: Sequence[list[Array]]
) -> dict[str, Any]:
    is_float = any(array.dtype.kind == "f" for array in expected[0])
    compared: dict[str, Any] = {
        "float": is_float,
        "difference": max(difference(one, other) for one, other in zip(found, expected, strict=True)),
    }
    if peer.rival is not None and is_float:
        rivals = [peer.rival(step) for step in steps]
        compared["rival"] = max(difference(one, other) for one, other in zip(rivals, expected, strict=True))
    return compared


def _run_for(seconds: float, call: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call()


def _timed(ours_once: Callable[[], object], theirs_once: Callable[[], object]) -> dict[str, Any]:
    ours, theirs = times(ours_once, theirs_once)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "us": statistics.median(ours),
        "peer_us": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "noise": (statistics.quantiles(ratios, n=4)[2] - statistics.quantiles(ratios, n=4)[0]) / 2,
    }


if __name__ == "__main__":
    sys.exit(main())
