"""The generated pages are current, and list every setting and every constraint that a test violates."""

from __future__ import annotations

import re

import generate_docs as tool
import pytest
from support.places import ROOT

from nnfmq.base import settings
from nnfmq.operations import HAL_DECLARATIONS

VIOLATED = sorted(
    set(
        re.findall(
            r'\("([A-Z0-9_]+)", "([A-Z]\d+)",',
            "".join(path.read_text() for path in (ROOT / "tests" / "operations").glob("*.py")),
        )
    )
)
BY_NAME = {declaration.name: declaration for declaration in HAL_DECLARATIONS.values()}  # extensions have no pages
EVERYWHERE = {*tool.EVERYWHERE, *(f"S{n}" for n in range(1, 6))}  # said once, at the page's head
FAMILIES = tool.families()
FAMILY_OF = {declaration.name: family for family, members in FAMILIES.items() for declaration in members}


def test_the_pages_are_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in tool.FOLDER.glob("*.md")}
    assert written == tool.pages(), f"run `{tool.COMMAND}`"


def test_every_operation_has_a_section_and_a_link_from_the_index() -> None:
    pages = tool.pages()

    for name, family in FAMILY_OF.items():
        assert pages[f"{family}.md"].count(f"(op-{name.lower()})=\n") == 1
        assert f"[{name}]({family}.md#op-{name.lower()})" in pages["index.md"]


def test_every_link_leads_to_a_target() -> None:
    text = "\n".join(tool.pages().values())
    targets = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))

    assert set(re.findall(r"\]\((?:\w+\.md)?#([\w-]+)\)", text)) <= targets


@pytest.mark.parametrize(
    ("name", "id"), [pair for pair in VIOLATED if pair[0] in BY_NAME and pair[1] not in EVERYWHERE]
)
def test_a_constraint_that_a_test_violates_is_listed(name: str, id: str) -> None:
    assert id in tool.constraints(FAMILY_OF[name], BY_NAME[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_s_docstring_explains_is_checked_by_one_of_its_operations(family: str) -> None:
    listed = {id for declaration in FAMILIES[family] for id in tool.constraints(family, declaration)}

    assert {id for _, id in tool.texts(tool.file_of(family))} <= listed


def test_the_page_of_settings_is_current() -> None:
    text = tool.SETTINGS_PAGE.read_text(encoding="utf-8")
    assert text == tool.settings_page(text), f"run `{tool.COMMAND}`"


def test_every_setting_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", tool.settings_tables(), re.MULTILINE)
    assert rows == [setting.variable for setting in settings.table().values()]


def test_only_the_text_between_the_marks_is_replaced() -> None:
    page = tool.settings_page(f"before\n{tool._BEGIN}old\n{tool._END}after\n")
    assert page.startswith(f"before\n{tool._BEGIN}")
    assert page.endswith(f"{tool._END}after\n")
    assert "old\n" not in page
