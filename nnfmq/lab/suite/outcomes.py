"""Outcomes: results of scenarios against thresholds, the stability of the machine, and a comparison with a baseline.

Arithmetic only, on the dicts of the report. A percentile of which there are too few requests is at most the maximum:
it is within its limit if the maximum is, and else it cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.bench.report import CANNOT_TELL, OTHERS_MAX, bootstrap_ratio, outcome_of, require_same_model
from nnfmq.lab.statistics import REPORTED
from nnfmq.lab.suite.thresholds import LIMITS
from nnfmq.observe.statistics_layout import supports

__all__ = [
    "ERROR",
    "FAILED",
    "NOT_RUN",
    "PASSED",
    "SKIPPED",
    "checks_of",
    "compare_with_earlier",
    "require_comparable",
    "scenario_outcome",
    "stability_of",
    "suite_outcome",
]

PASSED, FAILED, ERROR, SKIPPED, NOT_RUN = "passed", "failed", "error", "skipped", "not run"
_METRICS = ("p50", "p99")
_SAME = ("load", "client")  # what two runs must have in common beside the model
_SPREAD_MAX = 0.2
_STOLEN_MAX = 0.02  # of a CPU


# ---- thresholds


def checks_of(result: Mapping[str, Any], limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a check for each limit of a scenario that has requests: what is limited, limit, value, and outcome.

    The value is None if there are too few requests, or deaths, for it. Outputs that are not compared have no check.
    """
    found = []
    for key, limit in limits.items():
        if key == "wrong_outputs" and result["wrong_outputs"] is None:
            continue
        value = _value(key, result)
        is_within = value is not None and value <= limit
        if value is None and _is_percentile(key):
            is_within = result["latency_ns"]["max"] <= 1e6 * limit
        outcome = PASSED if is_within else CANNOT_TELL if value is None else FAILED
        text, unit, _ = LIMITS[key]
        found.append({"key": key, "text": text, "unit": unit, "limit": limit, "value": value, "outcome": outcome})
    return found


def _is_percentile(key: str) -> bool:
    return key.removesuffix("_ms") in REPORTED


def _value(key: str, result: Mapping[str, Any]) -> float | None:
    value: float | None = result.get(key)
    if _is_percentile(key):
        name = key.removesuffix("_ms")
        value = result["latency_ns"][name] / 1e6 if supports(result["requests"], REPORTED[name] / 100) else None
    elif key == "missed_percent":
        value = 100 * result["missed"] / result["requests"]
    elif key == "growth_mib":
        value = result["growth_bytes"] / 2**20
    elif key == "seen_ms":
        times = [time for each in (result["deaths_ns"] or {}).values() for time in each]
        value = max(times) / 1e6 if times else None
    return value


def scenario_outcome(result: Mapping[str, Any], *, is_skipped: bool) -> str:
    """Return the outcome of a scenario, which has its checks."""
    if result["reason"]:
        return SKIPPED if is_skipped else ERROR
    if not result["requests"]:
        return NOT_RUN
    found = {check["outcome"] for check in result["checks"]}
    return next((outcome for outcome in (FAILED, CANNOT_TELL) if outcome in found), PASSED)


def suite_outcome(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the outcome of all scenarios: the worst one. Skipped ones do not count."""
    found = {result["outcome"] for result in results}
    return next((outcome for outcome in (FAILED, ERROR, CANNOT_TELL, NOT_RUN) if outcome in found), PASSED)


# ---- stability


def stability_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether the machine was stable in the scenario `idle`, and the reasons why not."""
    idle = next((result for result in results if result["scenario"] == "idle" and result["requests"]), None)
    reasons = ["the scenario idle was not measured"] if idle is None else list(_unstable(idle))
    return {"is_stable": not reasons, "reasons": reasons}


def _unstable(idle: Mapping[str, Any]) -> Iterator[str]:
    wall_ns = idle["wall_ns"]
    for key, limit, who in (
        ("others_cpu_ns", OTHERS_MAX, "other programs used"),
        ("stolen_cpu_ns", _STOLEN_MAX, "the hypervisor gave other machines"),
    ):
        if idle[key] > limit * wall_ns:
            yield f"{who} {100 * idle[key] / wall_ns:.0f} % of a CPU during the scenario idle"
    p50s = [block["p50_ns"] for block in idle["blocks"]]
    if not p50s:
        yield "the scenario idle has too few requests"
        return
    mean = sum(p50s) / len(p50s)
    if max(abs(each - mean) for each in p50s) > _SPREAD_MAX * mean:
        yield f"p50 of the scenario idle varied from {min(p50s) / 1e6:.3g} to {max(p50s) / 1e6:.3g} ms"


# ---- the baseline


def require_comparable(report: Mapping[str, Any], baseline: Any) -> None:
    """Require that an earlier report is of the same model, the same client and the same load.

    Raises:
        InvalidArgument: If it is not, or is no report of the suite.
    """
    if not isinstance(baseline, dict) or not {"scenarios", "stability", *_SAME} <= baseline.keys():
        raise InvalidArgument("the baseline is no report of nnfmq stress --suite --json")
    require_same_model(report, baseline)
    for key in _SAME:
        if report[key] != baseline[key]:
            raise InvalidArgument(
                f"the baseline has another {key}: {_words(baseline[key])}, not {_words(report[key])}; measure both "
                "with the same"
            )


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


def compare_with_earlier(
    report: Mapping[str, Any], baseline: Mapping[str, Any], tolerance_percent: float
) -> dict[str, Any]:
    """Return a comparison with an earlier report: its date and host, differences of the machines, and rows.

    A row has the ratio of p50 or p99 of a scenario with its interval, and an outcome: a "regression" or an
    "improvement" if the whole interval is beyond the tolerance, but CANNOT_TELL if one of the machines was not stable,
    or they are not the same.

    Raises:
        InvalidArgument: If the reports cannot be compared.
    """
    require_comparable(report, baseline)
    try:
        differences = [*_differences(report["conditions"], baseline["conditions"]), *_unstable_runs(report, baseline)]
        earlier = {result["scenario"]: result for result in baseline["scenarios"]}
        rows = [
            row
            for result in report["scenarios"]
            if result["scenario"] in earlier
            for row in _rows(result, earlier[result["scenario"]], tolerance_percent / 100, is_certain=not differences)
        ]
        named = {key: baseline["conditions"][key] for key in ("date", "host")}
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument("the baseline is no report of nnfmq stress --suite --json") from error
    return named | {"tolerance_percent": tolerance_percent, "differences": differences, "rows": rows}


def _differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[str]:
    for key in ("host", "cpu", "cpus_allowed"):
        if new[key] != old[key]:
            yield f"it has another {key.replace('_', ' ')}: {old[key]}, not {new[key]}"


def _unstable_runs(report: Mapping[str, Any], baseline: Mapping[str, Any]) -> Iterator[str]:
    for name, each in (("this run", report), ("the earlier one", baseline)):
        if not each["stability"]["is_stable"]:
            yield f"{name} was not stable: {'; '.join(each['stability']['reasons'])}"


def _rows(
    new: Mapping[str, Any], old: Mapping[str, Any], tolerance: float, *, is_certain: bool
) -> Iterator[dict[str, Any]]:
    for metric in _METRICS:
        values, reference = ([block[f"{metric}_ns"] for block in each["blocks"]] for each in (new, old))
        if values and reference:  # else there are too few requests
            interval = bootstrap_ratio(values, reference)
            outcome = outcome_of(interval, tolerance, more_is_better=False, is_certain=is_certain)
            yield {"scenario": new["scenario"], "metric": metric, **interval._asdict(), "outcome": outcome}
