"""The wheel builder refuses what a wheel must not be, and calls things by the names that packaging standards give them.

Each check is shown a good thing and the same thing broken in one place. That a whole wheel can be built is tried where
the tools of the extra `wheels` are; the command itself checks every wheel that it builds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from support.places import ROOT
from wheels import build, command, elf_checks, interpreters, smoke_test, wheel_contents
from wheels.build import Target
from wheels.elf_checks import Binary
from wheels.interpreters import Failed, Python

HERE = Python((3, 12, 1), Path("python3.12"))
X86, ARM, PURE = Target(HERE, "x86_64"), Target(HERE, "aarch64"), Target(HERE, None)
TRACKED = ["nnfmq/__init__.py", "nnfmq/py.typed", "nnfmq/queue/_core.pyx"]
CORE = "nnfmq/queue/_core.cpython-312-x86_64-linux-gnu.so"
INFO = "nnfmq-0.1.0.dist-info"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


# ---------------------------------------------------------------------------------------------- Pythons, names


@pytest.mark.parametrize(
    ("target", "tag"),
    [
        (X86, "cp312-cp312-manylinux_2_17_x86_64"),
        (ARM, "cp312-cp312-manylinux_2_17_aarch64"),
        (PURE, "py3-none-any"),
    ],
)
def test_a_wheel_is_tagged_for_interpreter_abi_and_platform(target: Target, tag: str) -> None:
    assert target.tag == tag


def test_extension_modules_end_as_the_interpreter_expects() -> None:
    running = Python(sys.version_info[:3], Path(sys.executable))
    assert Target(running, platform.machine()).suffix == sysconfig.get_config_var("EXT_SUFFIX")


def test_of_one_minor_version_the_newest_release_counts() -> None:
    old, new, other = (Python(release, Path("p")) for release in [(3, 12, 1), (3, 12, 10), (3, 11, 7)])
    assert interpreters.newest([old, new, other]) == [other, new]


@pytest.mark.parametrize("path", ["/bin/false", "/nonexistent/python3.12"])
def test_what_is_no_python_is_passed_over(path: str) -> None:
    assert interpreters.ask(Path(path)) is None


def test_a_python_that_was_named_and_cannot_be_used_is_an_error() -> None:
    with pytest.raises(Failed, match=r"false is no CPython 3\.11 or newer"):
        interpreters.named(["false"])


def test_a_command_that_fails_says_its_last_words() -> None:
    with pytest.raises(Failed, match=r"ended with 3:\nwhat was wrong"):
        interpreters.run([sys.executable, "-c", "import sys; print('what was wrong', file=sys.stderr); sys.exit(3)"])


# ---------------------------------------------------------------------------------------------- contents


def row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}\n"


def good_files(target: Target) -> dict[str, bytes]:
    files = dict.fromkeys(TRACKED, b"x = 1\n") | {f"{INFO}/{name}": b"" for name in wheel_contents.METADATA}
    if target is X86:
        files[CORE] = b"\x7fELF"
    pure = "true" if target is PURE else "false"
    files[f"{INFO}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {target.tag}\n".encode()
    rows = "".join(row(name, data) for name, data in files.items() if not name.endswith("RECORD"))
    return files | {f"{INFO}/RECORD": f"{rows}{INFO}/RECORD,,\n".encode()}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / "some.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return folder / "some.whl"


@pytest.mark.parametrize("target", [X86, PURE], ids=["compiled", "pure"])
def test_a_good_wheel_has_no_faults(target: Target, tmp_path: Path) -> None:
    assert wheel_contents.faults(written(tmp_path, good_files(target)), target, TRACKED) == []


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("nnfmq/py.typed", b"x = 2\n", "RECORD has .* for nnfmq/py.typed"),
        ("nnfmq/py.typed", b"x = 1\n\n", r"RECORD has .*, '6'\) for nnfmq/py.typed, which is .*, '7'\)"),
        ("nnfmq/py.typed", None, "py.typed is missing"),
        ("nnfmq/py.typed", None, "py.typed is in RECORD and not in the wheel"),
        ("nnfmq/queue/_core.c", b"", "_core.c does not belong in it"),
        ("nnfmq/queue/_core.c", b"", "_core.c is not in RECORD"),
        (CORE, None, re.escape(CORE) + " is missing"),
        (f"{INFO}/RECORD", None, "one .dist-info/RECORD is needed"),
        (f"{INFO}/WHEEL", b"Root-Is-Purelib: false\nTag: cp312-cp312-linux_x86_64\n", "cp312-cp312-linux_x86_64"),
        (f"{INFO}/WHEEL", f"Root-Is-Purelib: true\nTag: {X86.tag}\n".encode(), "Root-Is-Purelib: true"),
    ],
)
def test_a_wheel_broken_in_one_place_is_refused(name: str, data: bytes | None, fault: str, tmp_path: Path) -> None:
    files = good_files(X86) | ({name: data} if data is not None else {})
    broken = {path: held for path, held in files.items() if data is not None or path != name}
    found = wheel_contents.faults(written(tmp_path, broken), X86, TRACKED)
    assert [text for text in found if re.search(fault, text)], found


def test_what_is_no_zip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.whl").write_bytes(b"PK, but not really")
    assert re.search("cannot be read", " ".join(wheel_contents.faults(tmp_path / "some.whl", X86, TRACKED)))


# ---------------------------------------------------------------------------------------------- binaries


@pytest.fixture
def shared_object(tmp_path: Path) -> Path:
    """Return a library that asks for two functions of Python, one of glibc, one of libm and one of nobody."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "some.c").write_text(
        "#include <math.h>\n#include <time.h>\nint PyOne(void), _PyTwo(void), nobody(void);\n"
        "double all(double x) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);\n"
        "    return PyOne() + _PyTwo() + nobody() + cos(x); }\n"
    )
    made = tmp_path / "some.so"
    link = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-Wl,-rpath,/of/this/machine", "-lm"]
    subprocess.run(["cc", str(tmp_path / "some.c"), "-o", str(made), *link], check=True, timeout=60)
    return made


def test_what_a_binary_asks_for_is_read_from_it(shared_object: Path) -> None:
    read = elf_checks.parse(shared_object.read_bytes())
    assert read.machine == {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[platform.machine()]
    assert {"libc.so.6", "libm.so.6"} <= read.libraries
    assert read.search_paths == ("/of/this/machine",)
    assert read.undefined == {"PyOne", "_PyTwo", "nobody"}
    assert read.glibc >= (2, 2)


def test_a_binary_of_this_machine_is_refused_by_name(shared_object: Path) -> None:
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    found = "\n".join(elf_checks.faults(elf_checks.parse(shared_object.read_bytes()), other, glibc=(2, 1)))
    assert re.search(rf"^is for \w+, not {elf_checks.MACHINES[other]}$", found, re.MULTILINE)
    assert re.search(r"^needs glibc 2\.\d+, the tag promises 2\.1$", found, re.MULTILINE)
    assert "asks for ['nobody'], which" in found
    assert "searches ['/of/this/machine']" in found


def test_versions_of_glibc_are_compared_as_numbers() -> None:
    versions = frozenset(["GLIBC_2.2.5", "GLIBC_2.9", "GLIBC_2.17"])
    read = Binary("EM_X86_64", frozenset(["libc.so.6"]), (), versions, frozenset(["PyList_New"]))
    assert read.glibc == (2, 17)
    assert list(elf_checks.faults(read, "x86_64", glibc=(2, 17))) == []
    assert list(elf_checks.faults(read, "x86_64", glibc=(2, 16))) == ["needs glibc 2.17, the tag promises 2.16"]


@pytest.mark.parametrize(("library", "version"), [("libstdc++.so.6", "GLIBC_2.17"), ("libc.so.6", "CXXABI_1.3")])
def test_a_binary_that_needs_more_than_glibc_is_refused(library: str, version: str) -> None:
    read = Binary("EM_X86_64", frozenset([library]), (), frozenset([version]), frozenset())
    assert len(list(elf_checks.faults(read, "x86_64"))) == 1


def compiles(source: str) -> bool:
    words = ["cc", "-std=c11", "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(words, input=source.encode(), capture_output=True, timeout=60, check=False)
    return done.returncode == 0


@needs_cc
def test_the_sizes_of_this_python_s_headers_fit_this_machine() -> None:
    header = Path(sysconfig.get_config_h_filename())
    if not header.is_file():
        pytest.skip("this Python has no headers")
    source = build.assertions(header.read_text(encoding="utf-8"))
    assert source.count("_Static_assert") > 15
    assert compiles(source)


@needs_cc
@pytest.mark.parametrize("line", ["SIZEOF_VOID_P 4", "SIZEOF_LONG 4", "SIZEOF_WCHAR_T 2", "ALIGNOF_LONG 4"])
def test_headers_of_another_data_model_do_not_fit(line: str) -> None:
    assert not compiles(build.assertions(f"#define {line}\n"))


# ---------------------------------------------------------------------------------------------- trial, report, build


def test_the_trial_exchanges_every_record_between_two_processes() -> None:
    answer = json.loads(interpreters.run([sys.executable, smoke_test.PROGRAM, "500"]))
    assert (answer["records"], answer["machine"]) == (500, platform.machine())
    assert answer["core"] == answer["codec"]


def test_a_fault_is_in_the_table_and_in_the_exit_status() -> None:
    good = command.Row("a.whl", "3.12.1", checks={"contents": "ok", "trial": "no AArch64 Python"})
    bad = command.Row("b.whl", "3.12.1", checks={"contents": "FAILED"}, faults=("contents: py.typed is missing",))
    assert (command.status([good]), command.status([good, bad]), command.status([])) == (0, 1, 1)
    report = "\n".join(command.lines([good, bad]))
    assert re.search(r"^b\.whl +0 +FAILED +-", report, re.MULTILINE)
    assert report.endswith("\nb.whl: contents: py.typed is missing")


def test_without_its_tools_the_command_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "NEEDED", ("ziglang_of_nobody",))
    assert command.main([]) == 1
    assert (
        "ziglang_of_nobody cannot be imported; install what it needs: pip install '.[wheels]'"
        in capsys.readouterr().err
    )


def test_one_wheel_is_built_and_is_good(tmp_path: Path) -> None:
    _needs_tools_to_build()
    python = Python(sys.version_info[:3], Path(sys.executable))
    target = Target(python, "aarch64")
    tree = build.export(tmp_path / "tree")
    (tmp_path / "out").mkdir()
    wheel = build.build(target, python.path, tree, tmp_path / "cache", tmp_path / "out")
    assert wheel_contents.faults(wheel, target, build.files()) == []
    modules = elf_checks.in_wheel(wheel)
    assert sorted(modules) == ["nnfmq/queue/_core", "nnfmq/serialize/_codec"]
    assert [fault for module in modules.values() for fault in elf_checks.faults(module, "aarch64")] == []


def _needs_tools_to_build() -> None:
    for name in ("ziglang", "Cython"):
        pytest.importorskip(name, reason="building needs the extras `wheels` and `dev`")
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer")
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git repository: there is no HEAD to build")
