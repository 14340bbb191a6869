"""Libraries of custom operators whose operator fails as its input says, and models with it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.hosted_files import HERE
from support.onnx_runtime import onnx

DOMAIN = "faulty"


class Fault(IntEnum):
    """What the operator does if it is the first value of its input; otherwise it adds 1 to four floats."""

    ABORT = 1001
    NULL_POINTER = 1002
    ENDLESS = 1003
    UNCHECKED_10_GIB = 1004
    CHECKED_10_GIB = 1005
    STATUS = 1006


def build_library(path: Path, *, writes: Path | None = None) -> Path:
    """Compile the library for ONNX Runtime to `path`; if it is loaded, it writes the file `writes`. Return `path`.

    Skips the test where there is no C compiler.
    """
    return _build("cc", "faults_onnxruntime.c", path, ["-Wno-unused-parameter"], writes)


def build_extension(path: Path) -> Path:
    """Compile the extension of OpenVINO to `path`, with the headers of its package, and return `path`.

    Skips the test where there is no C++ compiler.
    """
    found = find_spec("openvino")
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    (library,) = (package / "libs").glob("libopenvino.so.*")
    options = ["-std=c++17", f"-I{package / 'include'}", f"-L{library.parent}", f"-l:{library.name}"]
    return _build("c++", "faults_openvino.cpp", path, options, None)


def _build(compiler: str, source: str, path: Path, options: list[str], writes: Path | None) -> Path:
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"there is no {compiler}")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", *([f'-DWRITES="{writes}"'] if writes else [])]
    subprocess.run([found, *flags, HERE / source, *options, "-o", path], check=True)
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, as the driver's configuration lists it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def custom_model() -> bytes:
    """Return an ONNX file with the operator, from four floats `x` to four floats `y`."""
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Faulty", ["x"], ["y"], domain=DOMAIN)], "g", [x], [y])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    content: bytes = helper.make_model(graph, ir_version=8, opset_imports=opsets).SerializeToString()
    return content


def custom_openvino_model() -> bytes:
    """Return an OpenVINO file with the operator, from four floats `x` to four floats `y`."""
    port = '<port id="{}" precision="FP32" names="{}"><dim>4</dim></port>'
    x, y, taken = port.format(1, "x"), port.format(1, "y"), port.format(0, "")
    return f"""<net name="custom" version="11"><layers>
        <layer id="0" name="x" type="Parameter" version="opset1">
            <data shape="4" element_type="f32"/><output>{x}</output>
        </layer>
        <layer id="1" name="y" type="Faulty" version="{DOMAIN}"><input>{taken}</input><output>{y}</output></layer>
        <layer id="2" name="result" type="Result" version="opset1"><input>{taken}</input></layer>
    </layers><edges>
        <edge from-layer="0" from-port="1" to-layer="1" to-port="0"/>
        <edge from-layer="1" from-port="1" to-layer="2" to-port="0"/>
    </edges></net>""".encode()
