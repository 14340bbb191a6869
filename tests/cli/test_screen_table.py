"""Tables on screens of every width: columns keep their words whole, or each row becomes a block of lines."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.text import Text

from nnfmq.cli.console import table

ROWS = [
    ("memory", "a quarter of what the machine has", "7,920"),
    ("extensions", "everything", "1"),
]


def rendered(width: int, rows: Sequence[tuple[object, ...]] = ROWS, title: str | None = None) -> list[str]:
    listing = table("setting", "meaning", ">value", title=title)
    for row in rows:
        listing.add_row(*row)
    screen = Console(width=width, file=io.StringIO(), highlight=False)
    screen.print(listing)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def test_a_table_that_fits_has_its_natural_width() -> None:
    lines = [" ".join(line.split()) for line in rendered(80)]
    assert lines[1] == "setting meaning value"
    assert "memory a quarter of what the machine has 7,920" in lines


@pytest.mark.parametrize("width", range(20, 81))
def test_no_line_is_wider_than_the_screen_and_no_word_is_broken(width: int) -> None:
    lines = rendered(width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in ROWS:
        assert all(word in words for cell in row for word in str(cell).split())


def test_narrow_columns_stay_as_they_are_while_wide_ones_shrink() -> None:
    lines = [line.split() for line in rendered(50)]
    assert ["memory", "a", "quarter", "of", "what", "the", "machine", "7,920"] in lines
    assert ["extensions", "everything", "1"] in lines


def test_on_a_screen_that_is_too_narrow_each_row_is_a_block() -> None:
    lines = [line.rstrip() for line in rendered(30, title="Settings")]
    assert lines[0] == "Settings"
    assert lines[1:6] == [
        "setting  memory",
        "meaning  a quarter of what the",
        "         machine has",
        "value    7,920",
        "",
    ]
    assert lines[6:9] == ["setting  extensions", "meaning  everything", "value    1"]


def test_empty_cells_are_left_out_of_blocks() -> None:
    lines = [line.rstrip() for line in rendered(20, [("exceptional", Text(""), "1,234,567")])]
    assert lines == ["setting  exceptional", "value    1,234,567", ""]


def test_a_word_of_more_than_24_characters_may_be_broken_to_keep_the_table() -> None:
    path = "/a/path/with/more/than/twenty-four/characters"
    lines = rendered(50, [("x", path, "1")])
    assert lines[1].split() == ["setting", "meaning", "value"]
    assert sorted("".join("".join(lines[3:]).split())) == sorted(f"x{path}1")


def test_a_column_that_must_not_wrap_is_not_broken() -> None:
    listing = table("setting", "meaning")
    listing.columns[0].no_wrap = True
    listing.add_row("burst_controller_polling_window", "how long a client polls")
    for width in range(40, 70):
        screen = Console(width=width, file=io.StringIO())
        screen.print(listing)
        assert isinstance(screen.file, io.StringIO)
        assert "burst_controller_polling_window" in screen.file.getvalue()
