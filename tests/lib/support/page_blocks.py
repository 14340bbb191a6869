"""The code blocks of a page of the documentation, and how they run: in a folder, which is also the home directory.

A comment before a block says what is special about it:

- `<!-- not run: REASON -->`: the block is left out.
- `<!-- ci: NAME -->`: CI runs it elsewhere.
- `<!-- deep: REASON -->`: it runs in the deep tier.
- `<!-- until stopped: TEXT -->`: the command runs beside the page's other blocks once its output has TEXT, and gets
  Ctrl-C at the end.

A Python block whose first line is `# NAME.py` is that file, which other blocks use. What a line would install with pip
is in the environment already, or is an example, which is put on the path; lines that make a virtual environment are
left out.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from support import tiers
from support.drivers import until
from support.places import ROOT
from support.plugins import add_example

EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
LIMIT_S = 600 if tiers.IS_DEEP else 120
_SHORTER = {
    r"(nnfmq bench .*--duration) 1\b": r"\1 0.2 --warm-up 20",
    r"(--duration) 1\b": r"\1 0.2",
    r"\bseconds=1\b": "seconds=0.2, warm_up=20",
    r"(--baseline \S+)": r"\1 --tolerance 1000000",
}
"""Measurements of a second, which begin when the latency is stable: late on a busy machine. On such a machine two of
them differ, too."""
PORTS = ("8000", "8001", "8002", "8003", "9464")  # of servers on pages; a test uses free ones instead

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|ci|deep|until stopped): (?P<text>[^\n]+?) -->\n)?"
    r"^```(?P<language>[\w-]+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"# (\w+\.py)\n")


class Block(NamedTuple):
    """A code block: its comment ("not run", "ci", "deep", "until stopped" or "") and the comment's text."""

    language: str
    code: str
    mark: str
    text: str

    @property
    def file(self) -> str:
        """The name of the file that a Python block is, or an empty string."""
        match = _FILE.match(self.code) if self.language == "python" else None
        return match[1] if match else ""


def blocks(page: Path) -> list[Block]:
    """Return all code blocks of a page in their order."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(match["language"], match["code"], match["mark"] or "", match["text"] or "") for match in found]


def run_blocks(found: list[Block]) -> list[Block]:
    """Return those of the blocks that run in this tier."""
    left_out = ("not run", "ci") if tiers.IS_DEEP else ("not run", "ci", "deep")
    return [block for block in found if block.language in ("sh", "python") and block.mark not in left_out]


class PageFolder:
    """The folder in which the blocks of a page run: no driver runs in it, and no settings exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.site = path / "site"
        self.socket = path / "nnfmq.sock"
        self._ports = {port: str(free_port()) for port in PORTS}

    def environment(self) -> dict[str, str]:
        """Return the environment of the page's commands."""
        return {
            **{name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},  # files import others
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH")])),
            "HOME": str(self.path),
            "NNFMQ_SOCKET": str(self.socket),
            "NO_COLOR": "1",
        }

    def adapted(self, code: str) -> str:
        """Return code with free ports and shorter measurements, and without what installs; examples go to `site`."""
        for pattern, replacement in _SHORTER.items():
            code = re.sub(pattern, replacement, code)
        for port, free in self._ports.items():
            code = re.sub(rf"\b{port}\b", free, code)
        lines = []
        for line in code.splitlines():
            if "pip install" in line:
                self._install(shlex.split(line, comments=True))
            elif "-m venv" not in line and ".venv/bin/activate" not in line:
                lines.append(line)
        return "\n".join(lines) + "\n" if lines else ""

    def _install(self, words: list[str]) -> None:
        for word in words:
            if word.startswith("docs/examples/"):
                self.site.mkdir(exist_ok=True)
                add_example(self.site, ROOT / word)

    def write_files(self, found: list[Block]) -> None:
        """Write the Python blocks that are files."""
        for block in found:
            if block.file:
                (self.path / block.file).write_text(self.adapted(block.code), encoding="utf-8")

    def run(self, command: list[str]) -> None:
        """Run a command, which must succeed."""
        done = subprocess.run(
            command,
            cwd=self.path,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def run_commands(self, code: str) -> None:
        """Run commands of a shell; the first that fails ends them."""
        if commands := self.adapted(code):
            self.run(["bash", "-euo", "pipefail", "-c", commands])

    def run_script(self, code: str) -> None:
        """Run Python, whose warnings are errors."""
        script = self.path / "page.py"
        script.write_text(self.adapted(code), encoding="utf-8")
        self.run([sys.executable, "-W", "error", str(script)])

    @contextmanager
    def running(self, command: str, ready: str) -> Iterator[None]:
        """Run a command beside the block once its output has the text `ready`; Ctrl-C must end it without an error."""
        output = self.path / "until-stopped.txt"
        with output.open("w+b") as log, output.open(encoding="utf-8") as written:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.adapted(command)}"],
                cwd=self.path,
                env={**self.environment(), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                wait_for_output(process, lambda: ready in read_all(written), command)
                yield
                os.killpg(process.pid, signal.SIGINT)
                status = process.wait(LIMIT_S)
                until(lambda: not has_processes(process.pid), "what the command has started ends, too")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert (status, "Traceback" in read_all(written)) == (0, False), f"{command}: {status}, {read_all(written)}"


def has_processes(group: int) -> bool:
    """Return whether a process group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def read_all(file: IO[str]) -> str:
    """Return the whole content of a text file."""
    file.seek(0)
    return file.read()


def wait_for_output(process: subprocess.Popen[bytes], has_output: Callable[[], bool], command: str) -> None:
    """Wait until a process has written what it writes when it is ready."""
    until(lambda: has_output() or process.poll() is not None, f"{command} is ready")
    assert has_output(), f"{command}: exit status {process.poll()}"


def run_page(folder: PageFolder, found: list[Block]) -> None:
    """Run the blocks of a page in their order; its Python is one script, which runs where the last of it is."""
    folder.write_files(found)
    scripts = [block for block in found if block.language == "python" and not block.file]
    with ExitStack() as stack:
        for block in found:
            if block.mark == "until stopped":
                stack.enter_context(folder.running(block.code, block.text))
            elif block.language == "sh":
                folder.run_commands(block.code)
            elif scripts and block is scripts[-1]:
                folder.run_script("\n".join(script.code for script in scripts))


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
