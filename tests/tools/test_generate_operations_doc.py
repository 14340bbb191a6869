"""docs/reference/operations.md is what the declarations say now, and misses no constraint that a test violates."""

from __future__ import annotations

import re

import generate_operations_doc as tool
import pytest
from support.places import ROOT

from nnfmq.operations import REGISTRY

VIOLATED = sorted(
    set(
        re.findall(
            r'\("([A-Z0-9_]+)", "([A-Z]\d+)",',
            "".join(path.read_text() for path in (ROOT / "tests" / "operations").glob("*.py")),
        )
    )
)
EVERYWHERE = {*tool.EVERYWHERE, *(f"S{n}" for n in range(1, 6))}  # said once, at the page's head
FAMILIES = tool.families()
FAMILY_OF = {declaration.name: family for family, members in FAMILIES.items() for declaration in members}
BY_NAME = {declaration.name: declaration for declaration in REGISTRY.values()}


def test_the_page_is_current() -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), f"run `{tool.COMMAND}`"


def test_every_operation_has_a_section_and_a_place_in_the_contents() -> None:
    page = tool.page()

    for name in BY_NAME:
        assert page.count(f'<a id="{name.lower()}"></a>') == 1
        assert f"[{name}](#{name.lower()})" in page


def test_every_link_leads_to_a_place_of_the_page() -> None:
    page = tool.page()
    places = set(re.findall(r'<a id="([\w-]+)">', page)) | {"shared-constraints"}

    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= places


@pytest.mark.parametrize(("name", "id"), [pair for pair in VIOLATED if pair[1] not in EVERYWHERE])
def test_a_constraint_that_a_test_violates_is_listed(name: str, id: str) -> None:
    assert id in tool.constraints(FAMILY_OF[name], BY_NAME[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_s_docstring_explains_is_checked_by_one_of_its_operations(family: str) -> None:
    listed = {id for declaration in FAMILIES[family] for id in tool.constraints(family, declaration)}

    assert {id for _, id in tool.texts(tool.file_of(family))} <= listed
