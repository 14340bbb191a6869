"""`nnfmq config`: effective values with their sources, what each setting means, and invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nnfmq.base import settings
from nnfmq.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.table().values():
        if setting.variable not in ("NNFMQ_CONFIG", "NNFMQ_CORE"):
            monkeypatch.delenv(setting.variable, raising=False)


def as_json(capsys: Capture, *words: str) -> dict[str, Any]:
    """Return the settings that `nnfmq WORDS --json` prints, by name."""
    assert main([*words, "--json"]) == 0
    return {report["name"]: report for report in json.loads(capsys.readouterr().out)["settings"]}


def toml(folder: Path, text: str) -> str:
    path = folder / "lab.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_show_prints_every_setting_with_value_and_source(tmp_path: Path, capsys: Capture) -> None:
    assert main(["--config", toml(tmp_path, "memory_mib = 77"), "config", "show"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in settings.table()] == list(settings.table())
    assert ["cache_mib", "512", "default"] in rows
    assert next(row for row in rows if row[:1] == ["memory_mib"])[1] == "77"
    assert rows[-1] == ["Files:", f"{tmp_path}/lab.toml."]


def test_a_value_that_is_shown_can_be_given_to_its_variable(capsys: Capture) -> None:
    found = as_json(capsys, "config", "show")
    assert main(["config", "show"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[1] for row in rows if len(row) == 3 and row[0] in found}
    single = {name: report["value"] for name, report in found.items() if isinstance(report["value"], int | float)}
    assert {"cpu_only", "drain_s", "memory_mib"} <= single.keys() <= shown.keys()
    assert {name: settings.table()[name].type.parse(shown[name]) for name in single} == single
    assert shown["vlog"] == "none"


def test_json_has_the_source_of_each_value(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_CACHE_MIB", "3")
    path = toml(tmp_path, "memory_mib = 77\ncache_mib = 1")
    found = as_json(capsys, f"--config={path}", "config", "show")
    assert list(found) == list(settings.table())
    chosen = {
        name: (found[name]["value"], found[name]["source"], found[name]["file"]) for name in ("cache_mib", "memory_mib")
    }
    assert chosen == {"cache_mib": (3, "environment", None), "memory_mib": (77, "file", path)}


def test_the_file_that_config_names_is_read_until_the_command_ends(tmp_path: Path, capsys: Capture) -> None:
    as_json(capsys, "--config", toml(tmp_path, "cache_mib = 1"), "config", "show")
    assert settings.CACHE_MIB.value() == 512


def test_defaults_that_depend_on_the_machine_are_computed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/xdg")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("NNFMQ_MEMORY_MIB", "10")
    found = as_json(capsys, "config", "show")
    assert found["socket"]["value"] == "/run/xdg/nnfmq/nnfmq.sock"
    assert found["XDG_CACHE_HOME"]["value"] == "/home/somebody/.cache"
    assert found["client_memory_mib"]["value"] == 5
    assert found["devices"]["value"].endswith("/nnfmq/driver/devices/devices.toml")
    assert found["core"]["value"] in ("compiled", "python")
    assert (found["extensions"]["value"], found["extensions"]["default"]) == (None, "all installed")
    assert {report["source"] for name, report in found.items() if name in ("socket", "devices")} == {"default"}


@pytest.mark.parametrize("name", ["memory_mib", "MEMORY_MIB", "NNFMQ_MEMORY_MIB", "nnfmq_memory_mib"])
def test_a_setting_is_named_by_key_or_variable(name: str, capsys: Capture) -> None:
    assert list(as_json(capsys, "config", "explain", name)) == ["memory_mib"]


def test_an_unknown_name_is_wrong_usage_with_the_nearest_one(capsys: Capture) -> None:
    assert main(["config", "explain", "NNFMQ_MEMRY_MIB"]) == 2
    assert "'NNFMQ_MEMRY_MIB' is no setting; did you mean 'memory_mib'?" in capsys.readouterr().err


def test_explain_prints_everything_about_a_setting(capsys: Capture) -> None:
    assert main(["config", "explain", "cache_mib"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for expected in (
        "value 512", "from default", "default 512", "type integer, MiB", "allowed 0 to 1099511627776", "read by driver",
        "environment NNFMQ_CACHE_MIB", "in files cache_mib = 512", "options none",
    ):  # fmt: skip
        assert expected in lines


def test_explain_fits_a_screen_of_40_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["config", "explain", "burst_server_polling_window"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert {"default", "allowed", "environment"} <= {line.split(" ")[0] for line in lines}


def test_explain_reports_that_files_cannot_have_a_setting(capsys: Capture) -> None:
    assert main(["config", "explain", "NO_COLOR"]) == 0
    assert "not possible" in capsys.readouterr().out


def test_an_example_of_each_type_is_valid(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    in_files = [setting for setting in settings.table().values() if setting.key]
    monkeypatch.delenv("NNFMQ_CORE", raising=False)
    path = toml(tmp_path, "\n".join(f"{setting.key} = {setting.type.toml_example}" for setting in in_files))
    with settings.CONFIG.exported(path):
        assert {setting.effective().source for setting in in_files} == {"file"}


def test_an_invalid_value_is_reported_beside_the_others_with_status_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_CACHE_MIB", "lots")
    assert main(["config", "show"]) == 1
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["cache_mib", "invalid", "see", "below"] in rows
    assert ["burst_server_polling_window", "50", "default"] in rows
    assert printed.err.startswith("nnfmq: error: $NNFMQ_CACHE_MIB is 'lots'; allowed: 0 to ")


def test_an_invalid_file_is_reported_once(tmp_path: Path, capsys: Capture) -> None:
    path = toml(tmp_path, "cach_mib = 1")
    assert main(["--config", path, "config", "show"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"nnfmq: error: the configuration {path} has an unknown key 'cach_mib'; did you mean 'cache_mib'?"
    assert not any(path in line for line in rest)


def test_a_misspelt_variable_is_reported(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_SOKET", "/tmp/d.sock")
    assert main(["config", "show"]) == 0
    assert "nnfmq: nothing reads the variable NNFMQ_SOKET; did you mean 'NNFMQ_SOCKET'?\n" in capsys.readouterr().err


def test_an_empty_list_is_shown_as_none(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_EXTENSIONS", "")
    assert main(["config", "show", "extensions"]) == 0
    assert ["extensions", "none", "environment"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_machine_for_which_no_code_is_generated_has_no_target(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnfmq.engines.compiled import target

    monkeypatch.setattr(target, "host_target", lambda: target.chosen_target("riscv64", frozenset()))
    assert as_json(capsys, "config", "show", "target")["target"]["value"] is None
