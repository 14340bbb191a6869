"""Switch off each check of the validator and of the operations in turn; the tests must fail each time.

    python tools/constraint_mutants.py                             # all: 3 to 6 minutes
    python tools/constraint_mutants.py --only '^validation/'       # a part: checks whose FILE:LINE:COLUMN matches
    python tools/constraint_mutants.py --only shapes.py:85 --json  # what was tried, and which test missed it
    python tools/constraint_mutants.py --every 20                  # each twentieth: a sample

A check is a call of a function whose name begins with `require` or `_require`, or a `raise` of InvalidArgument or
GeneralFailure. Of a check that requires several things at once (`and`, a chain of comparisons), each of them is
switched off alone as well: a part.

The modules are changed as they are imported, no file is: each check is there behind a switch. The tests are collected
once, and run once in a fork, to learn in which of them a check refuses something: a check that refuses nothing in a
test is not missed by it. Then each mutant gets a fork of its own, with its switch off and the tests in which it
refused, the quickest first, until one fails. A test that fails so must pass alone with all checks on. There is a limit
of time and of memory: a check may be what ends a loop. What no test misses is printed; exit status 0 only if there is
none.
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
_LEFT_OUT = "tests/validation/test_model_mutations.py"  # takes minutes; its rules have tests of their own
_SWITCHES = "__switches__"
_LIMIT_S = 10  # of a mutant, beyond ten times what its tests take; one that takes longer is missed
_LIMIT_BYTES = 4 << 30

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """A check, or a part of one: where it is, and what it says."""

    path: Path
    line: int
    column: int
    text: str
    is_part: bool

    @property
    def place(self) -> str:
        """Where it is, as `--only` sees it."""
        return f"{self.path.parent.name}/{self.path.name}:{self.line}:{self.column}"


# -- checks in a module's syntax tree ---------------------------------------------------------------------------------


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_requirement(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and _name(call.func).lstrip("_").startswith("require")


def _is_refusal(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _name(node.exc.func) in _ERRORS


class _Switched(ast.NodeTransformer):
    """Puts each check of a module behind a switch, whose number is the check's in `checks`."""

    def __init__(self, path: Path, first: int) -> None:
        self.checks: list[Check] = []
        self._path, self._first = path, first
        self._conditions: set[str] = set()  # the names of this function's requirements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in ("_require", "require"):
            return node  # raises for all others
        outer = self._conditions
        calls = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Expr) and _is_requirement(inner))
        firsts = (call.args[0] for call in calls if isinstance(call, ast.Call) and call.args)
        self._conditions = {part.id for first in firsts for part in _parts(first) if isinstance(part, ast.Name)}
        visited = self.generic_visit(node)
        self._conditions = outer
        return visited

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        return node  # says the same in other words

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not _is_requirement(node):
            return self.generic_visit(node)
        number = self._add(node)
        call = node.value
        assert isinstance(call, ast.Call)
        if call.args:
            call.args[0] = self._in_parts(call.args[0])
        refused = ast.parse(f"{_SWITCHES}.refuses({number})").body
        handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), None, [*refused, ast.Raise()])
        body = ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])
        return ast.copy_location(ast.If(self._expression(f"is_on({number})"), [body], []), node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if not _is_refusal(node):
            return node
        number = self._add(node)
        return ast.copy_location(ast.If(self._expression(f"refuses({number})"), [node], []), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id in self._conditions:
            node.value = self._in_parts(node.value)
        return node

    def _in_parts(self, condition: ast.expr) -> ast.expr:
        """Put what a condition joins by `and`, and each comparison of a chain, behind switches; into `all` as well."""
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
        number = self._add(part)
        call = self._expression(f"holds({number})")
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


def switched(path: Path, first: int = 0) -> tuple[ast.Module, list[Check]]:
    """Return a file's tree with all checks behind switches from number `first` on, and the checks."""
    transformer = _Switched(path, first)
    tree = transformer.visit(ast.parse(path.read_text()))
    return ast.fix_missing_locations(tree), transformer.checks


# -- their switches, in the modules -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Switches:
    """Which check is off (None: none is), and which have refused something. The modules call its methods."""

    off: int | None = None
    refused: set[int] = field(default_factory=set)

    def is_on(self, number: int) -> bool:
        """Return whether a check is to be made."""
        return number != self.off

    def refuses(self, number: int) -> bool:
        """Note that a check refuses something, and return whether it may."""
        self.refused.add(number)
        return number != self.off

    def holds(self, number: int, part: T) -> T | bool:
        """Return a part's value, noting that it refuses something; True where it is off."""
        return part or not self.refuses(number)


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
    """Finds the modules of the packages, with switches."""

    def __init__(self, switches: Switches) -> None:
        self.checks: list[Check] = []
        self._switches = switches
        self._trees: dict[str, tuple[Path, ast.Module]] = {}
        for path in sorted(path for package in PACKAGES for path in (ROOT / "nnfmq" / package).glob("*.py")):
            tree, checks = switched(path, len(self.checks))
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
class Outcome:
    """What one test did in a fork."""

    test: str
    passed: bool
    skipped: bool
    seconds: float
    refused: list[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: the test that missed the check, and how many have it refuse something."""

    place: str
    text: str
    is_part: bool
    tests: int
    missed_by: str | None
    seconds: float


class _Reports:
    """Collects what pytest says of one test."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)


class Judge:
    """A pytest plugin that tries mutants in place of running the tests."""

    def __init__(self, finder: _Finder, switches: Switches, chosen: Sequence[int], console: Console) -> None:
        self.verdicts: list[Verdict] = []
        self.skipped = 0
        self.complaint: str | None = "the tests cannot be collected"
        self._checks, self._switches, self._chosen, self._console = finder.checks, switches, chosen, console
        self._items: dict[str, pytest.Item] = {}
        self._known: dict[str, Outcome] = {}
        self._pass_alone: set[str] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Learn what the tests do, then try each mutant; True tells pytest that the tests have been run."""
        self._items = {item.nodeid: item for item in session.items}
        self.complaint = None
        gc.freeze()
        self._learn()
        for number in track(self._chosen, "switched off", console=self._console, disable=not self._console.is_terminal):
            if self.complaint is None:
                self._try(number)
        return True

    def _learn(self) -> None:
        with self._console.status(f"running {len(self._items)} tests as they are"):
            outcomes = self._outcomes(list(self._items), None, limit_s=0)
        self._known = {outcome.test: outcome for outcome in outcomes}
        self.skipped = sum(outcome.skipped for outcome in outcomes)
        failed = [test for test in self._items if test not in self._known or not self._known[test].passed]
        if failed:
            self.complaint = f"fails as it is, nothing can be said of mutants: {failed[0]}"

    def _try(self, number: int) -> None:
        began = time.monotonic()
        tests = sorted((o for o in self._known.values() if number in o.refused), key=lambda outcome: outcome.seconds)
        names = [outcome.test for outcome in tests]
        missed_by = self._first_failure(names, number)
        if missed_by is None:  # a fixture's refusal counts for the first test that wants the fixture
            files = {name.partition("::")[0] for name in names}
            missed_by = self._first_failure([name for name in self._items if name.partition("::")[0] in files], number)
        check, seconds = self._checks[number], round(time.monotonic() - began, 3)
        self.verdicts.append(Verdict(check.place, check.text, check.is_part, len(names), missed_by, seconds))
        if missed_by is None:
            self._console.print(f"[red]no test misses[/] {check.place}: {check.text}", highlight=False, soft_wrap=True)

    def _first_failure(self, tests: list[str], number: int) -> str | None:
        if not tests:
            return None
        limit_s = _LIMIT_S + int(10 * sum(self._known[test].seconds for test in tests))
        outcomes = self._outcomes(tests, number, limit_s)
        if all(outcome.passed for outcome in outcomes) and len(outcomes) == len(tests):
            return None
        passed = [outcome.test for outcome in outcomes if outcome.passed]
        failed = tests[len(passed)]  # the first that failed, or did not end
        if failed not in self._pass_alone:
            alone = self._outcomes([failed], None, limit_s)
            if not (alone and alone[0].passed):
                self.complaint = f"fails when it runs alone, whatever is switched off: {failed}"
            self._pass_alone.add(failed)
        return failed

    def _outcomes(self, tests: Sequence[str], off: int | None, limit_s: int) -> list[Outcome]:
        """Run tests in a fork, with a check off until the first fails, and return what it told of them; blocks."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
            signal.alarm(limit_s)
            self._switches.off = off
            with os.fdopen(writer, "w", buffering=1) as pipe:
                self._run([self._items[test] for test in tests], off is not None, pipe.write)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().splitlines()
        os.waitpid(child, 0)
        return [Outcome(**json.loads(line)) for line in lines]

    def _run(self, items: Sequence[pytest.Item], stops: bool, tell: Callable[[str], Any]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._switches.refused.clear()
            reports, began = _Reports(), time.monotonic()
            item.config.pluginmanager.register(reports)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item.config.pluginmanager.unregister(reports)
            passed = not any(report.failed for report in reports.reports)
            skipped = any(report.skipped for report in reports.reports)
            seconds = time.monotonic() - began
            tell(json.dumps(asdict(Outcome(item.nodeid, passed, skipped, seconds, sorted(self._switches.refused)))))
            tell("\n")
            if stops and not passed:
                return


@contextmanager
def _silence() -> Iterator[None]:
    """Send what this process and its forks write to descriptors 1 and 2 nowhere."""
    kept = os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nothing, number)
        yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
        for number in (nothing, *kept):
            os.close(number)


def judged(only: str, every: int, tests: Collection[str], console: Console) -> Judge:
    """Try each `every`th check whose place matches `only`. Raises SystemExit where nothing can be said of them."""
    switches = Switches()
    finder = _Finder(switches)
    chosen = [number for number, check in enumerate(finder.checks) if re.search(only, check.place)][::every]
    if not chosen:
        raise SystemExit(f"no check matches {only}")
    if any(f"nnfmq.{package}" in sys.modules for package in PACKAGES):
        raise SystemExit("the modules were imported before the switches were there")
    folders = sorted({f"tests/{finder.checks[number].path.parent.name}" for number in chosen})
    selected = tests or [*folders, f"--ignore={_LEFT_OUT}"]
    sys.meta_path.insert(0, finder)
    os.chdir(ROOT)
    judge = Judge(finder, switches, chosen, console)
    with tempfile.TemporaryDirectory() as folder, _silence():
        pytest.main([*_RUN, f"--basetemp={folder}/tests", *selected], plugins=[judge])
    if judge.complaint:
        raise SystemExit(judge.complaint)
    return judge


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every check."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="REGEX", default="", help="checks whose place matches (default: all)")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="each Nth of them alone (default: 1)")
    parser.add_argument("--tests", metavar="PATH", nargs="+", default=[], help="run these (default: the packages')")
    parser.add_argument("--json", action="store_true", help="print JSON: each mutant, and the test that missed it")
    options = parser.parse_args(arguments)
    with os.fdopen(os.dup(2 if options.json else 1), "w") as terminal:
        console = Console(file=terminal)
        began = time.monotonic()
        judge = judged(options.only, options.every, options.tests, console)
        verdicts, spent = judge.verdicts, time.monotonic() - began
        survivors = sum(verdict.missed_by is None for verdict in verdicts)
        checks = sum(not verdict.is_part for verdict in verdicts)
        numbers = f"{checks} checks and {len(verdicts) - checks} parts of checks switched off"
        skipped = f"; {judge.skipped} tests skipped" if judge.skipped else ""
        console.print(f"{numbers}, {survivors} not missed{skipped}; {spent:.0f} s", highlight=False, soft_wrap=True)
    if options.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
