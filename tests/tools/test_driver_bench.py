"""`tools/driver_bench.py`: small runs of the real command, its tables and its targets. No time or size is asserted."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import driver_bench
import driver_calls
import driver_classes
import driver_deaths
import driver_hosting
import driver_isolation
import driver_memory
import driver_runtimes
import driver_sandbox
import driver_sharing
import pytest
from bench_support import failed, lower_limit, outcome_text, upper_limit
from driver_isolation import PHASES, write_message
from driver_sharing import best_misses, deadlines_of
from support import commands
from support.drivers import short_folder, until
from support.places import ROOT

import nnfmq
from nnfmq.base import processes
from nnfmq.lab import placement
from nnfmq.serialize.models import decode_model

LIMIT_S = 200
MIB = 1 << 20
DIGITS = ROOT / "nnfmq" / "data" / "digits_quant.tflite"
SMALL = ("--rounds", "1", "--pool-mib", "8", "--message-mib", "1", "--model", str(DIGITS))


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder for the tool's files; its path is short enough for a socket."""
    with short_folder() as path:
        yield path


def command(folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "NNFMQ_DATA")}
    return [sys.executable, str(ROOT / "tools" / "driver_bench.py"), *words], kept | {"TMPDIR": str(folder)}


def reported(folder: Path, *words: str) -> Any:
    asked, environment = command(folder, *words, "--json")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


# ---- memory


def test_a_small_run_measures_every_kind_of_process(folder: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    report = reported(
        folder, "memory", "--sections", "quantized,busy", "--model", str(DIGITS), "--clients", "2", "--executions", "3",
        "--busy", "1", "--settle", "0.2",
    )  # fmt: skip
    quantized, busy = report["sections"]
    kinds = quantized["nnfmq"]["kinds"]
    assert (kinds["client"]["count"], kinds["worker"]["count"], kinds["supervisor"]["count"]) == (2, 2, 1)
    assert quantized["litert"]["kinds"]["client"]["count"] == 2
    assert set(quantized["idle"]["after the last client"]["kinds"]) <= {"supervisor", "other process of the driver"}
    assert_sums(quantized["nnfmq"])
    assert quantized["arena_bytes"] > 0
    assert [len(section["targets"]) for section in (quantized, busy)] == [5, 2]
    assert all(target["value"] > 0 for target in quantized["targets"] + busy["targets"])


def assert_sums(found: dict[str, Any]) -> None:
    pss = [process["pss"] for process in found["processes"]]
    assert sum(pss) == sum(kind["pss"] for kind in found["kinds"].values()) == found["total"]["pss"]
    assert min(pss) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_busy_clients_and_removes_all_files(folder: Path, number: signal.Signals) -> None:
    words, environment = command(
        folder,
        "memory",
        "--sections",
        "busy",
        "--model",
        str(DIGITS),
        "--clients",
        "1",
        "--busy",
        "60",
        "--settle",
        "0.1",
    )
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert "come and go" in process.stderr.readline()
        until(lambda: len(processes.descendants(process.pid)) > 3, "the clients start")
        pids = processes.descendants(process.pid)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 130
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert list(folder.iterdir()) == []


def test_measuring_memory_imports_no_numpy_whose_pages_it_would_share() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import driver_memory; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(ROOT / "tools")], timeout=LIMIT_S, check=True)


# ---- parts


def test_private_memory_is_read_after_it_was_written() -> None:
    before = placement.memory_of(os.getpid())
    size = 16 * MIB
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE) as memory:  # malloc could reuse memory that was freed before
        memory.write(b"1" * size)
        after = placement.memory_of(os.getpid())
    assert before is not None and after is not None
    assert after.private_dirty - before.private_dirty >= size - MIB
    assert after.pss - before.pss >= size - MIB
    assert after.anonymous + after.file + after.shared == pytest.approx(after.pss, rel=0.01)


def test_a_process_that_has_exited_has_no_memory_and_no_children() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert placement.memory_of(process.pid) is None
    assert processes.descendants(process.pid) == []
    assert placement.command_of(process.pid) == ""


def test_shared_memory_counts_once_mapped_or_not() -> None:
    before = placement.open_memfd_bytes([os.getpid()])
    with nnfmq.Memory.create(4 * MIB) as memory:
        memory.view[:] = bytes([1]) * (4 * MIB)
        fd = os.dup(memory.fileno())
        try:
            assert placement.open_memfd_bytes([os.getpid(), os.getpid()]) - before == 4 * MIB
        finally:
            os.close(fd)
    assert placement.open_memfd_bytes([os.getpid()]) == before


@pytest.mark.parametrize(
    ("values", "value", "text"),
    [
        ((1.0, 1.1), 1.05, "met"),
        ((1.4, 1.6), 1.45, "not measured"),
        ((1.4, 1.6), 1.55, "not measured"),
        ((1.9, 2.0), 2.0, "missed"),
        ((), 1.5, "met"),
    ],
)
def test_a_difference_below_the_noise_is_not_measured(values: tuple[float, ...], value: float, text: str) -> None:
    assert outcome_text(upper_limit("", values, value, 1.5, "×")) == text


def test_what_failed_is_missed_without_a_value() -> None:
    assert outcome_text(failed("", 1.5, "×")) == "missed"


# ---- isolation


def test_every_phase_is_killed_and_each_exit_is_measured(folder: Path) -> None:
    rows = reported(folder, "isolation", *SMALL, "--sections", "kills", "--kills", "1")["kills"]
    assert [row["phase"] for row in rows] == list(PHASES)
    for row in rows:
        assert row["exit_ms"]["count"] == 1 and row["exit_ms"]["max"] > 0
        assert row["targets"][0]["value"] == row["exit_ms"]["p99"]
        assert row["work_s"] > 0


def test_connects_are_measured_alone_and_beside_silent_connections(folder: Path) -> None:
    found = reported(folder, "isolation", *SMALL, "--sections", "connections", "--silent", "20", "--connects", "3")[
        "connections"
    ]
    assert found["opened"] == [20]
    assert found["alone_ms"]["count"] == 3
    assert found["failed"] + found["beside_ms"]["count"] == 3


@pytest.mark.skipif(placement.two_cpus() is None, reason="needs two CPUs")
def test_a_neighbour_is_measured_alone_and_beside_a_phase(folder: Path) -> None:
    words = ("--sections", "neighbour", "--phases", "copying,idle", "--seconds", "0.2")
    (row,) = reported(folder, "isolation", *SMALL, *words)["neighbour"]
    assert (row["phase"], row["status"]) == ("copying", "NONE")
    assert row["alone_us"]["count"] > 0 and row["beside_us"]["count"] > 0
    assert row["repetitions"] > 0
    assert row["targets"][0]["value"] == pytest.approx(row["beside_us"]["p99"] / row["alone_us"]["p99"])


@pytest.mark.parametrize(
    ("number", "by_nohup"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_an_interrupt_ends_all_processes_and_removes_all_files(
    folder: Path, number: signal.Signals, by_nohup: bool
) -> None:
    words, environment = command(
        folder, "isolation", *SMALL, "--sections", "kills", "--phases", "computing", "--kills", "1000"
    )
    if by_nohup:
        words[1:] = commands.ignoring_signals(*words[1:])
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        until(lambda: len(processes.descendants(process.pid)) > 3, "the driver and a client start")
        pids = processes.descendants(process.pid)
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(LIMIT_S) == 130
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert list(folder.iterdir()) == []


def test_the_large_message_is_one_encoded_model(tmp_path: Path) -> None:
    write_message(tmp_path / "message", 100_000)
    data = (tmp_path / "message").read_bytes()
    assert 100_000 <= len(data) < 101_000
    assert len(decode_model(data, ()).main.operands) > 1000


# ---- sharing


def test_throughput_and_misses_are_measured_beside_litert(folder: Path) -> None:
    pytest.importorskip("ai_edge_litert", exc_type=ImportError)
    report = reported(folder, "sharing", "--quick", "--model", str(DIGITS))
    (throughput,), (deadlines,) = report["throughput"], report["deadlines"]
    for found in throughput.values():
        assert 0 < found["fewest"] <= found["most"] and 0 < found["ms"]["p50"] <= found["ms"]["p99.9"]
    ratio = throughput["nnfmq"]["per_second"] / throughput["LiteRT"]["per_second"]
    assert report["targets"][0]["value"] == pytest.approx(ratio)
    assert report["targets"][0]["sense"] == "at least"
    assert [found["executions"] for found in deadlines.values()] == [4] * 3
    assert all(0 <= missed <= 4 for found in deadlines.values() for missed in found["missed"].values())


def test_an_interactive_client_is_measured_beside_batch_clients(folder: Path) -> None:
    pytest.importorskip("llvmlite", exc_type=ImportError)
    report = reported(folder, "classes", "--quick", "--model", str(DIGITS))
    (found,) = report["rounds"]
    assert all(0 < found[name]["ms"]["p50"] <= found[name]["ms"]["p99"] for name in ("alone", "classes", "equal"))
    assert all(found[name]["per_second"] > 0 for name in ("batch", "classes", "equal"))
    assert report["targets"][0]["value"] == pytest.approx(found["classes"]["ms"]["p99"] / found["alone"]["ms"]["p99"])
    left = found["batch"]["per_second"] * (1 - found["alone"]["cpu_share"] / len(os.sched_getaffinity(0)))
    assert report["targets"][1]["value"] == pytest.approx(100 * found["classes"]["per_second"] / left)


def test_fairness_is_jains_index() -> None:
    assert driver_classes.jain([3, 3, 3]) == 1
    assert driver_classes.jain([1, 0, 0, 0]) == 0.25
    assert driver_classes.jain([2, 1]) == pytest.approx(0.9)


def test_a_missing_model_is_an_error(folder: Path) -> None:
    words, environment = command(folder, "sharing", "--quick")
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 1
    assert "needs --model FILE" in done.stderr


def misses(order: Sequence[int], run_ns: int, cores: int) -> int:
    """Count the misses of executions that run in this order; one that would end late does not begin."""
    begun = 0
    for deadline in order:
        begun += (begun // cores + 1) * run_ns <= deadline
    return len(order) - begun


@pytest.mark.parametrize("deadlines", [(1, 1, 1, 2, 2), (3, 1, 2, 2), (5, 5, 5, 5, 5), (0, 1, 1, 3, 3)])
@pytest.mark.parametrize("cores", [1, 2])
def test_no_order_has_fewer_misses_than_the_best_one(deadlines: tuple[int, ...], cores: int) -> None:
    orders = (order for count in range(len(deadlines) + 1) for order in itertools.permutations(deadlines, count))
    fewest = min(misses(order, 1, cores) + len(deadlines) - len(order) for order in orders)
    assert best_misses(deadlines, 1, cores) == fewest


def test_deadlines_leave_one_run_more_than_the_best_order_needs() -> None:
    assert deadlines_of(10, 5, 2, 1.0) == [20, 20, 30, 30, 40]
    assert deadlines_of(10, 2, 1, 1.5) == [30, 45]
    assert best_misses(deadlines_of(10, 8, 2, 1.0), 10, 2) == 0


# ---- tables


SIZES = {"pss": 3 * MIB, "private_dirty": 2 * MIB, "anonymous": MIB, "file": MIB, "shared": MIB}
FOUND = {"kinds": {"worker": {"count": 2, **SIZES}}, "total": SIZES}
MEMORY: dict[str, Any] = {
    "conditions": {"clients": 2, "load_before": [0.1, 0.2], "together": False},
    "sections": [
        {"section": "quantized", "nnfmq": FOUND, "litert": FOUND, "idle": {"before any client": FOUND},
         "targets": [upper_limit("ratio", (1.4, 1.6), 1.45, 1.5, "×")]},
    ],
}  # fmt: skip
TIMES = {"p50": 1.0, "p99": 2.0, "max": 3.0, "p99.9": 2.5, "count": 4}
ISOLATION: dict[str, Any] = {
    "conditions": {"cpu": "x"},
    "connections": {"silent": 2000, "failed": 4, "alone_ms": TIMES, "beside_ms": None,
                    "targets": [failed("delay", 50, "ms")]},
    "kills": [{"phase": "copying", "kills": 4, "work_s": 0.5, "status": "NONE", "used_bytes": 5 * MIB, "exit_ms": TIMES,
               "memory_ms": TIMES, "targets": [upper_limit("exit", (2.0,), 2.0, 100, "ms")]}],
    "neighbour": [{"phase": "copying", "repetitions": 7, "status": "NONE", "alone_us": TIMES, "beside_us": TIMES,
                   "targets": []}],
}  # fmt: skip


def test_the_tables_of_memory_have_every_kind_of_process_and_every_outcome() -> None:
    made = driver_memory.tables(MEMORY)
    assert made["targets"].rows == [["ratio", "1.45 ×", "0.20 ×", "at most 1.50 ×", "not measured"]]
    rows = made["quantized"].rows
    assert ["nnfmq: worker", "2", "3.0", "2.0", "1.0", "1.0", "1.0"] in rows
    assert ["idle, before any client: all", "2", "3.0", "2.0", "1.0", "1.0", "1.0"] in rows


def test_sharing_has_medians_of_the_rounds_and_sums_of_the_misses() -> None:
    def each(rate: float) -> dict[str, Any]:
        return {"per_second": rate, "fewest": 9, "most": 11, "ms": TIMES}

    def missed(count: int) -> dict[str, Any]:
        return {"executions": 16, "best": 1, "missed": {"nnfmq": count, "LiteRT": 8}}

    report = {
        "conditions": {"clients": 2},
        "throughput": [{"nnfmq": each(rate), "LiteRT": each(5)} for rate in (10, 30, 20)],
        "deadlines": [{"2 ×": missed(count)} for count in (2, 3)],
        "targets": [lower_limit("throughput", (1.9, 2.0), 1.95, 1.8, "×")],
    }
    made = driver_sharing.tables(report)
    assert made["targets"].rows == [["throughput", "1.95 ×", "0.10 ×", "at least 1.80 ×", "met"]]
    assert made["throughput"].rows[0] == ["nnfmq", "20", "9", "11", "1.00", "2.00", "2.50"]
    assert made["deadlines"].rows == [["2 ×", "32", "2", "5", "16"]]


def test_hosting_has_the_memory_of_both_and_medians_of_the_rounds() -> None:
    kinds = {"client": {"count": 2, "pss": 3 * MIB, "private_dirty": 0, "anonymous": 0, "file": 0, "shared": 0}}
    memory = {"kinds": kinds, "total": kinds["client"]}
    report = {
        "conditions": {"model": "a.onnx", "model_bytes": 2 * MIB, "clients": 2},
        "memory": {"hosted": memory, "onnxruntime": memory}, "file_copies": 1, "unmapped_bytes": MIB,
        "per_second": [{"hosted": rate, "onnxruntime": 5} for rate in (10, 30, 20)], "targets": [],
    }  # fmt: skip
    made = driver_hosting.tables(report)
    assert made["memory"].title == "a.onnx: 2.0 MiB, in shared memory 1 time for 2 clients; not mapped: 1.0 MiB"
    assert made["memory"].rows[0][:3] == ["nnfmq: client", "2", "3.0"]
    assert made["throughput"].rows == [["nnfmq", "20"], ["ONNX Runtime", "5"]]


def test_what_hosting_adds_to_a_runtime_is_that_of_p50_with_its_noise(folder: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    words = ("runtimes", "--runtimes", "litert", "--models", "digits", "--threads", "1", "--count", "25")
    report = reported(folder, *words)
    (row,) = report["rows"]
    assert list(row["runners"]) == ["burst", "burst, polling", "LiteRT"]
    assert {name: len(rounds) for name, rounds in row["added_us"].items()} == {"burst": 5, "burst, polling": 5}
    assert [target["limit"] for target in report["targets"]] == [6 + row["copy_us"]] * 2
    row["added_us"] = {"burst": [7.0, 9.0, 8.0], "burst, polling": [5.0, 4.0, 4.5]}
    shown = driver_runtimes.tables(report)["runtimes"].rows
    assert [(line[1], line[3], line[7], line[8]) for line in shown] == [
        ("LiteRT", "burst", "8.0", "2.0"), ("LiteRT", "burst, polling", "4.5", "1.0"),
        ("LiteRT", "in the process", "", ""),
    ]  # fmt: skip


def test_calls_have_medians_of_the_rounds_and_ratios_to_the_burst() -> None:
    def each(factor: float) -> dict[str, Any]:
        return {call: dict.fromkeys(("p50", "p99", "p99.9"), 10 * factor * (index + 1)) for index, call in
                enumerate(driver_calls.CALLS)}  # fmt: skip

    report = {"conditions": {}, "models": {"100": {"rounds": [each(1), each(3), each(2)]}}, "targets": []}
    assert driver_calls.tables(report)["calls"].rows[:2] == [
        ["100", "burst", "20.0", "20.0", "20.0", "1.00", "1.00", "1.00"],
        ["100", "execute", "40.0", "40.0", "40.0", "2.00", "2.00", "2.00"],
    ]


def test_a_small_run_measures_every_call(folder: Path) -> None:
    report = reported(folder, "calls", "--quick")
    (found,) = report["models"]["10"]["rounds"]
    assert list(found) == list(driver_calls.CALLS)
    assert all(times["p50"] > 0 for times in found.values())


def test_the_costs_of_the_sandbox_are_medians_of_differences_of_rounds() -> None:
    rounds = [
        {"on": [12.0 + each, 11.0, 5.0, 8.0, 4.0], "off": [10.0, 10.0, 5.0, 8.0 - each, 4.0]} for each in range(3)
    ]
    table = driver_sandbox.tables({"rounds": rounds})["costs"]
    assert table.headings[:3] == ("what", ">on", ">off")
    rows = table.rows
    assert rows[0] == ["start, elapsed, ms", "13.00", "10.00", "3.00", "2.00", "4.00"]
    assert rows[3] == ["burst, elapsed, µs", "8.00", "7.00", "1.00", "0.00", "2.00"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into a worker in its sandbox")
@pytest.mark.parametrize(("setting", "values"), [("sandbox", ["off", "on"]), ("worker-start", ["exec", "fork"])])
def test_the_costs_of_a_setting_come_from_two_drivers(folder: Path, setting: str, values: list[str]) -> None:
    report = reported(folder, "sandbox", "--quick", "--of", setting)
    assert [sorted(each) for each in report["rounds"]] == [values] * 2
    assert all(value > 0 for each in report["rounds"] for times in each.values() for value in times)


def test_deaths_that_nobody_noticed_have_no_time() -> None:
    noticed, missed = ({"notice_ms": time, "cpu": 0.5, "left": 2} for time in (4.0, None))
    report = {
        "conditions": {},
        "targets": [],
        "deaths": {"a": [noticed, noticed], "b": [noticed, missed], "c": [missed]},
    }
    assert driver_deaths.tables(report)["notices"].rows == [
        ["a", "4.00", "4.00", "4.00", "0", "0.50", "4"],
        ["b", "4.00", "4.00", "4.00", "1", "0.50", "4"],
        ["c", "–", "–", "–", "1", "0.50", "2"],
    ]


def test_a_small_run_kills_a_worker_a_client_and_the_writer_of_a_queue(folder: Path) -> None:
    report = reported(folder, "deaths", "--quick")
    (worker,), (client,), (_socket,), (queue,) = report["deaths"].values()
    assert worker["notice_ms"] > 0
    assert client["notice_ms"] > 0
    assert queue["notice_ms"] is None


def test_what_failed_has_no_value() -> None:
    made = driver_isolation.tables(ISOLATION)
    assert ["delay", "-", "0 ms", "at most 50 ms", "missed"] in made["targets"].rows
    assert ["beside 2,000 silent connections", "-", "4", "-", "-", "-"] in made["connections"].rows
    assert made["kills"].rows == [["copying", "4", "0.50", "NONE", "1", "2", "3", "5", "2"]]
    assert made["neighbour"].rows == [["copying", "7", "NONE", "1", "2", "1", "2", "2.50"]]


@pytest.mark.parametrize(("name", "report"), [("memory", MEMORY), ("isolation", ISOLATION)])
def test_the_results_of_an_earlier_report_are_written_with_the_same_bytes(
    name: str, report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "report.json", []
    file.write_text(json.dumps({**report, "missed": []}), encoding="utf-8")
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert driver_bench.main([name, "--report", str(file), "--results", str(folder), "--no-color"]) == 0
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1]
    assert {f"{name}.json", f"{name}-targets.csv"} < made[0].keys()
    assert "targets missed: none" in capsys.readouterr().out
    file.write_text("{}", encoding="utf-8")
    assert driver_bench.main([name, "--report", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"{name}: error: ValueError: ")
