"""The verbose log: which tags a setting turns on, where lines go, and that nothing is made of lines that are off."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnfmq.base import verbose_log
from nnfmq.base.verbose_log import TAGS, init_vlog_mask, vlog, vlog_is_on

ALL = {"compilation", "cpuexe", "driver", "execution", "manager", "memory", "model"}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the mask, and the handlers and the level of the logger."""
    log, mask = logging.getLogger("nnfmq.vlog"), verbose_log._Mask.tags
    level, handlers = log.level, list(log.handlers)
    yield
    verbose_log._Mask.tags = mask
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", set()),
        ("1", ALL),
        ("all", ALL),
        ("model", {"model"}),
        ("model compilation,cpuexe:driver", {"model", "compilation", "cpuexe", "driver"}),
        ("execution, manager ::memory", {"execution", "manager", "memory"}),
        ("model,1", ALL),
    ],
)
def test_OBS_5_a_setting_turns_on_its_tags(
    setting: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NNFMQ_VLOG", setting)
    assert init_vlog_mask() == expected
    assert {tag for tag in TAGS if vlog_is_on(tag)} == expected
    assert set(TAGS) == ALL
    assert caplog.records == []


def test_OBS_5_an_unknown_tag_is_an_error_in_the_log_and_the_others_apply(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NNFMQ_VLOG", "model,modes memory")
    assert init_vlog_mask() == {"model", "memory"}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == (
        "'modes' in $NNFMQ_VLOG is no tag of the verbose log; allowed: compilation, cpuexe, driver, execution, "
        "manager, memory, model, or `all`"
    )


def test_OBS_5_a_configuration_file_turns_on_tags_and_an_invalid_one_turns_the_log_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NNFMQ_VLOG", raising=False)
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('vlog = "memory"\n')
    bad.write_text("vlog = 1\n")
    monkeypatch.setenv("NNFMQ_CONFIG", str(good))
    assert init_vlog_mask() == {"memory"}
    monkeypatch.setenv("NNFMQ_CONFIG", str(bad))
    assert init_vlog_mask() == set()
    assert "the verbose log is off: vlog in" in caplog.text


def test_OBS_6_the_setting_is_read_when_somebody_asks_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    verbose_log._Mask.tags = None
    monkeypatch.setenv("NNFMQ_VLOG", "driver")
    assert vlog_is_on("driver")
    monkeypatch.setenv("NNFMQ_VLOG", "model")
    assert not vlog_is_on("model"), "the setting was read a second time"


def test_OBS_6_no_text_is_made_for_a_tag_that_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("the text was made")

    monkeypatch.setenv("NNFMQ_VLOG", "memory")
    init_vlog_mask()
    vlog("model", "%s", Costly())
    assert caplog.records == []


def test_OBS_5_lines_go_to_the_application_s_handlers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NNFMQ_VLOG", "model")
    init_vlog_mask()
    vlog("model", "%d operations", 3)
    (record,) = caplog.records  # by pytest's own handler
    assert (record.name, record.getMessage()) == ("nnfmq.vlog.model", "3 operations")
    assert capsys.readouterr().err == ""


def test_OBS_5_lines_go_to_stderr_if_the_application_has_no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("NNFMQ_VLOG", "model")
    init_vlog_mask()
    init_vlog_mask()  # a second time: each line appears once
    vlog("model", "%d operations", 3)
    assert isinstance(sys.stderr, io.StringIO)
    (line,) = sys.stderr.getvalue().splitlines()
    assert line.endswith(f" INFO nnfmq.vlog.model[{os.getpid()}]: 3 operations")
