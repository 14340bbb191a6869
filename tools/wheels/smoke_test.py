"""Smoke test of a wheel: install it as a user would, without a working compiler, and use it.

Dependencies are wheels from the package index. A wheel for AArch64 is tested if the caller has a command that runs an
interpreter for it (`qemu-aarch64 -L ROOT ROOT/usr/bin/python3.11`, for instance): pip of this machine then unpacks the
wheel and its dependencies for that architecture. An emulator shows that the modules load and work, but does not reorder
memory accesses as Arm processors do.
"""

from __future__ import annotations

import json
from pathlib import Path

from wheels.build import Target, platform_tag
from wheels.interpreters import create_venv, pip, run

SCRIPT = Path(__file__).with_name("smoke_test_script.py")
RECORDS = 2000
_NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
_EMULATED_TIMEOUT_S = 300


def problems(wheel: Path, target: Target, folder: Path) -> list[str]:
    """Install `wheel` in a new environment in `folder` and use it; return the problems."""
    core = "python" if target.architecture is None else "compiled"
    venv_python = create_venv(target.python, folder, [])
    pip(venv_python, "install", "--only-binary=:all:", wheel, environment=_NO_COMPILER)
    report = json.loads(run([venv_python, "-I", SCRIPT, str(RECORDS)], folder=folder))
    return [*_report_problems(report, core, "x86_64", folder), *_doctor_problems(folder, core)]


def emulated_problems(wheel: Path, target: Target, python: str, folder: Path) -> list[str]:
    """Unpack `wheel` and its dependencies in `folder`, use it with the command `python`; return the problems."""
    pip(
        target.python.path, "install", "--only-binary=:all:", "--target", folder, "--implementation", "cp",
        "--python-version", target.python.minor, *_platforms(str(target.architecture)), wheel,
    )  # fmt: skip
    runner = (
        f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); runpy.run_path({str(SCRIPT)!r}, None, '__main__')"
    )
    report = json.loads(
        run([*python.split(), "-I", "-c", runner, str(RECORDS)], folder=folder, timeout_s=_EMULATED_TIMEOUT_S)
    )
    return _report_problems(report, "compiled", str(target.architecture), folder)


def minor_version(python: str) -> str:
    """Return the minor version, such as "3.11", of the interpreter that the command `python` runs."""
    return run([*python.split(), "-I", "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]).strip()


def _platforms(architecture: str) -> list[str]:
    """Return pip's options for the platform tags that dependencies may have, newest glibc first."""
    accepted = [f"manylinux_2_{minimum}_{architecture}" for minimum in (28, 27)]
    return [f"--platform={name}" for name in (*accepted, platform_tag(architecture), f"manylinux2014_{architecture}")]


def _report_problems(report: dict[str, object], core: str, machine: str, folder: Path) -> list[str]:
    expected = {"core": core, "codec": core, "records": RECORDS, "machine": machine}
    problems = [f"{name} is {report[name]}, not {value}" for name, value in expected.items() if report[name] != value]
    outside = not Path(str(report["path"])).is_relative_to(folder.resolve())
    return problems + [f"the core is {report['path']}, which is not in {folder}"] * outside


def _doctor_problems(folder: Path, core: str) -> list[str]:
    """Return the differences between `core` and the cores that `nnfmq doctor` reports.

    Raises:
        BuildError: If `nnfmq doctor` fails, because nnfmq is not usable.
    """
    report = json.loads(run([folder / "bin" / "nnfmq", "doctor", "--json"], folder=folder))
    found = {finding["name"]: finding["value"] for finding in report["findings"]}
    names = ("queue core", "packet codec")
    return [f"nnfmq doctor reports {name} {found[name]}, not {core}" for name in names if found[name] != core]
