"""Mutation testing of the validator and the operations: disable each check in turn; a test must fail each time.

    python tools/constraint_mutants.py                             # all: 3 to 6 minutes
    python tools/constraint_mutants.py --only '^validation/'       # the checks whose FILE:LINE:COLUMN matches
    python tools/constraint_mutants.py --only shapes.py:85 --json  # each mutant and the test that kills it, as JSON
    python tools/constraint_mutants.py --every 20                  # a sample: every twentieth check

A check is a call of a function whose name begins with `require` or `_require`, or a `raise` of InvalidArgument or
GeneralFailure. If a check has several conditions (`and`, a chain of comparisons), each of them is also disabled by
itself; that is a *part* of the check.

The modules are rewritten when they are imported, with each check behind a switch; no file changes. The tests are
collected once and run once in a fork, to record the tests in which each check rejects something: other tests cannot
kill its mutant. Each mutant then runs in a fork, with its check disabled and these tests, fastest first, until one
fails. A failing test must pass by itself with all checks enabled. Time and memory are limited, because a check may be
what ends a loop. Surviving mutants are printed; the exit status is 0 if there are none.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

import pytest
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("validation", "operations")
_RUN = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=line", "--hypothesis-seed=0"]
_ERRORS = ("InvalidArgument", "GeneralFailure")
_EXCLUDED = "tests/validation/test_model_mutations.py"  # takes minutes; other tests cover its rules
_SWITCHES = "__switches__"
_LIMIT_S = 10  # for each mutant, plus ten times its tests' time; a timeout kills the mutant
_LIMIT_BYTES = 4 << 30

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """A check or a part of one: its location and its source text."""

    path: Path
    line: int
    column: int
    text: str
    is_part: bool

    @property
    def location(self) -> str:
        """FILE:LINE:COLUMN, which `--only` matches."""
        return f"{self.path.relative_to(ROOT / 'nnfmq')}:{self.line}:{self.column}"

    @property
    def tests(self) -> str:
        """The folder of the tests of the check's package."""
        return f"tests/{self.path.relative_to(ROOT / 'nnfmq').parts[0]}"


# -- checks in a module's syntax tree ---------------------------------------------------------------------------------


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_requirement(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and _name(call.func).lstrip("_").startswith("require")


def _is_rejection(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _name(node.exc.func) in _ERRORS


class _SwitchInserter(ast.NodeTransformer):
    """Puts each check of a module behind a switch; the switch's index is the check's in `checks`, plus `first`."""

    def __init__(self, path: Path, first: int) -> None:
        self.checks: list[Check] = []
        self._path, self._first = path, first
        self._conditions: set[str] = set()  # names of this function's conditions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in ("_require", "require"):
            return node  # the function that raises for all checks
        outer = self._conditions
        calls = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Expr) and _is_requirement(inner))
        firsts = (call.args[0] for call in calls if isinstance(call, ast.Call) and call.args)
        self._conditions = {part.id for first in firsts for part in _parts(first) if isinstance(part, ast.Name)}
        visited = self.generic_visit(node)
        self._conditions = outer
        return visited

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        return node  # only adds context to another check's message

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not _is_requirement(node):
            return self.generic_visit(node)
        index = self._add(node)
        call = node.value
        assert isinstance(call, ast.Call)
        if call.args:
            call.args[0] = self._in_parts(call.args[0])
        rejected = ast.parse(f"{_SWITCHES}.rejects({index})").body
        handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), None, [*rejected, ast.Raise()])
        body = ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])
        return ast.copy_location(ast.If(self._expression(f"is_enabled({index})"), [body], []), node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if not _is_rejection(node):
            return node
        index = self._add(node)
        return ast.copy_location(ast.If(self._expression(f"rejects({index})"), [node], []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id in self._conditions:
            node.value = self._in_parts(node.value)
        return node

    def _in_parts(self, condition: ast.expr) -> ast.expr:
        """Put the operands of `and`, and each comparison of a chain, behind switches, within `all(...)` too."""
        if isinstance(condition, ast.Call) and _name(condition.func) == "all":
            (each,) = condition.args
            if isinstance(each, ast.GeneratorExp):
                each.elt = self._in_parts(each.elt)
            return condition
        parts = _parts(condition)
        if len(parts) < 2:
            return condition
        return ast.copy_location(ast.BoolOp(ast.And(), [self._part(part) for part in parts]), condition)

    def _part(self, part: ast.expr) -> ast.expr:
        index = self._add(part)
        call = self._expression(f"holds({index})")
        assert isinstance(call, ast.Call)
        call.args.append(part)
        return ast.copy_location(call, part)

    def _expression(self, text: str) -> ast.expr:
        return ast.parse(f"{_SWITCHES}.{text}", mode="eval").body

    def _add(self, node: ast.expr | ast.stmt) -> int:
        is_part = isinstance(node, ast.expr)
        self.checks.append(Check(self._path, node.lineno, node.col_offset, ast.unparse(node), is_part))
        return self._first + len(self.checks) - 1


def _parts(condition: ast.expr) -> list[ast.expr]:
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        return [part for value in condition.values for part in _parts(value)]
    if isinstance(condition, ast.Compare) and len(condition.ops) > 1:
        terms = [condition.left, *condition.comparators]
        pairs = zip(terms, condition.ops, terms[1:], strict=False)
        return [ast.copy_location(ast.Compare(left, [op], [right]), right) for left, op, right in pairs]
    return [condition]


def insert_switches(path: Path, first: int = 0) -> tuple[ast.Module, list[Check]]:
    """Return a file's syntax tree with all checks behind switches, with indexes from `first`, and the checks."""
    transformer = _SwitchInserter(path, first)
    tree = transformer.visit(ast.parse(path.read_text()))
    return ast.fix_missing_locations(tree), transformer.checks


# -- switches in the imported modules ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Switches:
    """The disabled check (None: none), and the checks that have rejected something. The modules call its methods."""

    disabled: int | None = None
    rejected: set[int] = field(default_factory=set)

    def is_enabled(self, index: int) -> bool:
        """Return True unless the check is disabled."""
        return index != self.disabled

    def rejects(self, index: int) -> bool:
        """Record that a check rejects something; return True unless it is disabled."""
        self.rejected.add(index)
        return index != self.disabled

    def holds(self, index: int, part: T) -> T | bool:
        """Return a part's value, or True if the part is disabled; record that it rejects if the value is false."""
        return part or not self.rejects(index)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: Path, tree: ast.Module, switches: Switches) -> None:
        super().__init__(name, str(path))
        self._tree, self._switches = tree, switches

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _SWITCHES, self._switches)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Imports the packages' modules with switches."""

    def __init__(self, switches: Switches) -> None:
        self.checks: list[Check] = []
        self._switches = switches
        self._trees: dict[str, tuple[Path, ast.Module]] = {}
        for path in sorted(path for package in PACKAGES for path in (ROOT / "nnfmq" / package).rglob("*.py")):
            tree, checks = insert_switches(path, len(self.checks))
            if checks:
                self.checks += checks
                self._trees[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path, tree

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._trees:
            return None
        file, tree = self._trees[name]
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file, tree, self._switches))


# -- tests, in forks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of one test in a fork, and the checks that rejected something during it."""

    test: str
    passed: bool
    skipped: bool
    seconds: float
    rejected: list[int]


@dataclass(frozen=True, slots=True)
class MutantResult:
    """The result of one mutant: the test that kills it (None: it survived), and the count of candidate tests."""

    location: str
    text: str
    is_part: bool
    tests: int
    killed_by: str | None
    seconds: float


class _Reports:
    """Collects pytest's reports of one test."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)


class MutationRunner:
    """A pytest plugin that runs mutants instead of the tests."""

    def __init__(self, finder: _Finder, switches: Switches, chosen: Sequence[int], console: Console) -> None:
        self.results: list[MutantResult] = []
        self.skipped = 0
        self.error: str | None = "the tests cannot be collected"
        self._checks, self._switches, self._chosen, self._console = finder.checks, switches, chosen, console
        self._items: dict[str, pytest.Item] = {}
        self._baseline: dict[str, TestResult] = {}
        self._pass_alone: set[str] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the baseline, then each mutant. Returns True: pytest then does not run the tests itself."""
        self._items = {item.nodeid: item for item in session.items}
        self.error = None
        gc.freeze()
        self._run_baseline()
        for index in track(
            self._chosen, "running mutants", console=self._console, disable=not self._console.is_terminal
        ):
            if self.error is None:
                self._run_mutant(index)
        return True

    def _run_baseline(self) -> None:
        with self._console.status(f"running {len(self._items)} tests without a disabled check"):
            test_results = self._run_in_fork(list(self._items), None, limit_s=0)
        self._baseline = {test_result.test: test_result for test_result in test_results}
        self.skipped = sum(test_result.skipped for test_result in test_results)
        failed = [test for test in self._items if test not in self._baseline or not self._baseline[test].passed]
        if failed:
            self.error = f"this test fails without a disabled check: {failed[0]}"

    def _run_mutant(self, index: int) -> None:
        began = time.monotonic()
        tests = sorted(
            (o for o in self._baseline.values() if index in o.rejected), key=lambda test_result: test_result.seconds
        )
        names = [test_result.test for test_result in tests]
        killed_by = self._first_failure(names, index)
        if killed_by is None:  # a rejection within a fixture is recorded for the first test that uses the fixture
            files = {name.partition("::")[0] for name in names}
            killed_by = self._first_failure([name for name in self._items if name.partition("::")[0] in files], index)
        check, seconds = self._checks[index], round(time.monotonic() - began, 3)
        self.results.append(MutantResult(check.location, check.text, check.is_part, len(names), killed_by, seconds))
        if killed_by is None:
            self._console.print(f"[red]survived[/] {check.location}: {check.text}", highlight=False, soft_wrap=True)

    def _first_failure(self, tests: list[str], index: int) -> str | None:
        if not tests:
            return None
        limit_s = _LIMIT_S + int(10 * sum(self._baseline[test].seconds for test in tests))
        test_results = self._run_in_fork(tests, index, limit_s)
        if all(test_result.passed for test_result in test_results) and len(test_results) == len(tests):
            return None
        passed = [test_result.test for test_result in test_results if test_result.passed]
        failed = tests[len(passed)]  # the first that failed, or did not end
        if failed not in self._pass_alone:
            alone = self._run_in_fork([failed], None, limit_s)
            if not (alone and alone[0].passed):
                self.error = f"this test fails by itself without a disabled check: {failed}"
            self._pass_alone.add(failed)
        return failed

    def _run_in_fork(self, tests: Sequence[str], disabled: int | None, limit_s: int) -> list[TestResult]:
        """Run tests in a fork until the first fails, with a check disabled, and return their results. Blocks."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
            signal.alarm(limit_s)
            self._switches.disabled = disabled
            with os.fdopen(writer, "w", buffering=1) as pipe:
                self._run([self._items[test] for test in tests], disabled is not None, pipe.write)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().splitlines()
        os.waitpid(child, 0)
        return [TestResult(**json.loads(line)) for line in lines]

    def _run(self, items: Sequence[pytest.Item], stops: bool, write: Callable[[str], Any]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._switches.rejected.clear()
            reports, began = _Reports(), time.monotonic()
            item.config.pluginmanager.register(reports)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item.config.pluginmanager.unregister(reports)
            passed = not any(report.failed for report in reports.reports)
            skipped = any(report.skipped for report in reports.reports)
            seconds = time.monotonic() - began
            write(
                json.dumps(asdict(TestResult(item.nodeid, passed, skipped, seconds, sorted(self._switches.rejected))))
            )
            write("\n")
            if stops and not passed:
                return


@contextmanager
def _silence() -> Iterator[None]:
    """Discard what this process and its forks write to fds 1 and 2."""
    kept = os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for index in (1, 2):
            os.dup2(nothing, index)
        yield
    finally:
        for index, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, index)
        for index in (nothing, *kept):
            os.close(index)


def run_mutants(only: str, every: int, tests: Collection[str], console: Console) -> MutationRunner:
    """Run a mutant for each `every`th check whose location matches `only`.

    Raises:
        SystemExit: If no check matches, or if the tests do not pass without a disabled check.
    """
    switches = Switches()
    finder = _Finder(switches)
    chosen = [index for index, check in enumerate(finder.checks) if re.search(only, check.location)][::every]
    if not chosen:
        raise SystemExit(f"no check matches {only}")
    if any(f"nnfmq.{package}" in sys.modules for package in PACKAGES):
        raise SystemExit("nnfmq was imported before its checks could be instrumented")
    folders = sorted({finder.checks[index].tests for index in chosen})
    selected = tests or [*folders, f"--ignore={_EXCLUDED}"]
    sys.meta_path.insert(0, finder)
    os.chdir(ROOT)
    runner = MutationRunner(finder, switches, chosen, console)
    with tempfile.TemporaryDirectory() as folder, _silence():
        pytest.main([*_RUN, f"--basetemp={folder}/tests", *selected], plugins=[runner])
    if runner.error:
        raise SystemExit(runner.error)
    return runner


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every selected mutant; return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", metavar="REGEX", default="", help="only checks whose FILE:LINE:COLUMN matches (default: all)"
    )
    parser.add_argument("--every", metavar="N", type=int, default=1, help="only every Nth of them (default: 1)")
    parser.add_argument(
        "--tests", metavar="PATH", nargs="+", default=[], help="run these tests (default: those of the packages)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: each mutant and the test that kills it")
    options = parser.parse_args(arguments)
    with os.fdopen(os.dup(2 if options.json else 1), "w") as terminal:
        console = Console(file=terminal)
        began = time.monotonic()
        runner = run_mutants(options.only, options.every, options.tests, console)
        results, spent = runner.results, time.monotonic() - began
        survivors = sum(result.killed_by is None for result in results)
        checks = sum(not result.is_part for result in results)
        numbers = f"{checks} checks and {len(results) - checks} parts of checks disabled"
        skipped = f"; {runner.skipped} tests skipped" if runner.skipped else ""
        console.print(f"{numbers}, {survivors} survived{skipped}; {spent:.0f} s", highlight=False, soft_wrap=True)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
