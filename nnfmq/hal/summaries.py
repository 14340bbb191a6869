"""Short texts and HTML tables that describe models, tensors and other objects: for `__repr__`, `_repr_html_`, errors.

A peer or a file may have chosen the names, so they are cut, escaped, and shown with `repr`. A text has at most some 300
characters, however large the model is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

__all__ = [
    "ShownTensor",
    "TensorRow",
    "clipped",
    "code_name",
    "counted",
    "html_tables",
    "listed",
    "nearest",
    "printable",
    "signature",
    "tensor_text",
]

_NAME_MAX, _SHAPE_MAX = 24, 18
_TENSORS_MAX = 2  # inputs, and as many outputs
_HTML_ROWS_MAX = 50
_WORD_MAX = 100  # characters of a word that is compared with others


class ShownTensor(Protocol):
    """The properties of a tensor that are shown, as TensorInfo has them."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; 0 is an unknown dimension."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its element type."""
        ...

    @property
    def is_empty(self) -> bool:
        """True if it has no elements: 0 is a dimension's size then."""
        ...

    @property
    def scale(self) -> float:
        """Its scale; 0.0 if it is not quantized."""
        ...

    @property
    def zero_point(self) -> int:
        """Its zero point."""
        ...


class TensorRow(NamedTuple):
    """A tensor without a TensorInfo."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "nothing"
    scale: float = 0.0
    zero_point: int = 0
    is_empty: bool = False


def code_name(code: object) -> str:
    """Return the name of an enumeration's member, or the number that somebody put in its place."""
    return str(getattr(code, "name", code))


def printable(text: str) -> str:
    """Return a text that a stranger chooses without what a terminal may obey: each such character is replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def clipped(text: str, limit: int = _NAME_MAX) -> str:
    """Return `text`, with its end replaced by `…` if it has more than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def listed(first: Sequence[object], count: int) -> str:
    """Return the `first` of `count` items, separated by commas, and how many more there are."""
    more = f", … {count - len(first)} more" if count > len(first) else ""
    return ", ".join(map(str, first)) + more


def counted(count: int, noun: str) -> str:
    """Return a number and what it counts, as `1 input` or `2 inputs`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def nearest(word: object, known: Iterable[str]) -> str:
    """Return `; did you mean 'image'?` with the known word that is most like `word`; "" if none is."""
    from difflib import get_close_matches  # only errors need it

    words = {each.casefold(): each for each in reversed(list(known))}
    found = get_close_matches(str(word).casefold()[:_WORD_MAX], words, 1)
    return f"; did you mean {words[found[0]]!r}?" if found else ""


def _shape_text(shape: Sequence[int], limit: int = _SHAPE_MAX, is_empty: bool = False) -> str:
    return clipped("x".join("?" if extent == 0 and not is_empty else str(extent) for extent in shape[:limit]), limit)


def tensor_text(dtype: str, shape: Sequence[int], is_empty: bool = False) -> str:
    """Return element type and shape as `float32 1x?x3`, with `?` for an unknown dimension."""
    return f"{dtype} {_shape_text(shape, is_empty=is_empty)}".rstrip()


def signature(inputs: Sequence[ShownTensor], outputs: Sequence[ShownTensor]) -> str:
    """Return inputs and outputs as `image (uint8 1x224x224x3) → scores (uint8 1x1001)`."""
    return f"{_tensors(inputs)} → {_tensors(outputs)}"


def _tensors(tensors: Sequence[ShownTensor]) -> str:
    shown = [f"{clipped(repr(t.name))} ({tensor_text(t.dtype, t.shape, t.is_empty)})" for t in tensors[:_TENSORS_MAX]]
    return listed(shown, len(tensors))


def html_tables(
    title: str, inputs: Sequence[ShownTensor], outputs: Sequence[ShownTensor], operations: Iterable[str] = ()
) -> str:
    """Return HTML with a table of inputs and outputs, and one that counts operations by their name; escaped."""
    rows = [
        (f"{kind} {index}", clipped(t.name, 80), t.dtype, _shape_text(t.shape, 80, t.is_empty), _quantization(t))
        for kind, tensors in (("input", inputs), ("output", outputs))
        for index, t in enumerate(tensors[:_HTML_ROWS_MAX])
    ]
    hidden = sum(max(len(tensors) - _HTML_ROWS_MAX, 0) for tensors in (inputs, outputs))
    rows += [("", f"… {hidden} more", "", "", "")] if hidden else []
    tables = _table(("", "name", "type", "shape", "quantization"), rows)
    counts = Counter(operations)
    if counts:
        tables += _table(("operation", "count"), [(name, str(count)) for name, count in counts.most_common()])
    return f"<p><b>{_escaped(title)}</b></p>{tables}"


def _quantization(tensor: ShownTensor) -> str:
    return f"{tensor.scale:g} × (q − {tensor.zero_point})" if tensor.scale else ""


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_escaped(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escaped(text: str) -> str:
    from html import escape  # imports a large table, which only notebooks need

    return escape(text)
