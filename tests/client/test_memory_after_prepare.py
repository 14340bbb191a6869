"""What a client keeps of a large file's preparation: the model itself, and no memory that was freed meanwhile."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.drivers import running_daemon, short_folder

MIB = 1 << 20
SIDE = 2048
PREPARES = """
import os, sys
import nnfmq
from nnfmq.engines.memory import trim_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

bytes(30_000_000)  # free() keeps up to twice as much at the end of the heap from now on
with nnfmq.connect(sys.argv[1]) as client, client.device("reference").prepare(nnfmq.load(sys.argv[2])):
    before = resident()
    trim_memory()
    print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns freed memory on request")
def test_a_client_returns_what_a_large_file_has_freed_to_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "large.onnx"
    weights = numpy_helper.from_array(np.ones((SIDE, SIDE), np.float32), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, SIDE])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [SIDE, SIDE])
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "g", [x], [y], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    with short_folder() as folder, running_daemon(folder / "d.sock") as daemon:
        command = [sys.executable, "-c", PREPARES, daemon.path, file]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(output) < 2 * MIB  # the weights have 16 MiB
