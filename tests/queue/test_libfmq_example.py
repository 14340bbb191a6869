"""docs/c's example for libfmq: this process attaches to the memory that it makes, by the descriptor that it states.

libfmq itself is not here: the example is compiled with declarations of what it uses (libfmq_declarations).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.places import ROOT

from nnfmq.queue import MessageQueue

HERE = ROOT / "tests" / "queue"
LIMIT_S = 60


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("no compiler for C++ (c++)")
    made = tmp_path_factory.mktemp("libfmq") / "example"
    folders = [f"-I{ROOT / 'docs' / 'c'}", f"-I{HERE / 'libfmq_declarations'}"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", *folders]
    command = ["c++", *flags, str(HERE / "libfmq_example.cpp"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("count", [1, 64, 1024])
def test_nnfmq_attaches_to_the_queue_of_the_example(program: Path, count: int) -> None:
    with subprocess.Popen([program, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        descriptor, (number, resets) = process.stdout.readline().strip(), process.stdout.readline().split()
        fd = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        with MessageQueue.adopt([fd], descriptor, quantum=24) as queue, MessageQueue.create(24, count) as own:
            assert (queue.to_json(), resets) == (own.to_json(), "0")
            assert queue.send(bytes(range(24)))
            assert queue.receive(0, 0) == bytes(range(24))
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
