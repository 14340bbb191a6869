"""`tools/ray_bench.py`: a small run of each section, and the targets. No time and no size is asserted."""

from __future__ import annotations

import numpy as np
import pytest
from ray_bench import Candidate, _added_us, _check, _group_medians, _kind, _memory_targets
from support.places import ROOT
from support.ray_cluster import ray_report, require_ray

from nnfmq.lab.child_processes import BenchmarkFailed
from nnfmq.lab.placement import ProcessMemory

TOOL = ROOT / "tools" / "ray_bench.py"
DIGITS = ROOT / "nnfmq" / "data" / "digits_quant.tflite"


def small_run(section: str) -> dict[str, object]:
    require_ray()
    pytest.importorskip("ai_edge_litert")
    sizes = ("--rounds", "2", "--requests", "4", "--replicas", "2", "--megabytes", "10", "--settle", "0")
    report = ray_report(TOOL, "--sections", section, "--model", str(DIGITS), *sizes, "--json")
    assert set(report) == {"conditions", section, "targets", "missed"}
    return report[section]


def test_each_deployment_is_measured_over_handle_and_http() -> None:
    section = small_run("overhead")
    transports = section["transports"]
    assert {name: set(found) for name, found in transports.items()} == {
        "burst": {"no Ray"},
        "handle": {"empty", "LiteRT", "nnfmq"},
        "HTTP": {"empty", "LiteRT", "nnfmq"},
    }
    for found in (each for names in transports.values() for each in names.values()):
        assert found["count"] == 8 and len(found["p50_of_rounds"]) == 2
        assert 0 < found["p50"] <= found["p99"] <= found["p99.9"]


def test_the_replicas_of_each_deployment_are_measured() -> None:
    section = small_run("memory")
    deployments = section["deployments"]
    assert {name: kinds["replica"]["count"] for name, kinds in deployments.items()} == dict.fromkeys(
        ("empty", "LiteRT", "nnfmq"), 2
    )
    assert "driver" not in deployments["LiteRT"] and deployments["nnfmq"]["driver"]["count"] >= 3
    weights_mib = 2 * 10e6 / (1 << 20)  # each replica of LiteRT has its own
    assert deployments["LiteRT"]["replica"]["pss"] > deployments["empty"]["replica"]["pss"] + weights_mib


def test_what_a_deployment_adds_is_its_p50_less_that_of_the_empty_one_and_of_a_burst_in_each_round() -> None:
    samples = {
        ("burst", "no Ray"): [[100_000], [200_000]],
        ("handle", "empty"): [[1_000_000], [900_000]],
        ("handle", "nnfmq"): [[1_150_000], [1_400_000]],
        ("HTTP", "empty"): [[0], [0]],
    }
    assert _added_us("handle", samples) == {"nnfmq": [50.0, 300.0]}


def test_noise_is_the_range_of_groups_of_rounds_not_of_rounds() -> None:
    assert _group_medians([10, 20, 30, 40, 50, 12, 1000, 34, 40, 50, 14, 24, 31, 40, 50]) == [12, 24, 31, 40, 50]
    assert _group_medians([10, 20]) == [10, 20]


def test_a_wrong_result_ends_the_measurement() -> None:
    expected = np.array([100, 200], np.uint8)
    candidate = Candidate("handle", "nnfmq", lambda: None)
    _check(candidate, np.array([102, 198], np.uint8), expected)
    with pytest.raises(BenchmarkFailed, match="nnfmq over handle returned a wrong result: 4"):
        _check(candidate, np.array([100, 196], np.uint8), expected)
    with pytest.raises(BenchmarkFailed, match="wrong result"):
        _check(candidate, np.array([[100, 200]], np.uint8), expected)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::ServeReplica:nnfmq:Replica.handle_request", "replica"),
        ("python -P -m nnfmq serve --socket /tmp/s --models /tmp/m", "driver"),
        ("python -P -m nnfmq.repository /tmp/m", "repository"),
        ("ray::NodeDriver.attach", "owner of the driver"),
        ("ray::ServeController", None),
        ("ray::IDLE", None),
    ],
)
def test_processes_are_known_by_their_command_lines(command: str, kind: str | None) -> None:
    assert _kind(command) == kind


def test_memory_is_compared_with_and_without_that_of_empty_replicas() -> None:
    def reading(pss: int) -> list[dict[str, list[ProcessMemory]]]:
        return [{"replica": [ProcessMemory(pss=pss)]}] * 3

    found = _memory_targets({"empty": reading(40), "LiteRT": reading(140), "nnfmq": reading(70)})
    assert [target["value"] for target in found] == [0.5, 0.3]
    assert _memory_targets({"empty": reading(40), "LiteRT": reading(140)}) == []
