"""Run random ONNX graphs on nnfmq and compare the results with ONNX Runtime's.

    python tools/random_onnx_run.py --count 20000 --device reference --results build/random-reference.jsonl
    python tools/random_onnx_run.py --results build/random-reference.jsonl --report
    python tools/random_onnx_run.py --show 4711            # one graph: its nodes, and where it differs

The results file has a line for each seed; a run goes on after the last one. Outcomes of a graph:

ok          the same shapes and types, integers equal, floats within the tolerance
amplified   results differ, but each node by itself, given ONNX Runtime's inputs, gives the same: rounding was amplified
different   a node by itself gives another result: the report names it
refused     the model is refused when it is loaded, with the reasons
late        it is refused when it is prepared or executed, or anything else is raised: always a fault
crash       ONNX Runtime crashed on one of the nodes that were drawn

Floats are within 2e-5 (float16: 2e-3) of the expected element, for operators that accumulate also of the largest one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from random_onnx import Array, Node, RandomGraph, Value, generate, single_node, to_model
from random_onnx_operators import OPERATORS
from rich.console import Console
from rich.table import Table

import nnfmq
from nnfmq.hal.errors import NnfmqError

TOLERANCES = {"float16": 2e-3, "float32": 2e-5, "float64": 1e-10}
_ACCUMULATING = re.compile(
    "MatMul|Gemm|Einsum|Conv|Reduce|Mean|Sum|Normalization|LRN|LSTM|GRU|RNN|Pool|Resize|Upsample|Softmax|Loss|"
    "Det|DFT|GridSample|RoiAlign|Col2Im|Scatter|AffineGrid|Mel"
)


class Runner:
    """Runs graphs on one device of a driver."""

    def __init__(self, client: nnfmq.Client, device: str) -> None:
        self._device = client.device(device)

    def outcome(self, graph: RandomGraph) -> dict[str, Any]:
        """Return the line of a graph."""
        line: dict[str, Any] = {"seed": graph.seed, "opset": graph.opset, "is_core": graph.is_core}
        line["operators"] = [node.proto.op_type for node in graph.nodes]
        outputs = graph.results()
        status, reason = self._run(to_model(graph, outputs), graph.inputs(), outputs, line["operators"])
        if status == "different":
            status, reason = self._traced(graph, reason)
        return {**line, "status": status, "reason": reason}

    def _traced(self, graph: RandomGraph, reason: str) -> tuple[str, str]:
        """Return the first node that differs by itself."""
        for node in graph.nodes:
            model = single_node(node.proto, node.inputs, graph.opset, node.outputs)
            status, detail = self._run(model, _given(node), node.outputs, [node.proto.op_type])
            if status in ("different", "late"):
                return status, f"{node.proto.op_type}: {detail}"
        return "amplified", reason

    def _run(
        self, model: bytes, inputs: Sequence[Value], outputs: Sequence[Value], operators: Sequence[str]
    ) -> tuple[str, str]:
        try:
            loaded = nnfmq.load(model)
        except nnfmq.InvalidArgument as error:
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001  reported as a fault
            return "late", f"load raised {type(error).__name__}: {error}"
        try:
            with self._device.prepare(loaded) as prepared:
                found = prepared.execute(*_fitting(inputs, prepared.inputs))
        except NnfmqError as error:
            return "late", f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  reported as a fault
            return "late", f"raised {type(error).__name__}: {error}"
        for value, array in zip(outputs, found, strict=True):
            reason = difference(array, value.array, accumulates=any(map(_ACCUMULATING.search, operators)))
            if reason:
                return "different", f"{reason} {[_text(each) for each in inputs]}"
        return "ok", ""


def _given(node: Node) -> list[Value]:
    found = {value.name: value for value in node.inputs if value is not None and not value.is_constant}
    return list(found.values())


def _fitting(inputs: Sequence[Value], infos: Sequence[Any]) -> list[Array]:
    """Return the arrays of the inputs, by name; the native interface may have narrower integers."""
    arrays = {value.name: value.array for value in inputs}
    return [arrays[info.name] for info in infos]


def difference(found: Array, expected: Array, *, accumulates: bool) -> str:
    """Return how a result differs from the expected one; "" if it does not.

    The native interface may return integers and floats of 64 bits in a narrower type if the values are equal.
    """
    if found.shape != expected.shape:
        return f"shape {found.shape}, expected {expected.shape}"
    narrower = expected.dtype.itemsize == 8 and found.dtype.kind == expected.dtype.kind
    if found.dtype != expected.dtype and not narrower and expected.dtype.name not in ("uint32",):
        return f"type {found.dtype}, expected {expected.dtype}"
    if expected.dtype.kind != "f":
        differ = found.astype(object) != expected.astype(object) if narrower else found != expected
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


def _text(value: Value) -> str:
    return f"{value.array.dtype}{list(value.array.shape)}"


# -------------------------------------------------------------------------------------------------------- processes


def work(start: int, stop: int, device: str) -> None:
    """Print the line of each seed; a seed on which this process dies has none."""
    with nnfmq.connect(embedded=True) as client:
        runner = Runner(client, device)
        for seed in range(start, stop):
            print(json.dumps(runner.outcome(generate(seed, OPERATORS))), flush=True)


def lines_of(start: int, stop: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of the seeds from worker processes; ONNX Runtime may crash one of them."""
    while start < stop:
        command = [sys.executable, __file__, "--work", str(start), str(stop), "--device", device]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
            assert worker.stdout is not None
            for text in worker.stdout:
                line = json.loads(text)
                start = line["seed"] + 1
                yield line
        if worker.returncode:
            reason = f"the process ended with {worker.returncode}"
            yield {"seed": start, "status": "crash" if worker.returncode < 0 else "late", "reason": reason}
            start += 1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def go_on(path: Path, count: int, device: str) -> None:
    """Append the lines of the seeds that are not in the file yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = max((line["seed"] + 1 for line in read_lines(path)), default=0)
    with path.open("a") as file:
        for line in lines_of(start, count, device):
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
    for status in ("different", "late", "refused"):
        reasons: defaultdict[str, list[int]] = defaultdict(list)
        for line in lines:
            if line["status"] == status:
                for reason in _reasons(line):
                    reasons[reason].append(line["seed"])
        for reason, seeds in sorted(reasons.items(), key=lambda item: -len(item[1])):
            print(f"{status:9} {len(seeds):5}  {reason}  (seeds {', '.join(map(str, seeds[:4]))})")


_STATUSES = ("ok", "amplified", "different", "late", "refused", "crash")


def _reasons(line: dict[str, Any]) -> set[str]:
    """Return the reasons of a line without the numbers of its nodes and tensors."""
    text = line["reason"]
    if line["status"] == "different":
        return {text.split(":")[0]}
    found = [re.sub(r"operators? [\d, ]+ ?|\[[^]]*\]|\d+", "", part).strip() for part in text.splitlines()]
    return {part[:110] for part in found if "operators are not supported" not in part and part}


def show(seed: int, device: str) -> None:
    """Print the nodes of a graph, and its outcome."""
    graph = generate(seed, OPERATORS)
    print(f"seed {seed}, opset {graph.opset}, {graph.family}")
    for node in graph.nodes:
        attributes = {a.name: _attribute(a) for a in node.proto.attribute}
        print(f"  {node.proto.op_type} {attributes}")
        for value in node.inputs:
            print("     ", "omitted" if value is None else f"{value.name} {_text(value)} {_few(value.array)}")
        print("   →", ", ".join(f"{value.name} {_text(value)} {_few(value.array)}" for value in node.outputs))
    with nnfmq.connect(embedded=True) as client:
        line = Runner(client, device).outcome(graph)
    print(line["status"], line["reason"])


def _attribute(attribute: Any) -> Any:
    from onnx import helper

    return helper.get_attribute_value(attribute)


def _few(array: Array) -> str:
    return np.array2string(array.reshape(-1)[:12], separator=",", max_line_width=200)


def main() -> int:
    """Run, report or show; the exit status is 1 if a graph differs or is refused late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, metavar="N", help="run the seeds below N that were not run yet")
    parser.add_argument("--device", default="reference", help="reference (default) or compiled")
    parser.add_argument("--results", type=Path, default=Path("build/random-onnx.jsonl"), metavar="FILE")
    parser.add_argument("--report", action="store_true", help="print the report without running")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one graph and its outcome")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        start, stop = arguments.work
        work(start, stop, arguments.device)
        return 0
    if arguments.show is not None:
        show(arguments.show, arguments.device)
        return 0
    if not arguments.report:
        go_on(arguments.results, arguments.count, arguments.device)
    lines = read_lines(arguments.results)
    report(lines)
    return int(any(line["status"] in ("different", "late") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
