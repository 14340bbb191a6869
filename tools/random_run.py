"""Run random models on nnfmq and compare the results with ONNX Runtime's, or with LiteRT's reference kernels.

    python tools/random_run.py --count 20000 --device reference --results build/random-reference.jsonl
    python tools/random_run.py --format tflite --count 20000 --results build/random-tflite.jsonl
    python tools/random_run.py --results build/random-reference.jsonl --report
    python tools/random_run.py --show 4711            # one graph: its nodes, and where it differs

The results file has a line for each seed; a run goes on after the last one. Outcomes of a graph:

ok          the same shapes and types, integers equal, floats within the tolerance
amplified   results differ, but each node by itself, given the other runtime's inputs, gives the same: a rounding grew
different   a node by itself gives another result: the report names it
defined     a node by itself differs from ONNX Runtime's, but has the results of ONNX's reference implementation; from
            LiteRT's it differs in a documented way only, or because the HAL defines the operation in another way
refused     the model is refused when it is loaded, with the reasons
late        it is refused when it is prepared or executed, or anything else is raised: always a fault
crash       the other runtime crashed on one of the nodes that were drawn

Floats are within 2e-5 (float16: 2e-3) of the expected element, for operators that accumulate also of the largest one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from random_choices import Array, Graph, Part, few
from rich.console import Console
from rich.table import Table

import nnfmq
from nnfmq.importers import load_source
from nnfmq.importers.file_format import TFLITE_IMPORTER, importer_of, read_source
from nnfmq.lab.child_processes import BenchmarkFailed, ChildEnded, started_child


def _onnx(seed: int) -> Graph:
    import random_onnx
    from random_onnx_operators import OPERATORS

    return random_onnx.generate(seed, OPERATORS)


def _tflite(seed: int) -> Graph:
    import random_tflite

    return random_tflite.generate(seed)


_FORMATS: dict[str, Callable[[int], Graph]] = {"onnx": _onnx, "tflite": _tflite}

TOLERANCES = {"float16": 2e-3, "float32": 2e-5, "float64": 1e-10}
_WIDTHS = {"float32", "float64"}
_ACCUMULATING = re.compile(
    "MatMul|Gemm|Einsum|Conv|Reduce|Mean|Sum|Normalization|LRN|LSTM|GRU|RNN|Pool|Resize|Upsample|Softmax|Loss|"
    "Det|DFT|GridSample|RoiAlign|Col2Im|Scatter|AffineGrid|Mel|"
    "CONV|CONNECTED|MATMUL|MEAN|SUM|NORMALIZATION|POOL|RESIZE|SOFTMAX|REDUCE_PROD"
)


class Runner:
    """Runs graphs on one device of a driver."""

    def __init__(self, client: nnfmq.Client, device: str) -> None:
        self._device = client.device(device)

    def outcome(self, graph: Graph) -> dict[str, Any]:
        """Return the line of a graph."""
        whole = graph.whole()
        status, reason = self._run(whole)
        if status == "different":
            status, reason = self._traced(graph, reason)
        line = {"seed": graph.seed, "is_core": graph.is_core, "operators": whole.operators}
        return {**line, "status": status, "reason": reason}

    def _traced(self, graph: Graph, reason: str) -> tuple[str, str]:
        """Return the first node that differs by itself."""
        for part in graph.parts():
            status, detail = self._run(part)
            if status in ("different", "late", "defined"):
                return status, f"{part.operators[0]}: {detail}"
        return "amplified", reason

    def _run(self, part: Part) -> tuple[str, str]:
        try:
            # an extent of 0 means an unknown one in a file
            shapes: dict[str | int, Sequence[int]] = {v.name: v.array.shape for v in part.inputs if not v.array.size}
            loaded = nnfmq.load(part.content, shapes=shapes or None)
        except nnfmq.InvalidArgument as error:
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001  reported as a fault
            return "late", f"load raised {type(error).__name__}: {error}"
        try:
            found = self._results(loaded, part)
        except Exception as error:  # noqa: BLE001  reported as a fault
            return "late", f"{type(error).__name__}: {error}"
        expected = [value.array for value in part.outputs]
        reason = _first_difference(part, found, expected)
        if not reason:
            return "ok", ""
        status = "defined" if self._is_defined(part, found) else "different"
        return status, f"{reason} {[few(each)[:60] for each in part.inputs]}"

    def _results(self, loaded: nnfmq.LoadedModel, part: Part) -> list[Array]:
        arrays = {value.name: value.array for value in part.inputs}
        with self._device.prepare(loaded) as prepared:
            return list(prepared.execute(*(arrays[info.name] for info in prepared.inputs)))

    def _is_defined(self, part: Part, found: Sequence[Array]) -> bool:
        if len(part.operators) > 1:
            return False
        if importer_of(part.content) != TFLITE_IMPORTER:
            return part.reference is not None and _is_defined(part, found)
        expected = [value.array for value in part.outputs]
        following = self._results(load_source(replace(read_source(part.content), follows_tflite=True)), part)
        accumulates = any(map(_ACCUMULATING.search, part.operators))
        return not _first_difference(part, following, expected) or is_documented(
            part, found, lambda a, b: not difference(a, b, accumulates=accumulates)
        )


def _first_difference(part: Part, found: Sequence[Array], expected: Sequence[Array]) -> str:
    accumulates = any(map(_ACCUMULATING.search, part.operators))
    reasons = (difference(a, b, accumulates=accumulates) for a, b in zip(found, expected, strict=True))
    return next(filter(None, reasons), "")


def _is_defined(part: Part, found: Sequence[Array]) -> bool:
    """Return whether results are those of the reference implementation, in the types that ONNX Runtime gives them."""
    assert part.reference is not None
    try:
        defined = part.reference()
    except Exception:  # noqa: BLE001  it does not implement the node for these types
        return False
    with np.errstate(all="ignore"):
        typed = [a.astype(value.array.dtype) for a, value in zip(defined, part.outputs, strict=True)]
    return not _first_difference(part, found, typed)


def difference(found: Array, expected: Array, *, accumulates: bool) -> str:
    """Return how a result differs from the expected one; "" if it does not.

    The native interface may return integers, and floats of 64 bits, in another width if the values are equal.
    """
    if found.shape != expected.shape:
        return f"shape {found.shape}, expected {expected.shape}"
    are_integers = found.dtype.kind in "iu" and expected.dtype.kind in "iu"
    if found.dtype != expected.dtype and not are_integers and {found.dtype.name, expected.dtype.name} != _WIDTHS:
        return f"type {found.dtype}, expected {expected.dtype}"
    if expected.dtype.kind != "f":
        differ = found.astype(object) != expected.astype(object)
    else:
        differ = ~_close(found, expected, accumulates)
    if not np.any(differ):
        return ""
    place = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(differ)))
    values = (np.atleast_1d(found)[place], np.atleast_1d(expected)[place])
    return f"{int(np.sum(differ))} of {expected.size} elements: {values[0]!r} at {place}, expected {values[1]!r}"


def _close(found: Array, expected: Array, accumulates: bool) -> Array:
    relative = TOLERANCES[expected.dtype.name]
    wanted, given = expected.astype(np.float64), found.astype(np.float64)
    finite = np.abs(wanted[np.isfinite(wanted)])
    largest = float(finite.max(initial=0.0)) if accumulates else 0.0
    floor = float(np.finfo(expected.dtype).tiny) * (2 if expected.dtype == np.float16 else 1)
    with np.errstate(all="ignore"):
        close = np.abs(given - wanted) <= relative * np.maximum(np.abs(wanted), largest) + floor
    same: Array = (close & np.isfinite(wanted)) | (given == wanted) | (np.isnan(given) & np.isnan(wanted))
    return same


# -------------------------------------------------------------------------------------------- documented divergences
#
# Differences from LiteRT's reference kernels that docs/reference/model-formats.md lists. Operations that the HAL and
# TFLite define differently are another matter: an import that follows TFLite has LiteRT's results then.


_MAX = np.finfo(np.float32).max
_BEYOND_INT32 = 2.0**31
_LARGE = 1e10
_SUMS = (
    "BATCH_MATMUL", "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "REDUCE_PROD", "SUM", "TRANSPOSE_CONV",
)  # fmt: skip


def is_documented(part: Part, found: Sequence[Array], is_close: Callable[[Array, Array], bool]) -> bool:
    """Return whether the results of one operator differ from LiteRT's in a documented way only.

    `is_close` compares a result with the expected one.
    """
    name, inputs = part.operators[0], [value.array for value in part.inputs]
    expected = [value.array for value in part.outputs]
    if any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return False
    if name in _NAN and any(array.dtype.kind == "f" and np.isnan(array).any() for array in (*inputs, *found)):
        return True
    if name == "QUANTIZE":
        return _quantizes_beyond_int32(part, found[0], expected[0])
    if name in _RULES and _RULES[name](inputs, found[0], expected[0]):
        return True
    pairs = [(_limited(a), _limited(b)) for a, b in zip(found, expected, strict=True)]
    if name in _SUMS and any(map(_may_overflow, inputs)):
        pairs = [_where_both_are_finite(a, b) for a, b in pairs]
    return all(is_close(a, b) for a, b in pairs)


def _limited(array: Array) -> Array:
    """Return floats with the largest in place of infinity."""
    return np.clip(array, -_MAX, _MAX) if array.dtype == np.float32 else array


def _may_overflow(array: Array) -> bool:
    return array.dtype == np.float32 and not bool(np.all(np.abs(array) < _LARGE))


def _where_both_are_finite(found: Array, expected: Array) -> tuple[Array, Array]:
    """Return the results with 0 where one is infinite or NaN: that depends on the order of the additions."""
    with np.errstate(all="ignore"):
        finite = (np.abs(found) < _MAX) & (np.abs(expected) < _MAX)
    return np.where(finite, found, 0).astype(found.dtype), np.where(finite, expected, 0).astype(expected.dtype)


def _quantizes_beyond_int32(part: Part, found: Array, expected: Array) -> bool:
    x, scale = part.inputs[0].array, part.outputs[0].scale
    if x.dtype != np.float32:
        return False
    with np.errstate(all="ignore"):
        inside = np.abs(x.astype(np.float64) / scale) < _BEYOND_INT32
    return bool(np.array_equal(found[inside], expected[inside]))


def _is_gelu(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    """Return whether the results are equal but for the digits that LiteRT loses: 1 + erf(x) has those of 1."""
    with np.errstate(all="ignore"):
        lost = np.abs(found - expected) <= 4 * np.finfo(np.float32).eps * np.abs(inputs[0])
    return bool(np.all(lost | (found == expected) | (np.isnan(found) & np.isnan(expected))))


def _is_power(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    """Return whether the integers differ only where the power is beyond 32 bits."""
    return bool(np.all((found == expected) | (expected == np.iinfo(np.int32).min)))


def _reduces_none(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    return not inputs[0].size


def _is_int8(inputs: Sequence[Array], found: Array, expected: Array) -> bool:
    return bool(inputs[0].dtype == np.int8)


_NAN = frozenset(
    ("ARG_MAX", "ARG_MIN", "CAST", "MAXIMUM", "MAX_POOL_2D", "MINIMUM", "REDUCE_MAX", "REDUCE_MIN", "TOPK_V2")
)
_RULES: Mapping[str, Callable[[Sequence[Array], Array, Array], bool]] = {
    "GELU": _is_gelu,
    "POW": _is_power,
    "REDUCE_MAX": _reduces_none,
    "REDUCE_MIN": _reduces_none,
    "SUM": _is_int8,
}


# -------------------------------------------------------------------------------------------------------- processes


def work(connection: Any, start: int, stop: int, kind: str, device: str) -> None:
    """Send the line of each seed; a seed on which this process dies has none."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())  # the other runtimes print why they refuse a node
    with nnfmq.connect(embedded=True) as client:
        runner = Runner(client, device)
        for seed in range(start, stop):
            connection.send(runner.outcome(_FORMATS[kind](seed)))


def lines_of(start: int, stop: int, kind: str, device: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of the seeds from child processes; ONNX Runtime may crash one of them."""
    while start < stop:
        with started_child(work, start, stop, kind, device) as child:
            try:
                while start < stop:
                    line = child.receive(math.inf)
                    start = line["seed"] + 1
                    yield line
            except BenchmarkFailed as error:
                is_crash = isinstance(error, ChildEnded) and error.status < 0
                yield {"seed": start, "status": "crash" if is_crash else "late", "reason": str(error)}
                start += 1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def go_on(path: Path, count: int, kind: str, device: str) -> None:
    """Append the lines of the seeds that are not in the file yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = max((line["seed"] + 1 for line in read_lines(path)), default=0)
    with path.open("a") as file:
        for line in lines_of(start, count, kind, device):
            file.write(json.dumps(line) + "\n")
            file.flush()
            if line["seed"] % 500 == 499:
                print(f"{line['seed'] + 1} of {count}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- report


def report(lines: Sequence[dict[str, Any]]) -> None:
    """Print the counts, and the refusals and differences by operator."""
    console = Console()
    table = Table("graphs", *_STATUSES, "refused")
    core = [line for line in lines if line.get("is_core")]
    for title, chosen in (("all", lines), ("float32, float16, int32, bool", core)):
        counts = Counter(line["status"] for line in chosen)
        total = len(chosen) - counts["crash"]
        share = f"{100 * counts['refused'] / max(total, 1):.1f} %"
        table.add_row(title, *(str(counts[status]) for status in _STATUSES), share)
    console.print(table)
    for status in ("different", "defined", "late", "refused"):
        reasons: defaultdict[str, list[int]] = defaultdict(list)
        for line in lines:
            if line["status"] == status:
                for reason in _reasons(line):
                    reasons[reason].append(line["seed"])
        for reason, seeds in sorted(reasons.items(), key=lambda item: -len(item[1])):
            print(f"{status:9} {len(seeds):5}  {reason}  (seeds {', '.join(map(str, seeds[:4]))})")


_STATUSES = ("ok", "amplified", "defined", "different", "late", "refused", "crash")


def _reasons(line: dict[str, Any]) -> set[str]:
    """Return the reasons of a line without the numbers of its nodes and tensors."""
    text = line["reason"]
    if line["status"] in ("different", "defined"):
        return {text.split(":")[0]}
    found = [re.sub(r"operators? [\d, ]+ ?|\[[^]]*\]|\d+", "", part).strip() for part in text.splitlines()]
    return {part[:110] for part in found if "operators are not supported" not in part and part}


def show(seed: int, kind: str, device: str) -> None:
    """Print the nodes of a graph, and its outcome."""
    graph = _FORMATS[kind](seed)
    print(*graph.describe(), sep="\n")
    with nnfmq.connect(embedded=True) as client:
        line = Runner(client, device).outcome(graph)
    print(line["status"], line["reason"])


def main() -> int:
    """Run, report or show; the exit status is 1 if a graph differs or is refused late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, metavar="N", help="run the seeds below N that were not run yet")
    parser.add_argument("--format", choices=tuple(_FORMATS), default="onnx", help="of the models; default: onnx")
    parser.add_argument("--device", default="reference", help="reference (default) or compiled")
    parser.add_argument("--results", type=Path, default=Path("build/random.jsonl"), metavar="FILE")
    parser.add_argument("--report", action="store_true", help="print the report without running")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one graph and its outcome")
    arguments = parser.parse_args()
    if arguments.show is not None:
        show(arguments.show, arguments.format, arguments.device)
        return 0
    if not arguments.report:
        go_on(arguments.results, arguments.count, arguments.format, arguments.device)
    lines = read_lines(arguments.results)
    report(lines)
    return int(any(line["status"] in ("different", "late") for line in lines))


if __name__ == "__main__":
    import random_run  # by its name, by which child processes import it

    sys.exit(random_run.main())
