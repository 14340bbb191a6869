"""A wheel is installed as a user would, where no compiler works, and used.

Dependencies come from the package index, as wheels only. A wheel for AArch64 is tried where an interpreter for it is
given (`qemu-aarch64 -L ROOT ROOT/usr/bin/python3.11`, or anything that runs one); pip here then unpacks it and its
dependencies for that processor. An emulator shows that the modules load and work, not Arm's reordering of memory.
"""

from __future__ import annotations

import json
from pathlib import Path

from wheels.build import Target, platform_tag
from wheels.interpreters import environment, pip, run

PROGRAM = Path(__file__).with_name("smoke_test_script.py")
RECORDS = 2000
_NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
_EMULATED_S = 300


def faults(wheel: Path, target: Target, folder: Path) -> list[str]:
    """Install `wheel` into a new environment in `folder` and use it; return what was wrong."""
    core = "python" if target.architecture is None else "compiled"
    inside = environment(target.python, folder, [])
    pip(inside, "install", "--only-binary=:all:", wheel, environment=_NO_COMPILER)
    answer = json.loads(run([inside, "-I", PROGRAM, str(RECORDS)], folder=folder))
    return [*_wrong(answer, core, "x86_64", folder), *_doctor_faults(folder, core)]


def foreign_faults(wheel: Path, target: Target, python: str, folder: Path) -> list[str]:
    """Unpack `wheel` and its dependencies, use it with the command `python`; return what was wrong."""
    pip(
        target.python.path, "install", "--only-binary=:all:", "--target", folder, "--implementation", "cp",
        "--python-version", target.python.minor, *_platforms(str(target.architecture)), wheel,
    )  # fmt: skip
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); runpy.run_path({str(PROGRAM)!r}, None, '__main__')"
    )
    answer = json.loads(run([*python.split(), "-I", "-c", program, str(RECORDS)], folder=folder, limit_s=_EMULATED_S))
    return _wrong(answer, "compiled", str(target.architecture), folder)


def minor(python: str) -> str:
    """Return the version of the interpreter that the command `python` runs, as "3.11". Raises Failed."""
    return run([*python.split(), "-I", "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]).strip()


def _platforms(architecture: str) -> list[str]:
    """Return pip's options for the platforms whose wheels of dependencies may be taken, the newest glibc first."""
    accepted = [f"manylinux_2_{minimum}_{architecture}" for minimum in (28, 27)]
    return [f"--platform={name}" for name in (*accepted, platform_tag(architecture), f"manylinux2014_{architecture}")]


def _wrong(answer: dict[str, object], core: str, machine: str, folder: Path) -> list[str]:
    expected = {"core": core, "codec": core, "records": RECORDS, "machine": machine}
    wrong = [f"{name} is {answer[name]}, not {value}" for name, value in expected.items() if answer[name] != value]
    outside = not Path(str(answer["path"])).is_relative_to(folder.resolve())
    return wrong + [f"the core comes from {answer['path']}, not from {folder}"] * outside


def _doctor_faults(folder: Path, core: str) -> list[str]:
    """Ask `nnfmq doctor`. Raises Failed where it finds nnfmq not usable."""
    report = json.loads(run([folder / "bin" / "nnfmq", "doctor", "--json"], folder=folder))
    found = {finding["name"]: finding["value"] for finding in report["findings"]}
    names = ("queue core", "packet codec")
    return [f"doctor says {name}: {found[name]}, not {core}" for name in names if found[name] != core]
