"""Two versions of nnfmq, measured in turns: the working tree and a commit, each built in a folder of its own.

`model_bench.py --against-ref REVISION` runs it. Each round of a model starts a process of each version, with an
embedded driver of its own. One version executes each form (`version_runner.FORMS`) for a short time, then the other
one, and in the next round the other way round. A short script starts with an empty cache of programs, and once more
with what it has put there. A round gives a ratio of two medians; printed are the median of the ratios and its 95 %
interval, which is to be below SLOWER_LIMIT.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_support import (
    MIN_ROUNDS,
    Report,
    Table,
    Tables,
    format_metric,
    format_threads,
    interval_limit,
    progress,
    ratio_columns,
)
from tflite_writer import Operator, Tensor, write
from version_runner import FORMS

from nnfmq.lab import placement
from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.placement import wait_until_idle

SLOWER_LIMIT = 1.03
TRIAL_S, QUICK_TRIAL_S = 0.05, 0.001  # for which a version executes each form of a model in a round
NULL = "null"
BEFORE, AFTER = "before", "after"
VERSIONS = (BEFORE, AFTER)
STARTS = ("script, first start", "script, cached")
_RUNNER = Path(__file__).with_name("version_runner.py")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class VersionsPlan:
    """The models by name; the CPUs of the worker and of the client, by number of threads; and how long to measure.

    The start is that of a script with the first model.

    There are `rounds` rounds, or as many as fit in `minutes`, if that is not None, but at least MIN_ROUNDS.
    """

    models: Mapping[str, Path]
    cpus: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    rounds: int
    minutes: float | None
    is_quick: bool
    no_color: bool


Sample = tuple[str, int, str]
"""Model, number of threads, form: what is compared."""
Times = dict[Sample, dict[str, list[float]]]
"""Median times in µs by sample and version, one for each round."""


def compare_versions(revision: str, plan: VersionsPlan, folder: Path) -> Report:
    """Build `revision` in `folder` and return the rows of the comparison; after Ctrl-C those of whole rounds.

    Raises:
        BenchmarkFailed: If there is no such commit, it cannot be built, or a version cannot execute a model.
    """
    commit = _commit(revision)
    archive = subprocess.run(["git", "-C", str(_ROOT), "archive", commit], check=True, stdout=subprocess.PIPE).stdout
    places = {BEFORE: build(archive, folder / BEFORE), AFTER: build(_working_tree(), folder / AFTER)}
    (null := folder / f"{NULL}.tflite").write_bytes(null_model())
    times: Times = {}
    is_interrupted = False
    try:
        _measure(places, {NULL: null, **plan.models}, plan, times)
    except KeyboardInterrupt:
        if not times:
            raise
        is_interrupted = True
    rows = [_row(sample, found) for sample, found in times.items()]
    missed = [row["target"]["target"] for row in rows if row["target"]["met"] is False]
    return {"versions": {"before": commit, "rows": rows}, "missed": missed, "interrupted": is_interrupted}


def _row(sample: Sample, found: Mapping[str, Sequence[float]]) -> Report:
    model, threads, form = sample
    ratios = [after / before for before, after in zip(found[BEFORE], found[AFTER], strict=True)]
    text = f"{model}, {format_threads(threads)}: {form}"
    return {
        "model": model, "threads": threads, "form": form, "rounds": len(ratios),
        **{f"{version}_us": statistics.median(found[version]) for version in VERSIONS},
        "target": interval_limit(text, ratios, statistics.median(ratios), SLOWER_LIMIT),
    }  # fmt: skip


def version_tables(report: Report) -> Tables:
    """Return the table of a comparison."""
    heads = ("model", ">threads", "form", ">before µs", ">after µs", ">ratio", ">95 %", "", ">rounds")
    rows = [
        [row["model"], str(row["threads"]), row["form"], *(format_metric(row[f"{version}_us"]) for version in VERSIONS),
         *ratio_columns(row["target"]), str(row["rounds"])]
        for row in report["rows"]
    ]  # fmt: skip
    return {"versions": Table(f"this working tree compared with {report['before'][:12]}", heads, rows)}


# ---- building a version


def build(archive: bytes, folder: Path) -> Path:
    """Install the source tree in a tar archive, without what it depends on, in a new folder; return where it is.

    Raises:
        BenchmarkFailed: If it cannot be built; with what pip says.
    """
    source, site = folder / "source", folder / "site"
    source.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(source)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkFailed(f"the version {folder.name} cannot be built: {done.stderr.strip()}")
    return site


def _working_tree() -> bytes:
    """Return an archive of the files in the working tree that git does not ignore, whether or not it knows them."""
    words = ["git", "-C", str(_ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    names = subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout.split(b"\0")
    present = b"\0".join(name for name in names if name and (_ROOT / os.fsdecode(name)).exists())
    words = ["tar", "-c", "-C", str(_ROOT), "--null", "--files-from=-"]
    return subprocess.run(words, input=present, check=True, stdout=subprocess.PIPE).stdout


def _commit(revision: str) -> str:
    words = ["git", "-C", str(_ROOT), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise BenchmarkFailed(f"no commit {revision}")
    return done.stdout.strip()


def null_model() -> bytes:
    """Return a model that only copies one float: its time is that of the burst."""
    tensors = [Tensor("x", (1,)), Tensor("shape", (1,), "INT32", (1).to_bytes(4, "little")), Tensor("y", (1,))]
    return write(tensors, [Operator("RESHAPE", (0, 1), (2,), "ReshapeOptions")], (0,), (2,))


# ---- rounds


def _measure(places: Mapping[str, Path], models: Mapping[str, Path], plan: VersionsPlan, times: Times) -> None:
    """Add the median of every version's trial to `times`, after each round."""
    parts = [(name, threads) for name in models for threads in plan.cpus]
    share_s = None if plan.minutes is None else 60 * plan.minutes / (len(parts) + 1)
    with progress(len(parts) + 1, plan.no_color) as advance:
        for name, threads in parts:
            advance(f"{name}, {format_threads(threads)}")
            orders = _orders(plan.rounds, share_s, time.monotonic())
            _measure_model(name, models[name], threads, places, plan, orders, times)
        advance("start")
        orders = _orders(plan.rounds, share_s, time.monotonic())
        _measure_starts(next(iter(plan.models.items())), places, orders, times)


def _orders(count: int, share_s: float | None, begin: float) -> Iterator[Sequence[str]]:
    """Yield the order of the versions, `count` times, or for `share_s` from `begin` on, at least MIN_ROUNDS times."""
    number = 0
    while number < count if share_s is None else number < MIN_ROUNDS or time.monotonic() < begin + share_s:
        yield VERSIONS if number % 2 == 0 else VERSIONS[::-1]
        number += 1


def _add(times: Times, sample: Sample, medians: Mapping[str, float]) -> None:
    for version, found in times.setdefault(sample, {version: [] for version in VERSIONS}).items():
        found.append(medians[version])


def _measure_model(
    name: str, path: Path, threads: int, places: Mapping[str, Path], plan: VersionsPlan,
    orders: Iterator[Sequence[str]], times: Times,
) -> None:  # fmt: skip
    """Add a round's medians for each order. Each round has new processes: medians of one model differ among them."""
    seconds = QUICK_TRIAL_S if plan.is_quick else TRIAL_S
    for order in orders:
        with ExitStack() as stack:
            runners = {
                version: stack.enter_context(_opened(places[version], path, *plan.cpus[threads])) for version in order
            }
            if len(cores := {runner.core for runner in runners.values()}) > 1:
                raise BenchmarkFailed(f"the versions run different cores: {', '.join(sorted(cores))}")
            pids = [pid for runner in runners.values() for pid in runner.pids]
            found = {}
            for version in order:
                wait_until_idle(pids)
                found[version] = runners[version].trial(seconds)
        for number, form in enumerate(FORMS):
            _add(times, (name, threads, form), {version: found[version][number] for version in VERSIONS})


@dataclass(frozen=True, slots=True)
class VersionRunner:
    """The process of a version, and what it is."""

    process: subprocess.Popen[str]
    core: str
    pids: Sequence[int]

    def trial(self, seconds: float) -> list[float]:
        """Return the median time of each form, in µs."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(f"{seconds}\n")
        stdin.flush()
        return [statistics.median(times) / 1000 for times in _line(self.process)]


@contextmanager
def _opened(place: Path, model: Path, computing: Sequence[int], client: Sequence[int]) -> Iterator[VersionRunner]:
    """Yield the runner of the version in `place`, which has prepared the model.

    Raises:
        BenchmarkFailed: If it cannot execute the model, or another nnfmq than that of `place` was imported.
    """
    cpus = [",".join(map(str, each)) for each in (computing, client)]
    words = [sys.executable, "-P", str(_RUNNER), "trials", str(model), *cpus]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, text=True, env=_environment(place), start_new_session=True
    ) as run:
        try:
            ready = _line(run)
            if not Path(ready["package"]).is_relative_to(place):
                raise BenchmarkFailed(f"{ready['package']} was imported, not the nnfmq in {place}")
            yield VersionRunner(run, ready["core"], ready["pids"])
        finally:
            assert run.stdin is not None
            run.stdin.close()


def _line(process: subprocess.Popen[str]) -> Any:
    """Return what the next line of a runner says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchmarkFailed(f"the runner of a version ended with status {process.wait()}; see above")
    return json.loads(line)


def _environment(place: Path, **more: str) -> dict[str, str]:
    """Return the environment in which Python imports the nnfmq in `place`, with byte code of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(place), "PYTHONPYCACHEPREFIX": str(place.parent / "bytecode")} | more


def _measure_starts(
    model: tuple[str, Path], places: Mapping[str, Path], orders: Iterator[Sequence[str]], times: Times
) -> None:
    """Measure scripts from the start of Python to its exit, with an empty cache of programs, then with that cache."""
    for order in orders:
        found: dict[str, list[float]] = {}
        for version in order:
            with tempfile.TemporaryDirectory(prefix="nnfmq-") as cache:
                environment = _environment(places[version], XDG_CACHE_HOME=cache)
                found[version] = [_start_us(model[1], environment) for _ in STARTS]
        for number, form in enumerate(STARTS):
            _add(
                times,
                (model[0], len(placement.ALLOWED), form),
                {version: found[version][number] for version in VERSIONS},
            )


def _start_us(model: Path, environment: Mapping[str, str]) -> float:
    begin = time.perf_counter()
    words = [sys.executable, "-P", str(_RUNNER), "start", str(model)]
    done = subprocess.run(words, env=environment, check=False, start_new_session=True, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkFailed(f"a script ended with status {done.returncode}: {done.stderr.strip()}")
    return (time.perf_counter() - begin) * 1e6
