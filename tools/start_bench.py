"""Measure the start of an application, in milliseconds, and what a compilation cache saves of it.

    python tools/start_bench.py process [--rounds N] [--model FILE]
    python tools/start_bench.py cache MODEL... [--device NAME] [--rounds N] [--json]
    python tools/start_bench.py compile MODEL... [--rounds N]
    python tools/start_bench.py shared MODEL... [--rounds N]

*process*: each round starts one Python process with an embedded driver and one that connects to a running driver; both
find the model's program in the driver's cache. Printed are the median and the minimum of each step, as the application
sees it: the imports of nnfmq and NumPy, `connect`, `prepare` and the first `execute`, without Python's own start.
Byte code is in a folder of the benchmark, which a first round fills. The application is a script, not a child of
`multiprocess`, because its imports are what is measured.

*cache*: for each model, the medians of reading the file, preparing the model from scratch, preparing and saving it, and
preparing it from the cache, through an embedded driver, and the ratio of the second to the last. Each round measures
all four, so that a disturbance of the machine affects all of them.

*compile*: for each model, the CPU time of each part of its compilation for the device `compiled`, all on one thread:
the minimum of the rounds. Imports are not included.

*shared*: for each model, how many kernels are compiled if those before it are in the driver's cache already, and the
CPU time of its preparation, on one thread: the minimum of the rounds, each of which begins with an empty cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_support import parser_for

import nnfmq
from nnfmq.base import settings
from nnfmq.driver.cache.programs import cache_disabled
from nnfmq.driver.compilation.jobs import PrepareContext, prepare_context
from nnfmq.driver.devices.builtin import CompiledDevice
from nnfmq.driver.devices.configuration import DeviceEntry
from nnfmq.hal.types import ExecutionPreference, Model
from nnfmq.lab.listening_driver import started_daemon

# ---- from the first import to the first result


ROUNDS = 15
MODEL = Path(__file__).parents[1] / "nnfmq" / "data" / "digits.tflite"
STEPS = ("import", "connect", "prepare", "execute", "total")
APPLICATION = """
import time
times = [time.perf_counter_ns()]
import json, sys
import numpy
import nnfmq
times.append(time.perf_counter_ns())
path = json.loads(sys.argv[1])
with nnfmq.connect(path, embedded=path is None) as client:
    times.append(time.perf_counter_ns())
    model = client.prepare(sys.argv[2])
    times.append(time.perf_counter_ns())
    model.execute(*(numpy.zeros(tensor.shape, tensor.dtype) for tensor in model.inputs))
    times.append(time.perf_counter_ns())
print(json.dumps(times))
"""


def _print_starts(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "XDG_CACHE_HOME": f"{folder}/cache"}
        with started_daemon(Path(folder), environment) as daemon:
            rows = measure_starts(
                {"embedded": None, "daemon": daemon.socket}, arguments.model, arguments.rounds, environment
            )
    print(f"median (minimum) of {arguments.rounds} rounds, ms")
    print("".join(f"{name:>16}" for name in ("", *STEPS)))
    for name, times in rows.items():
        print(f"{name:>16}" + "".join(f"{statistics.median(t):10.0f} ({min(t):3.0f})" for t in times))


def measure_starts(
    drivers: Mapping[str, str | None], model: Path, rounds: int, environment: Mapping[str, str]
) -> dict[str, list[list[float]]]:
    """Return the milliseconds of each of STEPS by round, for each driver: a socket's path, or None to embed one."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    results: dict[str, list[list[float]]] = {name: [] for name in drivers}
    for path in drivers.values():
        run_once(path, model, {**inherited, **environment})  # the program is in the cache then
    for _ in range(rounds):
        for name, path in drivers.items():
            results[name].append(run_once(path, model, {**inherited, **environment}))
    return {name: [list(times) for times in zip(*found, strict=True)] for name, found in results.items()}


def run_once(path: str | None, model: Path, environment: Mapping[str, str]) -> list[float]:
    """Return the milliseconds of each of STEPS in a new process."""
    command = [sys.executable, "-P", "-c", APPLICATION, json.dumps(path), str(model)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    times = json.loads(done.stdout)
    steps = [after - before for before, after in itertools.pairwise(times)]
    return [step / 1e6 for step in (*steps, times[-1] - times[0])]


# ---- compilation caching


CACHE_ROUNDS = 11
TOKEN = bytes(32)
_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # without a baseline program that runs first
CacheTimes = dict[str, list[int]]
"""Times in ns by step, one per round."""


def _print_caching(arguments: argparse.Namespace) -> None:
    with cache_disabled(), nnfmq.connect(embedded=True) as client:  # else the driver's own program cache is used
        device = client.device(arguments.device)
        reports = [_report(device, path, arguments.rounds) for path in arguments.models]
    if arguments.json:
        print(json.dumps({"models": reports}))
        return
    print(f"p50 of {arguments.rounds} rounds, ms; ratio = fresh / cache; MiB of both cache files")
    print(f"{'model':40} {'read':>8} {'fresh':>8} {'save':>8} {'cache':>8} {'ratio':>6} {'MiB':>6}")
    for report in reports:
        print(_line(report))


def _report(device: nnfmq.Device, path: str, rounds: int) -> dict[str, Any]:
    series, size = measure_caching(device, path, rounds)
    medians = {name: statistics.median(times) for name, times in series.items()}
    return {"model": path, "cache_bytes": size, "ratio": medians["fresh"] / medians["cache"], "ns": series}


def _line(report: dict[str, Any]) -> str:
    medians = [f"{statistics.median(times) / 1e6:8.2f}" for times in report["ns"].values()]
    name = os.path.basename(report["model"])[:40]
    return f"{name:40} {' '.join(medians)} {report['ratio']:6.2f} {report['cache_bytes'] / 2**20:6.2f}"


def measure_caching(device: nnfmq.Device, path: str, rounds: int = CACHE_ROUNDS) -> tuple[CacheTimes, int]:
    """Return the times of `read`, `fresh`, `save` and `cache` for a model in ns, and the bytes of its cache files."""
    loaded = nnfmq.load(path)
    series: CacheTimes = {"read": [], "fresh": [], "save": [], "cache": []}
    with ExitStack() as stack:
        fds = [os.memfd_create("cache") for _ in range(device.info.model_cache_files + device.info.data_cache_files)]
        for fd in fds:
            stack.callback(os.close, fd)
        model_cache, data_cache = fds[: device.info.model_cache_files], fds[device.info.model_cache_files :]

        def save() -> nnfmq.PreparedModel:
            return device.prepare(
                loaded, preference=_SUSTAINED, token=TOKEN, model_cache=model_cache, data_cache=data_cache
            )

        for _ in range(rounds):
            series["read"].append(_ns(lambda: nnfmq.load(path)))
            series["fresh"].append(_prepare_ns(lambda: device.prepare(loaded, preference=_SUSTAINED)))
            series["save"].append(_prepare_ns(save))
            series["cache"].append(
                _prepare_ns(lambda: device.prepare_from_cache(TOKEN, model_cache, data_cache, model=loaded))
            )
        return series, sum(os.fstat(fd).st_size for fd in fds)


def _ns(call: Callable[[], object]) -> int:
    begin_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin_ns


def _prepare_ns(prepare: Callable[[], nnfmq.PreparedModel]) -> int:
    begin_ns = time.perf_counter_ns()
    model = prepare()
    elapsed_ns = time.perf_counter_ns() - begin_ns
    model.close()
    return elapsed_ns


# ---- where the CPU time of a compilation goes


COMPILE_ROUNDS = 5
PARTS = ("lower", "pack", "write", "parse", "generate", "link")


def _print_compilation(arguments: argparse.Namespace) -> None:
    print(f"{'ms of CPU time':40} " + " ".join(f"{part:>8}" for part in (*PARTS, "total", "kernels", "lines")))
    for path in arguments.models:
        times, kernels, lines = measure_compilation(path, arguments.rounds)
        numbers = [*(times[part] / 1e6 for part in PARTS), sum(times.values()) / 1e6]
        counts = f"{kernels:8} {lines:8}"
        print(f"{Path(path).name:40} " + " ".join(f"{number:8.1f}" for number in numbers), counts)


def measure_compilation(path: str, rounds: int = COMPILE_ROUNDS) -> tuple[dict[str, int], int, int]:
    """Return the least CPU time of each of `PARTS` in ns, the number of kernels, and the lines of their text.

    The parts: lower operations to launches of kernels; pack constants, and plan memory; write the kernels as LLVM's
    text; parse it; generate object code; link and load that.
    """
    from nnfmq.engines.compiled import code_generator, partition
    from nnfmq.engines.compiled.kernel_compilation import Meanwhile, unique_kernels, warm_up
    from nnfmq.engines.compiled.kernels import Kernel
    from nnfmq.engines.compiled.target import Target

    model, found, counts = nnfmq.load(path).model, list[dict[str, int]](), [0, 0]
    warm_up()

    def compile_timed(kernels: Sequence[Kernel], target: Target, meanwhile: Meanwhile) -> list[bytes]:
        begin_ns = found[-1]["lower"]
        ends = [time.process_time_ns()]
        meanwhile()
        ends.append(time.process_time_ns())
        texts = [code_generator.ir_of([kernel], target) for kernel in unique_kernels(kernels)]
        ends.append(time.process_time_ns())
        modules = [code_generator.parsed_ir(text, target) for text in texts]
        ends.append(time.process_time_ns())
        codes = [code_generator.object_code(module, target) for module in modules]
        ends.append(time.process_time_ns())
        counts[:] = len(texts), sum(text.count("\n") for text in texts)
        found[-1] = {part: end - begin for part, begin, end in zip(PARTS, [begin_ns, *ends], ends, strict=False)}
        found[-1]["link"] = ends[-1]
        return codes

    for _ in range(1 + rounds):  # the first one imports
        found.append({"lower": time.process_time_ns()})
        partition.prepare(model, compile=compile_timed)
        found[-1]["link"] = time.process_time_ns() - found[-1]["link"]
    kernel_count, line_count = counts
    return {part: min(times[part] for times in found[1:]) for part in PARTS}, kernel_count, line_count


# ---- kernels that models have in common


def _print_shared(arguments: argparse.Namespace) -> None:
    print(f"{'after those above':40} {'kernels':>8} {'ms of CPU time':>16}")
    for path, kernels, time_ns in measure_shared(arguments.models, arguments.rounds):
        print(f"{Path(path).name:40} {kernels:8} {time_ns / 1e6:16.1f}")


def measure_shared(paths: Sequence[str], rounds: int = COMPILE_ROUNDS) -> list[tuple[str, int, int]]:
    """Return, for each model, its path, how many kernels are compiled, and the least CPU time of that in ns."""
    from nnfmq.engines.compiled.kernel_compilation import warm_up

    warm_up()
    models = [nnfmq.load(path).model for path in paths]
    found = []
    for _ in range(1 + rounds):  # the first one imports
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            stack.enter_context(settings.XDG_CACHE_HOME.exported(folder))
            stack.enter_context(settings.XDG_STATE_HOME.exported(folder))
            found.append([_compile_once(model) for model in models])
    columns = zip(paths, zip(*found[1:], strict=True), strict=True)
    return [(path, runs[0][0], min(time_ns for _, time_ns in runs)) for path, runs in columns]


def _compile_once(model: Model) -> tuple[int, int]:
    """Return how many kernels of a model are compiled on this thread, and the CPU time of its preparation in ns."""
    totals, device = [0], CompiledDevice(DeviceEntry("compiled", "compiled"))
    begin_ns = time.process_time_ns()
    with prepare_context(PrepareContext(on_progress=lambda _done, total: totals.append(total))):
        device.compile(model)
    return totals[-1], time.process_time_ns() - begin_ns


# ---- the program


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 0."""
    parser = parser_for(__doc__)
    commands = parser.add_subparsers(required=True, metavar="process|cache|compile|shared")
    process = commands.add_parser("process")
    process.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds (default: {ROUNDS})")
    process.add_argument("--model", type=Path, default=MODEL, help="model file (default: the digits' of the package)")
    process.set_defaults(command=_print_starts)
    cache = commands.add_parser("cache")
    cache.add_argument("models", nargs="+", metavar="MODEL", help=".tflite files")
    cache.add_argument("--device", default="compiled", help="device of the driver (default: compiled)")
    cache.add_argument("--rounds", type=int, default=CACHE_ROUNDS, help=f"rounds (default: {CACHE_ROUNDS})")
    cache.add_argument("--json", action="store_true", help="print JSON: everything in ns and bytes")
    cache.set_defaults(command=_print_caching)
    compilation = commands.add_parser("compile")
    compilation.add_argument("models", nargs="+", metavar="MODEL", help="model files")
    compilation.add_argument("--rounds", type=int, default=COMPILE_ROUNDS, help=f"rounds (default: {COMPILE_ROUNDS})")
    compilation.set_defaults(command=_print_compilation)
    shared = commands.add_parser("shared")
    shared.add_argument("models", nargs="+", metavar="MODEL", help="model files, in the order of their preparation")
    shared.add_argument("--rounds", type=int, default=COMPILE_ROUNDS, help=f"rounds (default: {COMPILE_ROUNDS})")
    shared.set_defaults(command=_print_shared)
    arguments = parser.parse_args(argv)
    arguments.command(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
