"""`tools/readability.py` finds each thing that it counts in a sample that has it, and nothing in one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import readability
from support.layering import Source

TERMS, KEPT = readability.load_terms()


def tree(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / "nnfmq" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def term(old: str) -> readability.Term:
    (found,) = (term for term in readability.load_terms()[0] if term.old == old)
    return found


def test_function_lengths_leave_out_the_docstring() -> None:
    text = 'def f():\n    """Doc.\n\n    More.\n    """\n    x = 1\n    return x\n\ndef g(): ...\n'
    assert readability.function_lengths([Source("a", text)]) == [1, 2]


IMPORTING = [
    Source("client.a", "from nnfmq.client.b import x\nfrom nnfmq.hal import (\n    errors,\n)\n"),
    Source("client.b", "def f():\n    from nnfmq.hal import errors\n"),
    Source("hal.errors", ""),
]


def test_imports_are_counted_by_lines_and_those_in_functions_are_listed() -> None:
    assert readability.import_lines(IMPORTING) == 5
    assert readability.imports_in_functions(IMPORTING) == ["client.b:2"]


def test_modules_that_one_other_module_imports_are_found() -> None:
    assert readability.of_one_importer(IMPORTING) == ["client.b"]


def test_levels_are_the_longest_chain_of_imports_within_a_package() -> None:
    assert (readability.levels(IMPORTING, "client"), readability.levels(IMPORTING, "hal")) == (2, 1)


def test_two_public_classes_of_one_name_are_found() -> None:
    found = [Source("a", "class X: ...\nclass _Y: ..."), Source("b", "class X: ...\nclass _Y: ...")]
    assert readability.duplicate_classes(found) == ["X: a, b"]


@pytest.mark.parametrize(
    "doc",
    ["What the peer sent.", "Return what lies there.", "Return the id; None where there is none.", "Who waits, waits."],
)
def test_a_docstring_without_a_subject_is_found(doc: str) -> None:
    assert len(readability.riddles([Source("a", f'"""{doc}"""')])) == 1


@pytest.mark.parametrize(
    "doc",
    ["Return the message of the peer.", "The place where results are stored.", "Return None if nothing is known."],
)
def test_a_docstring_with_a_subject_is_not_found(doc: str) -> None:
    assert readability.riddles([Source("a", f'"""{doc}"""')]) == []


def test_a_term_is_found_in_names_and_in_prose(tmp_path: Path) -> None:
    twin = term("twin")
    readability.count_terms(tree(tmp_path, a='"""The twin."""\nTwinCore = 1\nintertwined = 2\n'), [twin])
    assert twin.in_names == ["nnfmq/a.py:2: TwinCore"]
    assert len(twin.in_prose) == 1


def test_a_term_is_right_outside_its_paths(tmp_path: Path) -> None:
    product = term("product (GEMM)")
    readability.count_terms(tree(tmp_path, a="product = 1\n"), [product])
    assert product.count == 0


def test_every_term_has_a_replacement_and_is_named_once() -> None:
    assert [term.old for term in TERMS if not term.use] == []
    assert len({term.old for term in TERMS}) == len(TERMS)


def test_a_kept_term_is_one_of_the_terms_and_has_a_reason() -> None:
    assert set(KEPT) <= {term.old for term in TERMS}
    assert all(KEPT.values())


def test_check_fails_if_a_limit_is_exceeded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, a='"""A."""\nfrom nnfmq import b\ndef f(): ...\n', b='"""B."""\nfrom nnfmq import a\n')
    assert readability.main(["--root", str(root), "--check"]) == 1
    assert "cycles" in capsys.readouterr().err


def test_json_lists_what_was_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, a='"""A."""\ndef f(): ...\n')
    assert readability.main(["--root", str(root), "--json"]) == 0
    (metrics,) = json.loads(capsys.readouterr().out).values()
    assert (metrics["modules"], metrics["functions"], metrics["cycles"]) == (1, 1, [])
