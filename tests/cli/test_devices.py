"""`nnfmq devices` over a fake driver."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nnfmq.cli import main


def test_devices_are_listed_by_the_names_of_the_hal(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reference", "CPU", "0.1.0", "8", "AVAILABLE"] in lines


def test_json_holds_every_field(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    expected = {"name": "reference", "type": "CPU", "version": "0.1.0", "feature_level": 8, "status": "AVAILABLE"}
    assert json.loads(capsys.readouterr().out) == {"devices": [expected]}


def test_a_number_without_a_name_stays_a_number(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.known[0].type = 77
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["type"] == "77"
