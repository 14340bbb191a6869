"""Clients of one ONNX file that the driver hosts on ONNX Runtime, beside as many processes that run it themselves.

*memory*: the PSS of the driver, its workers and the clients, and of ONNX Runtime's processes, one after the other. PSS
leaves out shared memory that a process has open and none maps, as a model file may be: it is counted as well. Of the
file's bytes in shared memory, the copies are counted. *throughput*: all clients execute again and
again for some seconds; the two alternate. Each execution has one thread. The model should be larger than 10 MB; by
default one of 3 million random weights is written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_support import Report, Table, Tables, lower_limit, missed_targets, positive, targets_table, upper_limit
from driver_memory import READINGS, Client, memory_rows, reading, started_clients, summary, write_bytecode

from nnfmq.lab.child_processes import call_in_child
from nnfmq.lab.listening_driver import started_daemon
from nnfmq.lab.placement import open_memfd_bytes, open_memfd_sizes

THROUGHPUT_LIMIT, MEMORY_LIMIT = 1.0, 1.1
_TITLES = {"hosted": "nnfmq", "onnxruntime": "ONNX Runtime"}
_BEGIN_NS = 50_000_000  # from the messages to the clients to the beginning of a trial
_WIDTH, _LAYERS = 900, 4
MIB = 1 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--model", type=Path, help="an .onnx file with inputs of known sizes (default: one is written)")
    parser.add_argument("--clients", type=positive, default=8, help="of each runtime (default: 8)")
    parser.add_argument("--rounds", type=positive, default=10, help="interleaved rounds (default: 10)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one trial of throughput (default: 3)")
    parser.add_argument("--executions", type=positive, default=100, help="before memory is read (default: 100)")
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of each step in seconds")
    parser.set_defaults(together=False)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report, as --json prints it. `folder` is for the driver's files and the written model.

    Raises:
        BenchmarkFailed: If the driver or a client fails, or a step takes longer than its limit.
    """
    write_bytecode(options)
    model = options.model
    if model is None:
        model = folder / "products.onnx"
        call_in_child(_write_model, model, limit_s=options.limit)
    with started_daemon(folder) as daemon:
        _say(f"{options.clients} clients of the driver")
        with started_clients("hosted", model, options, daemon.socket) as hosted:
            subject = [reading(hosted, daemon) for _ in range(READINGS)]
            pids = subject[-1].memory
            unmapped = max(0, open_memfd_bytes(pids) - subject[-1].total().shared)
            copies = sum(size == model.stat().st_size for size in open_memfd_sizes(pids))
        _say(f"{options.clients} processes of ONNX Runtime")
        with started_clients("onnxruntime", model, options) as own:
            baseline = [reading(own, None) for _ in range(READINGS)]
            with started_clients("hosted", model, options, daemon.socket) as hosted:
                groups = {"hosted": hosted, "onnxruntime": own}
                rounds = [_round(groups, number, options) for number in range(options.rounds)]
    hosted_pss, own_pss = ([each.total().pss for each in found] for found in (subject, baseline))
    targets = [_throughput_target(rounds), *_memory_targets(hosted_pss, own_pss, unmapped)]
    return {
        "conditions": {
            "model": model.name, "model_bytes": model.stat().st_size, "clients": options.clients,
            "rounds": options.rounds, "seconds": options.seconds,
        },
        "memory": {"hosted": summary(subject), "onnxruntime": summary(baseline)},
        "file_copies": copies, "unmapped_bytes": unmapped, "per_second": rounds, "targets": targets,
        "missed": missed_targets(targets),
    }  # fmt: skip


def _write_model(path: Path) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(11)
    nodes, weights, last = [], [], "x"
    for number in range(_LAYERS):
        values = random.standard_normal((_WIDTH, _WIDTH), np.float32) / np.float32(_WIDTH**0.5)
        weights.append(numpy_helper.from_array(values, f"weights{number}"))
        nodes.append(helper.make_node("MatMul", [last, f"weights{number}"], [f"product{number}"]))
        nodes.append(helper.make_node("Relu", [f"product{number}"], [f"positive{number}"]))
        last = f"positive{number}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, _WIDTH]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "products", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def _round(groups: dict[str, list[Client]], number: int, options: argparse.Namespace) -> dict[str, float]:
    _say(f"round {number + 1} of {options.rounds}")
    found = {}
    for kind in sorted(groups, reverse=bool(number % 2)):
        line = f"{time.monotonic_ns() + _BEGIN_NS} {options.seconds}"
        for client in groups[kind]:
            client.send(line)
        counts = [client.receive(options.limit + options.seconds)["executions"] for client in groups[kind]]
        found[kind] = sum(counts) / options.seconds
    return found


_THAN = "over that of as many processes of ONNX Runtime"


def _throughput_target(rounds: Sequence[dict[str, float]]) -> Report:
    ratios = [each["hosted"] / each["onnxruntime"] for each in rounds]
    return lower_limit(f"throughput {_THAN}", ratios, statistics.median(ratios), THROUGHPUT_LIMIT, "×")


def _memory_targets(subject: Sequence[int], baseline: Sequence[int], unmapped: int) -> list[Report]:
    found = []
    for text, more in (("PSS", 0), ("PSS and shared memory that is not mapped", unmapped)):
        ratios = [(a + more) / b for a, b in zip(subject, baseline, strict=True)]
        found.append(upper_limit(f"{text} {_THAN}", ratios, statistics.median(ratios), MEMORY_LIMIT, "×"))
    return found


def _say(text: str) -> None:
    print(f"hosting: {text}", file=sys.stderr, flush=True)


def tables(report: Report) -> Tables:
    """Return the targets, the memory by kind of process, and the throughput."""
    heads = ("processes", ">count", ">PSS MiB", ">Private_Dirty", ">anonymous", ">of files", ">shared memory")
    rows = [row for kind, title in _TITLES.items() for row in memory_rows(title, report["memory"][kind])]
    rates = [
        [title, f"{statistics.median(each[kind] for each in report['per_second']):,.0f}"]
        for kind, title in _TITLES.items()
    ]
    conditions, copies = report["conditions"], report["file_copies"]
    title = (
        f"{conditions['model']}: {conditions['model_bytes'] / MIB:.1f} MiB, in shared memory {copies} "
        f"time{'s' if copies != 1 else ''} for {conditions['clients']} clients; not mapped: "
        f"{report['unmapped_bytes'] / MIB:.1f} MiB"
    )
    return {
        "targets": targets_table(report["targets"]),
        "memory": Table(title, heads, rows),
        "throughput": Table("executions per second", ("runtime", ">median of the rounds"), rates),
    }
