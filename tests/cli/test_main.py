"""The front: what is parsed, what is printed where, which exit status."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

import pytest

from nnfmq import cli
from nnfmq.cli import devices, main
from nnfmq.hal.errors import InvalidArgument, MissedDeadlineTransient

SCREEN_LINES = 38  # of 40, with the command and the next prompt


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def execute(arguments: Namespace) -> int:
        raise error

    monkeypatch.setattr(devices, "execute", execute)


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join)
def test_help_fits_one_screen_and_has_examples(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert len(text.splitlines()) <= SCREEN_LINES


def test_help_after_suite_has_its_options_and_fits_one_screen_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--suite", "--help"]) == 0
    suite = capsys.readouterr().out
    assert main(["stress", "--help"]) == 0
    other = capsys.readouterr().out
    assert ("  --thresholds" in suite, "  --load" in suite) == (True, False)
    assert ("  --thresholds" in other, "  --load" in other) == (False, True)
    assert "--suite" in other
    assert len(suite.splitlines()) <= SCREEN_LINES


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["devices", "--fly"],
        ["run", "model.tflite"],
        ["--fly", "devices"],
        ["--config"],
        ["--config", "x.toml"],
    ],
)
def test_wrong_usage_is_status_2_and_reported_on_stderr(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: nnfmq" in printed.err


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version_is_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out.startswith("nnfmq")


def test_an_nnfmq_error_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, InvalidArgument("operand 3\nis no operand"))
    assert main(["devices"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "nnfmq: error: operand 3 is no operand\n"
    assert printed.out == ""


def test_a_system_error_names_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, FileNotFoundError(2, "No such file or directory", "model.tflite"))
    assert main(["devices"]) == 1
    assert capsys.readouterr().err == "nnfmq: error: model.tflite: No such file or directory\n"


def test_an_nnfmq_error_that_is_also_an_os_error_keeps_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, MissedDeadlineTransient("no reply within 2 s"))
    assert main(["devices"]) == 1
    assert capsys.readouterr().err == "nnfmq: error: no reply within 2 s\n"


def test_control_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["devices"]) == 130


@pytest.mark.parametrize("bug", [ZeroDivisionError("oops"), ImportError("no module")])
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    failing(monkeypatch, bug)
    with pytest.raises(type(bug)):
        main(["devices"])


def test_a_required_core_that_is_not_built_is_an_nnfmq_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NNFMQ_CORE", "compiled")
    failing(monkeypatch, ImportError("NNFMQ_CORE=compiled, but it is not built"))
    assert main(["devices"]) == 1
    assert capsys.readouterr().err == "nnfmq: error: NNFMQ_CORE=compiled, but it is not built\n"


def test_no_color_is_accepted_before_and_after_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(devices, "execute", lambda arguments: seen.append(arguments.no_color) or 0)
    statuses = [main(["--no-color", "devices"]), main(["devices", "--no-color"]), main(["devices"])]
    assert (statuses, seen) == ([0, 0, 0], [True, True, False])


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from nnfmq.cli import main; main(['--help']); "
        "print(*{'rich', 'PIL', 'tflite', 'multiprocess', 'nnfmq.cli.run'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr.strip() == ""


def test_a_closed_output_pipe_prints_no_traceback() -> None:
    command = f"{sys.executable} -m nnfmq doctor --json | true"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""


def test_python_m_nnfmq_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nnfmq", "fly"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "invalid choice: 'fly'" in done.stderr
