"""What the process that imports a version may not do, and the memory that it may take."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import data_path

from nnfmq.base import settings
from nnfmq.base.processes import child_environment
from nnfmq.base.sandbox.sandbox import missing_parts
from nnfmq.hal.errors import ResourceExhaustedTransient
from nnfmq.repository.version_import import import_in_process

GIB = 1 << 30
PROBE = """
import json, os, socket, sys
from pathlib import Path
from nnfmq.base.sandbox.sandbox import enter
from nnfmq.repository.version_import import _sandbox

folder, secret = map(Path, sys.argv[1:3])
enter(_sandbox(folder, None))
def unix():
    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
acts = {
    "its version": lambda: (folder / "model.toml").read_bytes(),
    "what a link names": lambda: (folder / "model.tflite").read_bytes(),
    "a home file": secret.read_bytes,
    "a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "a unix socket": unix,
    "a file": lambda: (folder / "new").write_bytes(b""),
    "a process": os.fork,
    "a program": lambda: os.execv("/bin/true", ["true"]),
}
found = {}
for name, act in acts.items():
    try:
        act()
        found[name] = "done"
    except PermissionError:
        found[name] = "refused"
print(json.dumps(found))
"""


@pytest.mark.skipif(bool(missing_parts()), reason="this kernel lacks a part of the sandbox")
def test_an_import_reads_its_version_and_does_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "model.toml").touch()
    (tmp_path / "elsewhere").touch()
    (folder / "model.tflite").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "secret").touch()
    command = [sys.executable, "-P", "-c", PROBE, str(folder), str(tmp_path / "secret")]
    done = subprocess.run(command, check=True, capture_output=True, env=child_environment())
    found = json.loads(done.stdout)
    allowed = {"its version", "what a link names"}
    assert found == {name: "done" if name in allowed else "refused" for name in found}
    assert len(found) == 8


def test_a_file_that_is_larger_than_the_limit_fails_without_taking_its_size(tmp_path: Path) -> None:
    with open(tmp_path / "model.tflite", "wb") as file:
        os.ftruncate(file.fileno(), 3 * GIB)  # sparse: it takes nothing on the disk
    with pytest.raises(ResourceExhaustedTransient, match=r"needs more than 1024 MiB, which \$NNFMQ_IMPORT_MEMORY_MIB"):
        import_in_process(tmp_path)


def test_the_limit_is_a_setting(tmp_path: Path) -> None:
    shutil.copy(data_path() / "models" / "mobilenet_v2_1.0_224_quant.tflite", tmp_path / "model.tflite")
    import_in_process(tmp_path).close()
    with (
        settings.IMPORT_MEMORY_MIB.exported("2"),
        pytest.raises(ResourceExhaustedTransient, match="needs more than 2 MiB"),
    ):
        import_in_process(tmp_path)
