"""`nnfmq completion`: print a script that completes commands, options and values in a shell.

The script is generated from the parsers of the commands, so it covers every command of this version. It contains all
words itself and starts no process when it completes.
"""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")

EXAMPLES = """\
examples:
  nnfmq completion bash > ~/.local/share/bash-completion/completions/nnfmq
  nnfmq completion zsh > ~/.zfunc/_nnfmq       # with fpath+=~/.zfunc before compinit
  nnfmq completion fish > ~/.config/fish/completions/nnfmq.fish
  source <(nnfmq completion bash)              # for this shell only

Generate it again after an update of nnfmq.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of `completion`."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"the shell: {', '.join(SHELLS)}")


def execute(arguments: argparse.Namespace) -> int:
    """Print the script; return the exit status."""
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the completion script for one of `SHELLS`."""
    from nnfmq.cli.command_tree import command_tree
    from nnfmq.cli.completion_scripts import bash_script, fish_script, zsh_script

    return {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[shell](command_tree())
