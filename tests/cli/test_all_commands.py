"""Every command and subcommand has what a command must have; a failure names what a new one lacks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from support.places import ROOT

from nnfmq import cli
from nnfmq.cli import command_tree
from nnfmq.cli.command_tree import CommandHelp, ValueType

WIDTH = 80
TREE = command_tree.command_tree()
NODES = {node.name: node for node in command_tree.nodes(TREE)}
each_node = pytest.mark.parametrize("node", NODES.values(), ids=NODES)
each_command = pytest.mark.parametrize("name", cli.COMMANDS)


@each_node
def test_it_has_a_summary_without_capital_and_full_stop(node: CommandHelp) -> None:
    if node is not TREE:
        assert node.summary, f"give {node.name} a help text (COMMANDS, or add_parser's `help`)"
        assert re.fullmatch(r"[a-z].*[^.]", node.summary), f"{node.name}: {node.summary!r}"
    assert node.description, f"give {node.name} a description"


@each_node
def test_each_option_and_argument_has_a_help_text(node: CommandHelp) -> None:
    without = [argument.title for argument in (*node.options, *node.arguments) if not argument.help]
    assert without == [], f"{node.name}: give these a `help`"


@each_node
def test_its_help_has_examples_that_its_parser_accepts(node: CommandHelp) -> None:
    assert node.examples.startswith("examples:\n"), f"give {node.name} an epilog that begins with 'examples:'"
    examples = re.findall(r"^  (?:\w+=\S+ )?nnfmq (.*)$", node.examples, re.MULTILINE)
    assert examples, f"{node.name}: no line of the examples is indented by two spaces and begins with `nnfmq`"
    for example in examples:
        words = shlex.split(re.split(r"\s#|\s[<>|]", example)[0])
        assert is_accepted(words), f"{node.name}: its parser rejects the example `nnfmq {example}`"


def is_accepted(words: list[str]) -> bool:
    position = cli._command_position(words)
    try:
        cli.main_parser().parse_args(words[: position + 1])
        cli.command_parser(words[position]).parse_args(words[position + 1 :])
    except SystemExit as ended:
        return ended.code == 0  # --help
    return True


@each_command
def test_no_error_about_a_value_names_a_type_of_python(name: str) -> None:
    """As "invalid int value" does. A function says what is allowed."""
    parser = cli.command_parser(name)
    actions = [action for each in parser._parsers() for action in each._actions]  # type: ignore[attr-defined]
    assert [action.dest for action in actions if action.type in (int, float)] == []


@each_node
@pytest.mark.parametrize("columns", [80, 40])
def test_no_line_of_its_help_is_wider_than_the_terminal_but_examples(
    node: CommandHelp, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main([*node.words[1:], "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = {line.partition("  # ")[0].rstrip() for line in node.examples.splitlines() if line.startswith(" ")}
    too_wide = [line for line in lines if len(line) > columns and line not in examples]
    assert too_wide == [], f"{node.name}: shorten these, or the words in them"


@each_command
def test_its_summary_fits_a_line_of_the_list(name: str) -> None:
    width = max(map(len, cli.COMMANDS))
    indent = len("  ") + width + len("  ")
    assert indent + len(cli.COMMANDS[name]) <= WIDTH - 2, f"shorten the summary of {name} in COMMANDS"


@each_command
def test_it_has_a_page_in_the_reference(name: str) -> None:
    page = ROOT / "docs" / "reference" / "cli" / f"{name}.md"
    assert page.is_file(), f"write docs/reference/cli/{name}.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# `nnfmq {name}`\n")
    assert f"```{{cli}} {name}\n```" in text, f"docs/reference/cli/{name}.md lacks the directive {{cli}}"
    index = (page.parent / "index.md").read_text(encoding="utf-8")
    assert f"\n{name}\n" in index, f"list {name} in docs/reference/cli/index.md"


def test_the_reference_has_the_exit_statuses() -> None:
    text = (ROOT / "docs" / "reference" / "cli" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(str(status), meaning) for status, meaning in cli.EXIT_STATUSES.items()]


def test_help_has_the_exit_statuses() -> None:
    for status, meaning in cli.EXIT_STATUSES.items():
        assert f"{status} {meaning.split(';')[0]}" in TREE.examples


def test_parsers_import_nothing_that_has_to_be_installed() -> None:
    """The build of a wheel generates man pages from them, without any dependency."""
    code = (
        "import sys; from nnfmq.cli import command_tree; command_tree.command_tree(); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) <= {"nnfmq", "__main__"}


def test_the_value_of_an_option_is_completed_by_its_metavar() -> None:
    def value(command: str, flag: str) -> tuple[ValueType, tuple[str, ...]]:
        (found,) = (option for option in NODES[command].options if flag in option.flags)
        return found.value, found.words

    assert value("nnfmq run", "--labels") == (ValueType.FILE, ())
    assert value("nnfmq run", "--connect") == (ValueType.FILE, ("embedded",))
    assert value("nnfmq run", "--top") == (ValueType.OTHER, ())
    assert value("nnfmq run", "--json") == (ValueType.NONE, ())
    assert value("nnfmq profile", "--sort") == (ValueType.WORDS, ("order", "time"))
    assert value("nnfmq conformance", "--dump") == (ValueType.FOLDER, ())
    assert value("nnfmq conformance", "--classes") == (ValueType.OTHER, ())
    assert NODES["nnfmq run"].arguments[0].value is ValueType.FILE
