"""The file of thresholds: what the packaged one has, which key counts, and errors that name key, value and rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.places import ROOT

from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.suite.scenarios import SCENARIOS
from nnfmq.lab.suite.thresholds import LIMITS, read_thresholds


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_packaged_file_has_a_p99_and_no_wrong_outputs_for_every_scenario() -> None:
    limits = read_thresholds().limits
    assert list(limits) == list(SCENARIOS)
    assert all({"p99_ms", "missed_percent", "wrong_outputs"} <= each.keys() for each in limits.values())
    assert limits["idle"]["p99_ms"] < read_thresholds().load.deadline_ms
    assert "seen_ms" in limits["peer-death"]


def test_the_key_of_a_scenario_takes_precedence_over_that_of_every_scenario(tmp_path: Path) -> None:
    found = read_thresholds(written(tmp_path, "[every]\np99_ms = 9\nmax_ms = 50\n[soak]\np99_ms = 3\n"))
    assert found.limits["soak"] == {"p99_ms": 3, "max_ms": 50}
    assert found.limits["idle"] == {"p99_ms": 9, "max_ms": 50}


def test_a_file_stands_for_itself_except_for_keys_of_the_load(tmp_path: Path) -> None:
    packaged = read_thresholds()
    found = read_thresholds(written(tmp_path, "[load]\nrate = 7.5\n"))
    assert found.limits == {name: {} for name in SCENARIOS}
    assert (found.load.rate, found.load.deadline_ms) == (7.5, packaged.load.deadline_ms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[idle]\np98_ms = 3", r"idle\.p98_ms = 3: there is no such key; allowed are p50_ms, .*did you mean 'p9.*_ms'"),
        ("[idle]\np99_ms = -3", r"idle\.p99_ms = -3 is not allowed; give a number of at least 0"),
        ("[idle]\np99_ms = '3'", r"idle\.p99_ms = '3' is not allowed; give a number"),
        ("[idle]\np99_ms = true", r"idle\.p99_ms = true is not allowed"),
        ("[idle]\np99_ms = nan", r"idle\.p99_ms = nan is not allowed"),
        ("[every]\nmissed_percent = 101", r"every\.missed_percent = 101 is not allowed; give a number from 0 to 100"),
        ("[idle]\nseen_ms = 3", r"idle\.seen_ms = 3: there is no such key"),
        ("[load]\nrate = 0", r"load\.rate = 0 is not allowed; give a number above 0"),
        ("[load]\narrivals = 'random'", r"""load\.arrivals = 'random' is not allowed; give "constant" or "poisson\""""),
        ("[load]\nclients = 1.5", r"load\.clients = 1\.5 is not allowed; give an integer from 1 to 60"),
        ("[idlex]\np99_ms = 3", r"there is no table 'idlex'; allowed are load, every, idle, .*; did you mean 'idle'\?"),
        ("idle = 3", r"idle = 3 is no table; write its keys below \[idle\]"),
        ("[idle", r"is not valid TOML: "),
        ("a = " + "[" * 9000, r"is not valid TOML: its values are nested too deep"),
    ],
)
def test_an_error_names_the_file_the_key_the_value_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        read_thresholds(written(tmp_path, text))
    assert str(raised.value).startswith(str(tmp_path / "mine.toml"))


def test_bytes_that_are_no_text_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="is not valid TOML"):
        read_thresholds(path)


def test_the_guide_lists_exactly_the_keys_and_the_scenarios() -> None:
    guide = (ROOT / "docs/how-to/accept-a-machine.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*) \|", guide, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`([\w-]+)`", row)] == [*SCENARIOS, *LIMITS]
