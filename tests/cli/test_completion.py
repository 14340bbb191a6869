"""`nnfmq completion`: real shells complete every command, option and value of the parsers."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import shells
from support.shells import Terminal

from nnfmq import cli
from nnfmq.cli import completion, main

BASH_QUERY = """
compopt() { printf 'compopt %s\\n' "$2"; }
query() {
    COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _nnfmq
    printf 'word %s\\n' "${COMPREPLY[@]}"
    echo end
}
"""


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def parsers() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield the words and the parser of every command and subcommand."""
    yield ("nnfmq",), cli.main_parser()
    for name in cli.COMMANDS:
        yield from below(("nnfmq", name), cli.command_parser(name))


def below(
    words: tuple[str, ...], parser: argparse.ArgumentParser
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for name, inner in subparsers(parser).items():
        yield from below((*words, name), inner)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def flags(parser: argparse.ArgumentParser) -> set[str]:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {flag for action in shown for flag in action.option_strings}


def commands(words: tuple[str, ...], parser: argparse.ArgumentParser) -> set[str]:
    return set(cli.COMMANDS) if words == ("nnfmq",) else set(subparsers(parser))


PARSERS = dict(parsers())


def script_file(shell: str, folder: Path) -> Path:
    """Write the completion script of `shell` to a file; return its path."""
    path = folder / f"nnfmq.{shell}"
    path.write_text(completion.script(shell), encoding="utf-8")
    return path


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_command_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == completion.script(shell)


def test_an_unknown_shell_is_wrong_usage_that_lists_the_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh' (choose from bash, zsh, fish)" in capsys.readouterr().err


# ---- bash ----


def bash(folder: Path, *queries: tuple[str, ...]) -> list[tuple[set[str], str]]:
    """Return for each line of words what bash offers for the last of them, and the option given to compopt."""
    lines = [f"query {shlex.join(query)}" for query in queries]
    code = "\n".join([f"source {script_file('bash', folder)}", BASH_QUERY, *lines])
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=folder
    )
    assert done.stderr == ""
    return [bash_reply(block.splitlines()) for block in done.stdout.split("end\n")[:-1]]


def bash_reply(lines: list[str]) -> tuple[set[str], str]:
    offered = {line.removeprefix("word ") for line in lines if line.startswith("word ")}
    options = [line.removeprefix("compopt ") for line in lines if line.startswith("compopt ")]
    return offered - {""}, "".join(options)


@needs("bash")
def test_bash_offers_the_options_and_the_subcommands_of_every_command(tmp_path: Path) -> None:
    options = bash(tmp_path, *((*words, "-") for words in PARSERS))
    words_after = bash(tmp_path, *((*words, "") for words in PARSERS))
    for (words, parser), (offered, _), (following, _) in zip(PARSERS.items(), options, words_after, strict=True):
        assert offered == flags(parser), words
        assert following >= commands(words, parser), words


@needs("bash")
@pytest.mark.parametrize(
    ("words", "offered", "option"),
    [
        (("nnfmq", "ru"), {"run"}, ""),
        (("nnfmq", "completion", ""), {"bash", "zsh", "fish"}, ""),
        (("nnfmq", "profile", "--sort", ""), {"order", "time"}, ""),
        (("nnfmq", "profile", "--sort", "=", "t"), {"time"}, ""),
        (("nnfmq", "profile", "--sort", "="), {"order", "time"}, ""),
        (("nnfmq", "run", "--connect", ""), {"embedded"}, "default"),
        (("nnfmq", "run", "--labels", ""), set(), "default"),
        (("nnfmq", "run", ""), set(), "default"),
        (("nnfmq", "conformance", "--dump", ""), set(), "dirnames"),
        (("nnfmq", "run", "--top", ""), set(), ""),
        (("nnfmq", "--config", "run", "doct"), {"doctor"}, ""),
        (("nnfmq", "--config", "=", "run", "doct"), {"doctor"}, ""),
        (("nnfmq", "run", "--labels", "queue", "--to"), {"--top"}, ""),
    ],
)
def test_bash_completes_values(tmp_path: Path, words: tuple[str, ...], offered: set[str], option: str) -> None:
    assert bash(tmp_path, words) == [(offered, option)]


@needs("bash")
def test_bash_completes_at_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "mobile net.tflite").touch()
    start = f"PS1='> '; source {script_file('bash', tmp_path)}"
    with shells.shell(["bash", "--norc", "--noprofile", "-i"], start, tmp_path) as terminal:
        assert_completes(terminal, "nnfmq que\t", "nnfmq queue ")
        assert_completes(terminal, "nnfmq conformance --path=inter\t", "--path=interpreter")
        assert_completes(terminal, "nnfmq run mob\t", "mobile\\ net.tflite")
        terminal.type("nnfmq queue re\t\t")
        terminal.read_until("read", "remove")


def assert_completes(terminal: Terminal, typed: str, expected: str) -> None:
    terminal.type(typed)
    terminal.read_until(expected)
    terminal.type("\x15")  # Ctrl-U: delete the line


# ---- zsh ----


@pytest.fixture
def zsh(tmp_path: Path) -> Iterator[Terminal]:
    """An interactive zsh with the script."""
    (tmp_path / "mobilenet.tflite").touch()
    start = f"PS1='> '; autoload -U compinit; compinit -u -D; source {script_file('zsh', tmp_path)}"
    with shells.shell(["zsh", "-f", "-i"], start, tmp_path) as terminal:
        yield terminal


@needs("zsh")
def test_zsh_completes_commands_options_and_values(zsh: Terminal) -> None:
    assert_completes(zsh, "nnfmq que\t", "nnfmq queue")
    assert_completes(zsh, "nnfmq queue rea\t", "nnfmq queue read")
    assert_completes(zsh, "nnfmq --config x.toml dem\t", "demo")
    assert_completes(zsh, "nnfmq demo --quant\t", "--quantized")
    assert_completes(zsh, "nnfmq profile --sort ti\t", "--sort time")
    assert_completes(zsh, "nnfmq profile --sort=ti\t", "--sort=time")
    assert_completes(zsh, "nnfmq run mob\t", "mobilenet.tflite")
    assert_completes(zsh, "nnfmq run --labels mob\t", "--labels mobilenet.tflite")
    assert_completes(zsh, "nnfmq devices --connect emb\t", "embedded")


@needs("zsh")
def test_zsh_lists_commands_with_their_summaries(zsh: Terminal) -> None:
    zsh.type("nnfmq \t")
    zsh.read_until(*(f"-- {summary}" for summary in cli.COMMANDS.values()))


@needs("zsh")
@pytest.mark.parametrize("words", PARSERS, ids=" ".join)
def test_zsh_lists_the_options_of_every_command(zsh: Terminal, words: tuple[str, ...]) -> None:
    zsh.type(f"{' '.join(words)} --\t")
    zsh.read_until(*(flag for flag in flags(PARSERS[words]) if flag.startswith("--")))


@needs("zsh")
def test_zsh_can_load_the_script_from_its_path(tmp_path: Path) -> None:
    script_file("zsh", tmp_path).rename(tmp_path / "_nnfmq")
    start = f"PS1='> '; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D"
    with shells.shell(["zsh", "-f", "-i"], start, tmp_path) as terminal:
        assert_completes(terminal, "nnfmq que\t", "nnfmq queue")


# ---- fish ----


def fish(folder: Path, *lines: str) -> list[set[str]]:
    """Return the words that fish offers for each line."""
    queries = "; ".join(f"complete -C {shlex.quote(line)}; echo '<end>'" for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {script_file('fish', folder)}; {queries}"],
        capture_output=True, text=True, timeout=60, check=True, cwd=folder,
    )  # fmt: skip
    assert done.stderr == ""
    blocks = done.stdout.split("<end>\n")[:-1]
    return [{line.partition("\t")[0] for line in block.splitlines()} for block in blocks]


@needs("fish")
def test_fish_offers_the_options_and_the_subcommands_of_every_command(tmp_path: Path) -> None:
    options = fish(tmp_path, *(f"{' '.join(words)} -" for words in PARSERS))
    words_after = fish(tmp_path, *(f"{' '.join(words)} " for words in PARSERS))
    for (words, parser), offered, following in zip(PARSERS.items(), options, words_after, strict=True):
        assert offered == flags(parser), words
        assert following >= commands(words, parser), words


@needs("fish")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("nnfmq profile --sort ", {"order", "time"}),
        ("nnfmq profile --sort=t", {"--sort=time"}),
        ("nnfmq completion ", {"bash", "zsh", "fish"}),
        ("nnfmq run m", {"mobilenet.tflite"}),
        ("nnfmq run --labels m", {"mobilenet.tflite"}),
        ("nnfmq devices --connect emb", {"embedded"}),
        ("nnfmq conformance --dump f", {"folder/"}),
        ("nnfmq run --top m", set()),
        ("nnfmq --config run doct", {"doctor"}),
    ],
)
def test_fish_completes_values(tmp_path: Path, line: str, offered: set[str]) -> None:
    (tmp_path / "mobilenet.tflite").touch()
    (tmp_path / "folder").mkdir()
    assert fish(tmp_path, line) == [offered]
