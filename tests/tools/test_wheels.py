"""The wheel builder's checks, and names and tags as in the packaging standards.

Each check is run on valid input and on the same input with one mutation. A whole wheel is built only if the tools of
the extra `wheels` are installed; the command itself checks every wheel that it builds.
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

import man_pages
import pytest
from support.places import ROOT
from wheels import build, checks, command
from wheels.build import BuildError, Python, Target
from wheels.checks import Binary

PYTHON_312 = Python((3, 12, 1), Path("python3.12"))
X86, ARM, PURE = Target(PYTHON_312, "x86_64"), Target(PYTHON_312, "aarch64"), Target(PYTHON_312, None)
TRACKED = ["nnfmq/__init__.py", "nnfmq/py.typed", "nnfmq/queue/_core.pyx"]
CORE = "nnfmq/queue/_core.cpython-312-x86_64-linux-gnu.so"
INFO = "nnfmq-0.1.0.dist-info"
MAN = "nnfmq-0.1.0.data/data/share/man/man1"
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


def test_extension_modules_have_the_suffix_that_the_interpreter_expects() -> None:
    running = Python(sys.version_info[:3], Path(sys.executable))
    assert Target(running, platform.machine()).suffix == sysconfig.get_config_var("EXT_SUFFIX")


def test_the_newest_release_of_each_minor_version_is_used() -> None:
    old, new, other = (Python(release, Path("p")) for release in [(3, 12, 1), (3, 12, 10), (3, 11, 7)])
    assert build.newest_releases([old, new, other]) == [other, new]


@pytest.mark.parametrize("path", ["/bin/false", "/nonexistent/python3.12"])
def test_a_file_that_is_not_a_python_is_skipped(path: str) -> None:
    assert build.probe(Path(path)) is None


def test_a_named_interpreter_that_is_not_supported_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"false is not CPython 3\.11 or newer"):
        build.find_named(["false"])


def test_the_error_of_a_failed_command_has_the_end_of_its_output() -> None:
    with pytest.raises(BuildError, match=r"failed with exit status 3:\nthe problem"):
        build.run([sys.executable, "-c", "import sys; print('the problem', file=sys.stderr); sys.exit(3)"])


# ---------------------------------------------------------------------------------------------- contents


def record_row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}\n"


def valid_files(target: Target) -> dict[str, bytes]:
    files = dict.fromkeys(TRACKED, b"x = 1\n") | {f"{INFO}/{name}": b"" for name in checks.METADATA}
    files |= {f"{MAN}/{name}": b".TH" for name in man_pages.page_names()}
    if target is X86:
        files[CORE] = b"\x7fELF"
    pure = "true" if target is PURE else "false"
    files[f"{INFO}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {target.tag}\n".encode()
    rows = "".join(record_row(name, data) for name, data in files.items() if not name.endswith("RECORD"))
    return files | {f"{INFO}/RECORD": f"{rows}{INFO}/RECORD,,\n".encode()}


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / "some.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return folder / "some.whl"


@pytest.mark.parametrize("target", [X86, PURE], ids=["compiled", "pure"])
def test_a_valid_wheel_has_no_problems(target: Target, tmp_path: Path) -> None:
    assert checks.content_problems(write_wheel(tmp_path, valid_files(target)), target, TRACKED) == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("nnfmq/py.typed", b"x = 2\n", "RECORD has .* for nnfmq/py.typed"),
        ("nnfmq/py.typed", b"x = 1\n\n", r"RECORD has .*, '6'\) for nnfmq/py.typed, not .*, '7'\)"),
        ("nnfmq/py.typed", None, "py.typed is missing"),
        ("nnfmq/py.typed", None, "py.typed is in RECORD but not in the wheel"),
        ("nnfmq/queue/_core.c", b"", "_core.c does not belong in the wheel"),
        ("nnfmq/queue/_core.c", b"", "_core.c is not in RECORD"),
        (CORE, None, re.escape(CORE) + " is missing"),
        (f"{MAN}/nnfmq-run.1", None, "share/man/man1/nnfmq-run.1 is missing"),
        (f"{MAN}/nnfmq-fly.1", b"", "share/man/man1/nnfmq-fly.1 does not belong in the wheel"),
        (f"{INFO}/RECORD", None, "there must be one .dist-info/RECORD"),
        (f"{INFO}/WHEEL", b"Root-Is-Purelib: false\nTag: cp312-cp312-linux_x86_64\n", "cp312-cp312-linux_x86_64"),
        (f"{INFO}/WHEEL", f"Root-Is-Purelib: true\nTag: {X86.tag}\n".encode(), "Root-Is-Purelib: true"),
    ],
)
def test_a_wheel_with_one_mutation_is_rejected(name: str, data: bytes | None, message: str, tmp_path: Path) -> None:
    files = valid_files(X86) | ({name: data} if data is not None else {})
    mutated = {path: content for path, content in files.items() if data is not None or path != name}
    found = checks.content_problems(write_wheel(tmp_path, mutated), X86, TRACKED)
    assert [text for text in found if re.search(message, text)], found


def test_a_file_that_is_not_a_zip_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "some.whl").write_bytes(b"PK, but not really")
    assert re.search("cannot be read", " ".join(checks.content_problems(tmp_path / "some.whl", X86, TRACKED)))


# ---------------------------------------------------------------------------------------------- binaries


@pytest.fixture
def shared_object(tmp_path: Path) -> Path:
    """Return a library that needs two functions of Python, one of glibc, one of libm and one that does not exist."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "some.c").write_text(
        "#include <math.h>\n#include <time.h>\nint PyOne(void), _PyTwo(void), missing(void);\n"
        "double all(double x) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);\n"
        "    return PyOne() + _PyTwo() + missing() + cos(x); }\n"
    )
    made = tmp_path / "some.so"
    link = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-Wl,-rpath,/of/this/machine", "-lm"]
    subprocess.run(["cc", str(tmp_path / "some.c"), "-o", str(made), *link], check=True, timeout=60)
    return made


def test_the_requirements_of_a_binary_are_read_from_it(shared_object: Path) -> None:
    read = checks.parse(shared_object.read_bytes())
    assert read.machine == {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[platform.machine()]
    assert {"libc.so.6", "libm.so.6"} <= read.libraries
    assert read.search_paths == ("/of/this/machine",)
    assert read.undefined == {"PyOne", "_PyTwo", "missing"}
    assert read.glibc >= (2, 2)


def test_each_problem_of_a_binary_is_reported(shared_object: Path) -> None:
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    found = "\n".join(checks.binary_problems(checks.parse(shared_object.read_bytes()), other, glibc=(2, 1)))
    assert re.search(rf"^is for \w+, not {checks.MACHINES[other]}$", found, re.MULTILINE)
    assert re.search(r"^needs glibc 2\.\d+, the tag promises 2\.1$", found, re.MULTILINE)
    assert "needs ['missing'], which" in found
    assert "searches ['/of/this/machine']" in found


def test_versions_of_glibc_are_compared_as_numbers() -> None:
    versions = frozenset(["GLIBC_2.2.5", "GLIBC_2.9", "GLIBC_2.17"])
    read = Binary("EM_X86_64", frozenset(["libc.so.6"]), (), versions, frozenset(["PyList_New"]))
    assert read.glibc == (2, 17)
    assert list(checks.binary_problems(read, "x86_64", glibc=(2, 17))) == []
    assert list(checks.binary_problems(read, "x86_64", glibc=(2, 16))) == ["needs glibc 2.17, the tag promises 2.16"]


@pytest.mark.parametrize(("library", "version"), [("libstdc++.so.6", "GLIBC_2.17"), ("libc.so.6", "CXXABI_1.3")])
def test_a_binary_that_needs_more_than_glibc_is_rejected(library: str, version: str) -> None:
    read = Binary("EM_X86_64", frozenset([library]), (), frozenset([version]), frozenset())
    assert len(list(checks.binary_problems(read, "x86_64"))) == 1


def compiles(source: str) -> bool:
    words = ["cc", "-std=c11", "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(words, input=source.encode(), capture_output=True, timeout=60, check=False)
    return done.returncode == 0


@needs_cc
def test_the_sizes_in_this_python_s_headers_are_right_for_this_machine() -> None:
    header = Path(sysconfig.get_config_h_filename())
    if not header.is_file():
        pytest.skip("this Python has no headers")
    source = build.size_assertions(header.read_text(encoding="utf-8"))
    assert source.count("_Static_assert") > 15
    assert compiles(source)


@needs_cc
@pytest.mark.parametrize("line", ["SIZEOF_VOID_P 4", "SIZEOF_LONG 4", "SIZEOF_WCHAR_T 2", "ALIGNOF_LONG 4"])
def test_headers_of_another_data_model_are_rejected(line: str) -> None:
    assert not compiles(build.size_assertions(f"#define {line}\n"))


# ---------------------------------------------------------------------------------------------- smoke test, report


def test_the_smoke_test_exchanges_every_record_between_two_processes() -> None:
    report = json.loads(build.run([sys.executable, checks.SCRIPT, "500"]))
    assert (report["records"], report["machine"]) == (500, platform.machine())
    assert report["core"] == report["codec"]


def test_a_problem_is_in_the_table_and_in_the_exit_status() -> None:
    good = command.WheelReport("a.whl", "3.12.1", checks={"contents": "ok", "smoke test": "no AArch64 Python"})
    bad = command.WheelReport(
        "b.whl", "3.12.1", checks={"contents": "FAILED"}, problems=("contents: py.typed is missing",)
    )
    assert (command.exit_status([good]), command.exit_status([good, bad]), command.exit_status([])) == (0, 1, 1)
    report = "\n".join(command.table_lines([good, bad]))
    assert re.search(r"^b\.whl +0 +FAILED +-", report, re.MULTILINE)
    assert report.endswith("\nb.whl: contents: py.typed is missing")


def test_the_error_for_missing_tools_has_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REQUIRED_MODULES", ("missing_ziglang",))
    assert command.main([]) == 1
    assert "missing_ziglang cannot be imported; to install: pip install '.[wheels]'" in capsys.readouterr().err


def test_a_wheel_for_aarch64_is_built_and_has_no_problems(tmp_path: Path) -> None:
    _skip_without_build_tools()
    python = Python(sys.version_info[:3], Path(sys.executable))
    target = Target(python, "aarch64")
    tree = build.export(tmp_path / "tree")
    (tmp_path / "out").mkdir()
    wheel = build.build(target, python.path, tree, tmp_path / "cache", tmp_path / "out")
    assert checks.content_problems(wheel, target, build.package_files()) == []
    modules = checks.in_wheel(wheel)
    cores = [
        "base/_sha256",
        "client/model/_copies",
        "engines/compiled/_pool",
        "observe/_recorder",
        "queue/_core",
        "serialize/_codec",
    ]
    assert sorted(modules) == [f"nnfmq/{core}" for core in cores]
    assert [problem for module in modules.values() for problem in checks.binary_problems(module, "aarch64")] == []


def _skip_without_build_tools() -> None:
    for name in ("ziglang", "Cython"):
        pytest.importorskip(name, reason="building needs the extras `wheels` and `dev`")
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer")
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git repository: there is no HEAD to build")
