"""The readability of a source tree, in numbers: `python tools/readability.py [--root DIR] [--json]`.

Counts modules, lines, the lines of imports, modules with one importer, the depth of packages and of chains of imports,
and the length of functions; import cycles between modules, as the layering test finds them; names of classes that are
defined more than once; docstrings whose subject is a relative clause ("What …", "Return what …", "None where …"); and
the terms of `retired_terms.toml` that are left in names and prose.

Nothing is imported or run. With `--check` the exit status is 1 if a limit in `LIMITS` is exceeded; `--terms` lists each
remaining term with the places where it occurs. `--root` measures another checkout, for instance an older one.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "lib"))

from support import layering  # noqa: E402
from support.layering import Source  # noqa: E402

TERMS = Path(__file__).with_name("retired_terms.toml")
SEARCHED = ("nnfmq", "tools", "tests", "docs", "README.md", "CONTRIBUTING.md")
"""Folders and documents in which retired terms are counted."""
UNSEARCHED = re.compile(
    r"/_(core|codec|copies|pool|recorder|sha256|trace_core)\.c$|glossary|readability|docs/(reference/)?operations|requirements\.md"
)
LIMITS = {"cycles": 0, "duplicate class names": 0, "terms left": 20}

RIDDLES = (
    re.compile(r"^\W*(What|Who|Whoever|Whose|Which|Where|How)\b(?![^.?]*\?)"),
    re.compile(
        r"\b(Return|Say|Tell|Give|Yield|Answer)s? (what|who|whom|how|where)\b(?! (many|long|often|large|much)\b)"
    ),
    re.compile(r"\b(None|False|True|nothing|0|\w+Error|\w+Failure|InvalidArgument) where\b"),
    re.compile(r"(^|[.;:(] )(Who|Whoever|What|Where) (?!if\b)[^?]*?[.;]"),
    re.compile(r"\bwhoever\b"),
)
"""Docstring openings and phrases that name no subject."""


@dataclass
class Term:
    """A retired term, how it is recognized, and the places where it is left (`path:line`)."""

    old: str
    use: str
    names: re.Pattern[str]
    prose: re.Pattern[str] | None
    within: tuple[str, ...]
    unless: re.Pattern[str] | None
    in_names: list[str] = field(default_factory=list)
    in_prose: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of places where the term is left."""
        return len(self.places)

    @property
    def places(self) -> list[str]:
        """The places where the term is left."""
        return [*self.in_names, *self.in_prose]


def load_terms() -> tuple[list[Term], dict[str, str]]:
    """Return the retired terms, and those that are kept with the reason for each."""
    table = tomllib.loads(TERMS.read_text(encoding="utf-8"))
    return [_term(row) for row in table["term"]], table.get("kept", {})


def _term(row: dict[str, object]) -> Term:
    names, prose = str(row["names"]), str(row.get("prose", ""))
    if prose == "=":
        prose = names.replace("_", "[ _-]")
    pattern = re.compile(rf"(?<![\w-])(?:{prose})(?![\w-])", re.IGNORECASE | re.MULTILINE) if prose else None
    within = row.get("within", [])
    unless = re.compile(str(row["unless"])) if "unless" in row else None
    assert isinstance(within, list)
    return Term(
        str(row["old"]), str(row["use"]), re.compile(rf"(^|_)(?:{names})(?=_|$)"), pattern, tuple(within), unless
    )


def function_lengths(found: Sequence[Source]) -> list[int]:
    """Return the number of lines of each function body, without its docstring, in ascending order."""
    functions = (node for module in found for node in ast.walk(module.tree()))
    return sorted(layering.body_lines(f) for f in functions if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))


_IMPORTS = (ast.Import, ast.ImportFrom)


def import_lines(found: Sequence[Source]) -> int:
    """Return the number of lines that import statements take."""
    imports = (node for module in found for node in ast.walk(module.tree()) if isinstance(node, _IMPORTS))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def imports_in_functions(found: Sequence[Source]) -> list[str]:
    """Return the import statements inside functions, as `module:line`."""
    places = {
        f"{module.module}:{node.lineno}"
        for module in found
        for function in ast.walk(module.tree())
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, _IMPORTS)
    }
    return sorted(places)


def of_one_importer(found: Sequence[Source]) -> list[str]:
    """Return the modules that exactly one other module imports."""
    importers: Counter[str] = Counter()
    for targets in layering.import_graph(list(found)).values():
        importers.update(targets)
    return sorted(name for name, count in importers.items() if count == 1)


def levels(found: Sequence[Source], package: str) -> int:
    """Return the length of the longest chain of imports within `package`, in modules."""
    graph = layering.import_graph(list(found))
    depth: dict[str, int] = {}

    def below(name: str) -> int:
        if name not in depth:
            inside = [target for target in graph[name] if target.split(".")[0] == package]
            depth[name] = 1 + max(map(below, inside), default=0)
        return depth[name]

    return max((below(name) for name in graph if name.split(".")[0] == package), default=0)


def duplicate_classes(found: Sequence[Source]) -> list[str]:
    """Return the names of public top-level classes that more than one module defines."""
    owners: dict[str, set[str]] = defaultdict(set)
    for module in found:
        for node in module.tree().body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].add(module.module)
    return sorted(f"{name}: {', '.join(sorted(where))}" for name, where in owners.items() if len(where) > 1)


def riddles(found: Sequence[Source]) -> list[str]:
    """Return the docstrings without a subject, as `module:line: first line`."""
    lines = []
    for module in found:
        for node in ast.walk(module.tree()):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node)
                if doc and any(pattern.search(doc) for pattern in RIDDLES):
                    lines.append(f"{module.module}:{getattr(node, 'lineno', 1)}: {doc.splitlines()[0]}")
    return lines


def count_terms(root: Path, terms: Sequence[Term]) -> None:
    """Record in `terms` where each is left in names and prose of the searched files."""
    for path in _searched_files(root):
        relative = path.relative_to(root).as_posix()
        active = [t for t in terms if not t.within or any(_is_below(relative, place) for place in t.within)]
        names, prose = _split(path)
        for line, name in [(0, path.stem), *names]:
            snake = _snake_case(name)
            for term in active:
                if term.names.search(snake) and not (term.unless and term.unless.fullmatch(snake)):
                    term.in_names.append(f"{relative}:{line}: {name}")
        for line, text in prose:
            for term in active:
                if term.prose and term.prose.search(text):
                    term.in_prose.append(f"{relative}:{line}: {text.strip()[:100]}")


def _searched_files(root: Path) -> Iterator[Path]:
    for place in SEARCHED:
        top = root / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            relative = path.relative_to(root).as_posix()
            if path.suffix in (".py", ".pyx", ".h", ".md", ".c") and not UNSEARCHED.search(relative):
                yield path


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _split(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return the file's names that it defines or uses, and its lines of prose, each with its line number.

    In Python prose are docstrings, comments and string literals with a space; in C and Cython comments; in documents
    everything. A name is counted once for each file, at its first line.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _split_python(text)
    if path.suffix == ".md":
        return [], list(enumerate(text.splitlines(), 1))
    names: dict[str, int] = {}
    prose = []
    for number, line in enumerate(text.splitlines(), 1):
        code, mark, comment = line.partition("#" if path.suffix == ".pyx" else "//")
        if mark or line.lstrip().startswith("*"):
            prose.append((number, comment or line))
        for name in re.findall(r"[A-Za-z_]\w*", code):
            names.setdefault(name, number)
    return [(number, name) for name, number in names.items()], prose


def _split_python(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    names: dict[str, int] = {}
    prose: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            names.setdefault(token.string, token.start[0])
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            prose.extend(enumerate(token.string.splitlines(), token.start[0]))
    return [(line, name) for name, line in names.items()], prose


def percentile(ordered: Sequence[int], share: float) -> int:
    """Return the value below which `share` of the ordered values are."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(root: Path) -> dict[str, object]:
    """Return all metrics of the tree at `root`; lists hold the places that were counted."""
    found = [module for module in layering.sources(root / "nnfmq") if not module.is_cython]
    lengths = function_lengths(found)
    terms, kept = load_terms()
    count_terms(root, terms)
    left = [term for term in terms if term.count and term.old not in kept]
    in_package = [term for term in left if any(not _is_below(place, "tests") for place in term.places)]
    return {
        "modules": len(found),
        "modules in engines": sum(module.module.startswith("engines.") for module in found),
        "lines": sum(len(module.text.splitlines()) for module in found),
        "lines of imports": import_lines(found),
        "imports in functions": imports_in_functions(found),
        "modules with one importer": of_one_importer(found),
        "depth of packages": max(module.module.count(".") + 1 for module in found),
        "levels in client": levels(found, "client"),
        "levels in driver": levels(found, "driver"),
        "modules below 60 lines": [module.module for module in found if len(module.text.splitlines()) < 60],
        "functions": len(lengths),
        "function p50": percentile(lengths, 0.5),
        "function p90": percentile(lengths, 0.9),
        "functions of 1 line": sum(length == 1 for length in lengths),
        "cycles": layering.cycles(found),
        "duplicate class names": duplicate_classes(found),
        "docstrings without a subject": riddles(found),
        "terms left": [f"{term.old}: {len(term.in_names)} names, {len(term.in_prose)} lines" for term in in_package],
        "terms left in tests": [term.old for term in left if any(_is_below(place, "tests") for place in term.places)],
        "places of terms": [place for term in left for place in term.places],
        "terms kept": [f"{old}: {reason}" for old, reason in kept.items()],
    }


def _size(value: object) -> int:
    return len(value) if isinstance(value, list) else int(str(value))


def print_table(columns: dict[str, dict[str, object]]) -> None:
    """Print the metrics of one or several trees side by side."""
    table = Table("metric", *columns)
    first = next(iter(columns.values()))
    for metric in first:
        table.add_row(metric, *(str(_size(metrics[metric])) for metrics in columns.values()))
    Console().print(table)


def print_terms(root: Path, wanted: Sequence[str]) -> None:
    """Print where each remaining term occurs; `wanted` limits the paths."""
    terms, kept = load_terms()
    count_terms(root, terms)
    for term in terms:
        places = [p for p in (*term.in_names, *term.in_prose) if not wanted or p.startswith(tuple(wanted))]
        if places and term.old not in kept:
            print(f"\n{term.old} -> {term.use}: {len(places)}")
            print("\n".join(f"  {place}" for place in places))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the metrics; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, action="append", help="a checkout; several are printed side by side")
    parser.add_argument("--json", action="store_true", help="everything that was counted, as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    parser.add_argument("--terms", nargs="*", metavar="PATH", help="where terms are left, below these paths")
    options = parser.parse_args(arguments)
    roots = options.root or [ROOT]
    if options.terms is not None:
        print_terms(roots[0], options.terms)
        return 0
    columns = {str(root): measure(root) for root in roots}
    print(json.dumps(columns, indent=1, ensure_ascii=False)) if options.json else print_table(columns)
    last = columns[str(roots[-1])]
    exceeded = [name for name, limit in LIMITS.items() if _size(last[name]) > limit]
    if options.check and exceeded:
        print(f"over the limit: {', '.join(f'{name} ({LIMITS[name]})' for name in exceeded)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
