"""`python tools/wheels`: build every wheel, check it and report. Exit status 1 if a check fails or nothing is built.

Every wheel undergoes the same checks in the same order; the others still run after one fails. The report has a row for
each wheel and a column for each check: `ok`, `FAILED`, or the reason why it did not run. The wheels remain in --output
in any case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from wheels import build
from wheels.build import ARCHITECTURES, ROOT, BuildError, Target

REQUIRED_MODULES = ("ziglang", "auditwheel", "elftools")
CHECKS = ("contents", "binaries", "auditwheel", "headers", "reproducible", "smoke test")
_EPILOG = """\
examples:
  python tools/wheels
  python tools/wheels --python python3.12 --architecture x86_64 --once
  python tools/wheels --aarch64-python 'qemu-aarch64 -L ROOT ROOT/usr/bin/python3.11'

Builds HEAD for every supported Python on this machine. Exit status: 0 if every check passes.
"""


@dataclass(frozen=True, slots=True)
class WheelReport:
    """One wheel, and the result of each check: "ok", "FAILED", or the reason why it did not run."""

    wheel: str
    python: str
    size_bytes: int = 0
    sha256: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The wheels to build, the folders, and the options."""

    targets: tuple[Target, ...]
    output: Path
    work: Path
    check_reproducible: bool
    aarch64_python: str | None
    aarch64_minor: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _check_tools()
        with tempfile.TemporaryDirectory(prefix="nnfmq-wheels-") as work:
            reports = _build_all(_make_plan(options, Path(work)))
    except BuildError as failure:
        print(f"tools/wheels: {failure}", file=sys.stderr)
        return 1
    print(
        json.dumps([asdict(report) for report in reports], indent=2)
        if options.json
        else "\n".join(table_lines(reports))
    )
    return exit_status(reports)


def exit_status(reports: Sequence[WheelReport]) -> int:
    """Return 0 if there are wheels and none has a problem, else 1."""
    return 0 if reports and not any(report.problems for report in reports) else 1


def table_lines(reports: Sequence[WheelReport]) -> Iterator[str]:
    """Yield the lines of the report: the table, then the problems."""
    table: list[tuple[str, ...]] = [("wheel", "KiB", *CHECKS)]
    for report in reports:
        table.append((report.wheel, str(report.size_bytes // 1024), *(report.checks.get(name, "-") for name in CHECKS)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    yield from (f"{report.wheel}: {problem}" for report in reports for problem in report.problems)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python tools/wheels", description="Build and check the wheels of HEAD.",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="build only for this interpreter (repeatable)"
    )
    parser.add_argument(
        "--architecture", action="append", choices=ARCHITECTURES, help="build only for this architecture (repeatable)"
    )
    parser.add_argument(
        "--aarch64-python",
        metavar="COMMAND",
        help="command that runs a Python for AArch64, for the smoke test of its wheel",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)")
    parser.add_argument(
        "--once", action="store_true", help="build each wheel once: takes half the time, does not check reproducibility"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _check_tools() -> None:
    if missing := [name for name in REQUIRED_MODULES if find_spec(name) is None]:
        raise BuildError(f"{', '.join(missing)} cannot be imported; to install: pip install '.[wheels]'")


def _make_plan(options: argparse.Namespace, work: Path) -> BuildPlan:
    found = build.find_named(options.python) or build.find_all()
    if not found:
        raise BuildError("no supported Python with C headers and venv found; specify one with --python")
    if build.has_uncommitted_changes():
        _log("note: the wheels are built from HEAD, without the uncommitted changes in the working tree")
    targets = [Target(python, name) for python in found for name in options.architecture or ARCHITECTURES]
    aarch64_python: str | None = options.aarch64_python
    options.output.mkdir(parents=True, exist_ok=True)
    return BuildPlan(
        (*targets, Target(found[-1], None)), options.output.resolve(), work, not options.once, aarch64_python,
        aarch64_python and _minor_version_of(aarch64_python),
    )  # fmt: skip


def _minor_version_of(command: str) -> str:
    from wheels import checks

    return checks.minor_version(command)


def _build_all(plan: BuildPlan) -> list[WheelReport]:
    reports = []
    for number, target in enumerate(plan.targets, 1):
        _log(f"[{number}/{len(plan.targets)}] {target.tag}, Python {target.python}")
        reports.append(_build_and_check(plan, target))
    return reports


def _build_and_check(plan: BuildPlan, target: Target) -> WheelReport:
    """Build one wheel and run every check on it."""
    _log("  build")
    try:
        wheel = _build_in_round(plan, target, "first", plan.output)
    except BuildError as failure:
        return WheelReport(f"*-{target.tag}.whl", str(target.python), problems=(f"build: {failure}",))
    found_of: dict[str, str] = {}
    problems: list[str] = []
    for name, check in _checks(plan, target, wheel).items():
        _log(f"  {name}")
        found_of[name], found = _run_check(check)
        problems += [f"{name}: {problem}" for problem in found]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return WheelReport(wheel.name, str(target.python), wheel.stat().st_size, digest, found_of, tuple(problems))


def _build_in_round(plan: BuildPlan, target: Target, round_name: str, output: Path) -> Path:
    """Build a wheel in the folders of one round, so that the second round cannot reuse results of the first."""
    kind = "pure" if target.architecture is None else target.python.tag
    base = plan.work / round_name
    venv, tree = base / f"{kind}-python", base / f"{kind}-tree"
    base.mkdir(exist_ok=True)
    if not venv.exists():
        build.create_build_venv(target.python, venv, compiled=target.architecture is not None)
    if not tree.exists():
        build.export(tree)
    output.mkdir(exist_ok=True)
    return build.build(target, venv / "bin" / "python", tree, base / "cache", output)


Check = Callable[[], list[str] | str]
"""Returns the problems, or the reason why the check did not run."""


def _checks(plan: BuildPlan, target: Target, wheel: Path) -> dict[str, Check]:
    from wheels import checks

    made: dict[str, Check] = {"contents": lambda: checks.content_problems(wheel, target, build.package_files())}
    if target.architecture is not None:
        made |= _binary_checks(plan, target, wheel, target.architecture)
    made["reproducible"] = lambda: _check_reproducible(plan, target, wheel)
    made["smoke test"] = lambda: _smoke_test(plan, target, wheel)
    return made


def _binary_checks(plan: BuildPlan, target: Target, wheel: Path, architecture: str) -> dict[str, Check]:
    from wheels import checks

    base = plan.work / "first"
    venv_python = base / f"{target.python.tag}-python" / "bin" / "python"
    return {
        "binaries": lambda: _binary_problems(plan, target, wheel, architecture),
        "auditwheel": lambda: checks.auditwheel_problems(wheel, architecture),
        "headers": lambda: build.check_headers(venv_python, architecture, base, base / "cache"),
    }


def _binary_problems(plan: BuildPlan, target: Target, wheel: Path, architecture: str) -> list[str]:
    """Check each module, and that it needs the same Python symbols as the x86-64 module for the same release."""
    from wheels import checks

    modules = checks.in_wheel(wheel)
    problems = [
        f"{name} {problem}"
        for name, module in modules.items()
        for problem in checks.binary_problems(module, architecture)
    ]
    if Target(target.python, "x86_64") in plan.targets:
        native = checks.in_wheel(wheel.with_name(wheel.name.replace(architecture, "x86_64")))
        differ = [name for name in modules if native[name].undefined != modules[name].undefined]
        problems += [f"{name} needs other Python symbols than on x86-64" for name in differ]
    return problems


def _check_reproducible(plan: BuildPlan, target: Target, wheel: Path) -> list[str] | str:
    if not plan.check_reproducible:
        return "not requested"
    again = _build_in_round(plan, target, "again-in-a-longer-path", plan.work / "again")
    return [] if again.read_bytes() == wheel.read_bytes() else ["a second build has different bytes"]


def _smoke_test(plan: BuildPlan, target: Target, wheel: Path) -> list[str] | str:
    from wheels import checks

    folder = plan.work / f"smoke-test-{target.tag}"
    if target.architecture != "aarch64":
        return checks.smoke_test_problems(wheel, target, folder)
    if plan.aarch64_python is None or plan.aarch64_minor != target.python.minor:
        return f"no {target.architecture} Python {target.python.minor}"
    return checks.emulated_problems(wheel, target, plan.aarch64_python, folder)


def _run_check(check: Check) -> tuple[str, list[str]]:
    """Run a check; return its entry in the table, and the problems."""
    try:
        found = check()
    except BuildError as failure:
        found = [str(failure)]
    if isinstance(found, str):
        return found, []
    return ("FAILED" if found else "ok"), found


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
