"""Switch off each check of the validator in turn; the tests must fail each time.

    python tools/constraint_mutants.py                     # nnfmq/validation: about 10 minutes
    python tools/constraint_mutants.py --part operations   # every operation's own constraints: hours
    python tools/constraint_mutants.py --only model.py:68  # one of them, with the tests' output

A check is a call of a function whose name begins with `require` or `_require`, or a `raise InvalidArgument` under an
`if`. It is taken out of the module's syntax tree when the tests import it; no file is changed. Each mutant runs in a
fork of a process that has imported all but nnfmq, with limits: a check may be what ends a loop. A check that no test
misses is printed as it stands; exit status 0 only if there is none.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import numpy as np  # noqa: F401  imported before the forks, as is the next
import pytest
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"validation": ["tests/validation"], "operations": ["tests/operations"]}
_RUN = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--hypothesis-seed=0"]


_LIMIT_S = {"validation": 300, "operations": 3600}  # of a mutant; one that takes longer is missed by its tests
_LIMIT_BYTES = 8 << 30


@dataclass(frozen=True)
class Check:
    """One check: where it is, and what it says."""

    path: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """File and line, as `--only` takes them."""
        return f"{self.path.name}:{self.line}"

    @property
    def module(self) -> str:
        """The module that it is in."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)


def _is_check(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
        return node.value.func.id.lstrip("_").startswith("require")
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
        raised = node.body[0].exc
        return isinstance(raised, ast.Call) and getattr(raised.func, "id", "") in ("InvalidArgument", "GeneralFailure")
    return False


def checks_in(path: Path) -> Iterator[Check]:
    """Yield the checks of a file, except those in the functions that raise for all others."""
    tree = ast.parse(path.read_text())
    helpers = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in ("_require", "require")
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and _is_check(node) and id(node) not in helpers:
            yield Check(path, node.lineno, ast.unparse(node).partition("\n")[0])


class _Without(ast.NodeTransformer):
    """Takes the check at one line out of a module."""

    def __init__(self, line: int) -> None:
        self._line = line

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.stmt) and node.lineno == self._line and _is_check(node):
            return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)


class _MutatingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, check: Check) -> None:
        super().__init__(check.module, str(check.path))
        self._line = check.line

    def get_code(self, fullname: str) -> CodeType:
        tree = _Without(self._line).visit(ast.parse(Path(self.path).read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module with a check less."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._check.module:
            return None
        return importlib.util.spec_from_file_location(
            name, self._check.path, loader=_MutatingLoader(self._check), submodule_search_locations=None
        )


def status_of_tests(part: str, tests: Sequence[str], check: Check | None, *, quiet: bool) -> int:
    """Run tests of a part in a fork, without `check`, and return pytest's exit status, or what ended it; blocks."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
        signal.alarm(_LIMIT_S[part])
        if quiet:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
        if check is not None:
            sys.meta_path.insert(0, _Finder(check))
        os.chdir(ROOT)
        os._exit(int(pytest.main([*_RUN, *tests])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every check."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, default="validation")
    parser.add_argument("--only", metavar="FILE:LINE", help="one check, with the tests' output")
    parser.add_argument("--tests", metavar="PATH", nargs="+", help="run these alone (default: all of the part)")
    options = parser.parse_args(arguments)
    tests = options.tests or PARTS[options.part]
    console = Console()
    checks = [check for path in sorted((ROOT / "nnfmq" / options.part).glob("*.py")) for check in checks_in(path)]
    if options.only:
        checks = [check for check in checks if check.place == options.only] or parser.error(f"no {options.only}")
    if "nnfmq" in sys.modules:
        raise SystemExit("nnfmq was imported before the forks")
    if status_of_tests(options.part, tests, None, quiet=True):
        raise SystemExit("the tests fail as they are: nothing can be said of mutants")
    began, survivors = time.monotonic(), []
    for check in track(checks, "checks switched off", console=console, disable=not sys.stdout.isatty()):
        if not status_of_tests(options.part, tests, check, quiet=not options.only):
            survivors.append(check)
            console.print(f"[red]no test misses[/] {check.place}: {check.text}", highlight=False, soft_wrap=True)
    spent = time.monotonic() - began
    console.print(f"{len(checks)} checks of {options.part} switched off, {len(survivors)} not missed; {spent:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
