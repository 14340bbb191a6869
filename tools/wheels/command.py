"""`python tools/wheels`: build every wheel, check it, report. Ends with 1 where a check failed or nothing was built.

Each wheel goes through the same checks, in this order; one that raises has failed, the next are still done. A row of
the report is a wheel, a column a check: `ok`, `FAILED`, or why it was not done. The wheels stay in --output either way.
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

from wheels import build, interpreters, wheel_contents
from wheels.build import ARCHITECTURES, Target
from wheels.interpreters import ROOT, Failed

NEEDED = ("ziglang", "auditwheel", "elftools")
CHECKS = ("contents", "binaries", "auditwheel", "headers", "same twice", "trial")
_EPILOG = """\
examples:
  python tools/wheels
  python tools/wheels --python python3.12 --architecture x86_64 --once
  python tools/wheels --aarch64-python 'qemu-aarch64 -L ROOT ROOT/usr/bin/python3.11'

HEAD is built, for every supported Python that is found. Exit status: 0 when every check passed.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One wheel: its file, and for each check what it answered: "ok", "FAILED", or why it was not done."""

    wheel: str
    python: str
    size_bytes: int = 0
    sha256: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, and where."""

    targets: tuple[Target, ...]
    output: Path
    work: Path
    twice: bool
    foreign: str | None
    foreign_minor: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _check_tools()
        with tempfile.TemporaryDirectory(prefix="nnfmq-wheels-") as work:
            rows = _all(_plan(options, Path(work)))
    except Failed as failure:
        print(f"tools/wheels: {failure}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else "\n".join(lines(rows)))
    return status(rows)


def status(rows: Sequence[Row]) -> int:
    """Return the exit status: 0 where there are wheels and none failed."""
    return 0 if rows and not any(row.faults for row in rows) else 1


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the report as text: the table, then what was wrong."""
    table: list[tuple[str, ...]] = [("wheel", "KiB", *CHECKS)]
    for row in rows:
        table.append((row.wheel, str(row.size_bytes // 1024), *(row.checks.get(name, "-") for name in CHECKS)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
    yield from (f"{row.wheel}: {fault}" for row in rows for fault in row.faults)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python tools/wheels", description="Build and check the wheels of HEAD.",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="only these interpreters")
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES, help="only these processors")
    parser.add_argument("--aarch64-python", metavar="COMMAND", help="how to run a Python for AArch64, to try its wheel")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the wheels go (default: dist)")
    parser.add_argument("--once", action="store_true", help="build each once: half the time, reproducibility unchecked")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _check_tools() -> None:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise Failed(f"{', '.join(missing)} cannot be imported; install what it needs: pip install '.[wheels]'")


def _plan(options: argparse.Namespace, work: Path) -> Plan:
    found = interpreters.named(options.python) or interpreters.find()
    if not found:
        raise Failed("no Python here is new enough and has C headers and venv; name one with --python")
    if build.uncommitted():
        _say("note: HEAD is built; there are changes that are not committed")
    targets = [Target(python, name) for python in found for name in options.architecture or ARCHITECTURES]
    foreign: str | None = options.aarch64_python
    options.output.mkdir(parents=True, exist_ok=True)
    return Plan(
        (*targets, Target(found[-1], None)), options.output.resolve(), work, not options.once, foreign,
        foreign and _foreign_minor(foreign),
    )  # fmt: skip


def _foreign_minor(foreign: str) -> str:
    from wheels import smoke_test

    return smoke_test.minor(foreign)


def _all(plan: Plan) -> list[Row]:
    rows = []
    for number, target in enumerate(plan.targets, 1):
        _say(f"[{number}/{len(plan.targets)}] {target.tag}, Python {target.python}")
        rows.append(_one(plan, target))
    return rows


def _one(plan: Plan, target: Target) -> Row:
    """Build one wheel and put it through every check."""
    _say("  build")
    try:
        wheel = _built(plan, target, "first", plan.output)
    except Failed as failure:
        return Row(f"*-{target.tag}.whl", str(target.python), faults=(f"build: {failure}",))
    answers, faults = {}, []
    for name, check in _checks(plan, target, wheel).items():
        _say(f"  {name}")
        answers[name], found = _answer(check)
        faults += [f"{name}: {fault}" for fault in found]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Row(wheel.name, str(target.python), wheel.stat().st_size, digest, answers, tuple(faults))


def _built(plan: Plan, target: Target, round_name: str, output: Path) -> Path:
    """Build in folders that the round has for itself, so that nothing of the first is found by the second."""
    kind = "pure" if target.architecture is None else target.python.tag
    base = plan.work / round_name
    inside, tree = base / f"{kind}-python", base / f"{kind}-tree"
    base.mkdir(exist_ok=True)
    if not inside.exists():
        build.workshop(target.python, inside, compiled=target.architecture is not None)
    if not tree.exists():
        build.export(tree)
    output.mkdir(exist_ok=True)
    return build.build(target, inside / "bin" / "python", tree, base / "cache", output)


Check = Callable[[], list[str] | str]
"""Returns what is wrong, or why it was not done."""


def _checks(plan: Plan, target: Target, wheel: Path) -> dict[str, Check]:
    checks: dict[str, Check] = {"contents": lambda: wheel_contents.faults(wheel, target, build.files())}
    if target.architecture is not None:
        checks |= _binary_checks(plan, target, wheel, target.architecture)
    checks["same twice"] = lambda: _same_twice(plan, target, wheel)
    checks["trial"] = lambda: _tried(plan, target, wheel)
    return checks


def _binary_checks(plan: Plan, target: Target, wheel: Path, architecture: str) -> dict[str, Check]:
    from wheels import elf_checks

    base = plan.work / "first"
    inside = base / f"{target.python.tag}-python" / "bin" / "python"
    return {
        "binaries": lambda: _binary_faults(plan, target, wheel, architecture),
        "auditwheel": lambda: elf_checks.auditwheel_faults(wheel, architecture),
        "headers": lambda: build.headers_fit(inside, architecture, base, base / "cache"),
    }


def _binary_faults(plan: Plan, target: Target, wheel: Path, architecture: str) -> list[str]:
    """Check each module, and that it asks Python for what the module for x86-64 of the same release asks."""
    from wheels import elf_checks

    modules = elf_checks.in_wheel(wheel)
    wrong = [f"{name} {fault}" for name, module in modules.items() for fault in elf_checks.faults(module, architecture)]
    if Target(target.python, "x86_64") in plan.targets:
        native = elf_checks.in_wheel(wheel.with_name(wheel.name.replace(architecture, "x86_64")))
        differ = [name for name in modules if native[name].undefined != modules[name].undefined]
        wrong += [f"{name} asks Python for other symbols than on x86-64" for name in differ]
    return wrong


def _same_twice(plan: Plan, target: Target, wheel: Path) -> list[str] | str:
    if not plan.twice:
        return "not asked"
    again = _built(plan, target, "again-in-a-longer-path", plan.work / "again")
    return [] if again.read_bytes() == wheel.read_bytes() else ["built again, it has other bytes"]


def _tried(plan: Plan, target: Target, wheel: Path) -> list[str] | str:
    from wheels import smoke_test

    folder = plan.work / f"trial-{target.tag}"
    if target.architecture != "aarch64":
        return smoke_test.faults(wheel, target, folder)
    if plan.foreign is None or plan.foreign_minor != target.python.minor:
        return f"no {target.architecture} Python {target.python.minor} given"
    return smoke_test.foreign_faults(wheel, target, plan.foreign, folder)


def _answer(check: Check) -> tuple[str, list[str]]:
    """Run a check; return its cell in the table, and what is wrong."""
    try:
        found = check()
    except Failed as failure:
        found = [str(failure)]
    if isinstance(found, str):
        return found, []
    return ("FAILED" if found else "ok"), found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
