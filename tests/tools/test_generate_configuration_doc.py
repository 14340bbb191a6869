"""The page of settings is current and has every setting."""

from __future__ import annotations

import re

import generate_configuration_doc as tool

from nnfmq import settings


def test_the_page_is_current() -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    assert text == tool.page(text), f"run `{tool.COMMAND}`"


def test_every_setting_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", tool.tables(), re.MULTILINE)
    assert rows == [setting.variable for setting in settings.table().values()]


def test_only_the_text_between_the_marks_is_replaced() -> None:
    page = tool.page(f"before\n{tool.BEGIN}old\n{tool.END}after\n")
    assert page.startswith(f"before\n{tool.BEGIN}")
    assert page.endswith(f"{tool.END}after\n")
    assert "old\n" not in page
