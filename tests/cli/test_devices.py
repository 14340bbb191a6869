"""`nnfmq devices` over a fake driver."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nnfmq.cli import main
from nnfmq.hal.types import DeviceStatus

DEVICES = ["devices", "--connect", "d.sock"]


def test_devices_are_listed_by_the_names_of_the_hal(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DEVICES) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reference", "CPU", "0.1.0", "8", "AVAILABLE", "none"] in lines


@pytest.fixture
def extended(fake: Any) -> None:
    """Let the device have two extensions."""
    fake.known[0].extensions = tuple(map(fake.extension, ("com.example.fibonacci", "org.example.more")))


@pytest.mark.usefixtures("extended")
def test_DEV_5_the_names_of_extensions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DEVICES) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reference", "CPU", "0.1.0", "8", "AVAILABLE", "com.example.fibonacci"] in lines
    assert ["org.example.more"] in lines


@pytest.mark.usefixtures("extended")
def test_DEV_5_json_contains_the_types_of_extensions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEVICES, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["devices"][0]["extensions"]
    int64 = {"type": 0, "is_tensor": False, "byte_size": 8, "dtype": "int64"}
    assert first == {"name": "com.example.fibonacci", "operand_types": [int64]}
    assert second["name"] == "org.example.more"


def test_json_contains_every_field(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEVICES, "--json"]) == 0
    expected: dict[str, Any] = {
        "name": "reference",
        "driver": "d",
        "is_cpu": False,
        "type": "CPU",
        "version": "0.1.0",
        "feature_level": 8,
    }
    expected |= {
        "status": "AVAILABLE",
        "unavailable_reason": None,
        "extensions": [],
        "runs_files": None,
        "cache_files": {"model": 1, "data": 2},
    }
    assert json.loads(capsys.readouterr().out)["devices"] == [expected]


def test_an_unknown_code_is_printed_as_a_number(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.known[0].type = 77
    assert main([*DEVICES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["type"] == "77"


def test_CAP_3_equal_capabilities_are_printed_in_one_row(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEVICES, "--capabilities"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reference", "1", "1", "everything", "else"] in lines
    assert ["reference", "0.25", "2", "TENSOR_FLOAT32"] in lines


def test_CAP_5_json_contains_all_performance_info(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEVICES, "--capabilities", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["devices"][0]["capabilities"]
    assert figures["TENSOR_FLOAT32"] == {"exec_time": 0.25, "power_usage": 2.0}
    assert figures["IF"] == figures["WHILE"] == figures["BOOL"] == {"exec_time": 1.0, "power_usage": 1.0}


@pytest.mark.parametrize("status", ["BUSY", "offline"])
def test_DEV_14_a_status_is_set_before_anything_is_printed(
    fake: Any, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices", "--set", f"reference={status}", "--keep", "--capabilities"]) == 0
    assert fake.made == [("reference", DeviceStatus[status.upper()], True)]
    assert fake.connected == [(None, False)]  # never an embedded driver, which would end with the command
    assert f"{status.upper()}: busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("device 'reference' is OFFLINE: llvmlite is not installed", "llvmlite is not installed"),
        ("device 'reference' is OFFLINE", "set by an administrator"),
    ],
)
def test_the_reason_why_a_device_is_offline_is_printed(
    error: str, reason: str, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.known[0].status, fake.unavailable = DeviceStatus.OFFLINE, error
    assert main(DEVICES) == 0
    assert f"reference is OFFLINE: {reason}" in capsys.readouterr().out
    assert main([*DEVICES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["unavailable_reason"] == reason


@pytest.mark.parametrize("text", ["reference", "=BUSY", "reference=UNKNOWN", "reference=ASLEEP"])
def test_an_invalid_status_is_a_usage_error(fake: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--set", text]) == 2
    assert "is not DEVICE=STATUS with a status of AVAILABLE, BUSY, OFFLINE" in capsys.readouterr().err
    assert fake.made == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--keep"], "--keep needs --set"),
        (["--set", "reference=BUSY", "--connect", "embedded"], "--set needs a driver that other programs use"),
    ],
)
def test_options_that_exclude_each_other_are_a_usage_error(
    fake: Any, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices", *words]) == 2
    assert problem in capsys.readouterr().err
    assert fake.connected == []


@pytest.mark.parametrize("option", [[], ["--capabilities"]], ids=["list", "capabilities"])
def test_a_narrow_terminal_breaks_no_device_name(
    option: list[str], fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    fake.known[0].name = "sample-float_fast"
    assert main([*DEVICES, *option]) == 0
    printed = capsys.readouterr().out
    assert "sample-float_fast" in printed
    assert option or "AVAILABLE" in printed
