"""The frame of HTML reports: the title is text, the style of a page follows the common one, and nothing is loaded."""

from __future__ import annotations

from html.parser import HTMLParser

from nnfmq.lab.page import html_page, html_table


class Elements(HTMLParser):
    """Collects the elements of a page with their attributes, and the text in each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        tag = self.found[-1][0] if self.found else ""
        self.texts[tag] = self.texts.get(tag, "") + data


def test_a_title_is_shown_as_it_is_and_parts_are_html() -> None:
    elements = Elements(html_page("a <b> & c", ["<p>one</p>", "<p>two</p>"]))
    assert elements.texts["title"] == "a <b> & c"
    assert elements.texts["h1"].strip() == "a <b> & c"
    assert [tag for tag, _ in elements.found] == [
        "html",
        "head",
        "meta",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "p",
        "p",
    ]


def test_the_rules_of_a_page_come_last_so_that_they_take_precedence() -> None:
    style = Elements(html_page("t", [], "\nbody { max-width: 60rem; }\n")).texts["style"]
    assert style.index("max-width: 78rem") < style.index("max-width: 60rem")


def test_a_page_fits_phones_follows_the_colour_scheme_and_loads_nothing() -> None:
    elements = Elements(html_page("t", []))
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in elements.found
    assert "color-scheme: light dark" in elements.texts["style"]
    assert not any({"src", "href"} & attributes.keys() for _, attributes in elements.found)
    assert "url(" not in elements.texts["style"]


def test_cells_with_certain_texts_have_a_class() -> None:
    table = html_table(("a", "passed"), [["passed", "<x>"]], styles={"passed": "good"})
    cells = [(tag, attributes) for tag, attributes in Elements(table).found if tag in ("th", "td")]
    assert cells == [("th", {}), ("th", {"class": "good"}), ("td", {"class": "good"}), ("td", {})]
