"""Plug-in packages as an installer leaves them, and models that use the one that the documents show.

A plug-in is a module and a dist-info with an entry point, in a folder that is put on a driver's path; pip would write
the same. The tests contain the expected results of FIBONACCI.
"""

from __future__ import annotations

import os
import struct
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nnfmq.hal.extensions import ExtensionCodes
from nnfmq.hal.types import EXTENSION_TYPES, Model, Operand, OperandType
from nnfmq.operations import REGISTRY, extensions
from nnfmq.operations.declaration import NUMPY_TYPES
from support.places import ROOT
from support.small_models import F32, one_operation

EXAMPLE = ROOT / "docs" / "examples" / "fibonacci"
NAME = "com.example.fibonacci"
QUANTIZED = struct.pack("<dq", 0.5, 10)  # real value = 0.5 * (code - 10)


def add_plugin(
    site: Path, module: str, source: str, entry_points: Mapping[str, str], group: str = "nnfmq.operations"
) -> None:
    """Install `module`, of that source, into the folder `site`, with entry points of a group."""
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def add_example(site: Path, example: Path) -> None:
    """Install an example of the documents with what its pyproject.toml says."""
    project = tomllib.loads((example / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["py-modules"]
    ((group, entry_points),) = project["project"]["entry-points"].items()
    add_plugin(site, module, (example / f"{module}.py").read_text(), entry_points, group)


def add_fibonacci(site: Path) -> None:
    """Install the operation that the documents show."""
    add_example(site, EXAMPLE)


def path_with(site: Path) -> dict[str, str]:
    """Return the environment of a driver that finds what is installed in `site`."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


def stopping_writer(condition: str) -> str:
    """Return the source of a sitecustomize: a process stops after the first byte of a file whose `path` meets that."""
    return f"""
import os, signal, threading
write = os.pwrite
def pwrite(fd, data, offset):
    path = os.readlink(f"/proc/self/fd/{{fd}}")
    if not ({condition}):
        return write(fd, data, offset)
    os.pwrite = write
    count = write(fd, data[:1], offset)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return count
os.pwrite = pwrite
"""


@contextmanager
def tables_as_they_were() -> Iterator[None]:
    """Let a block install extensions in this process; afterwards it knows those that it knew before."""
    tables: list[MutableMapping[Any, Any]] = [extensions.INSTALLED, EXTENSION_TYPES, NUMPY_TYPES, REGISTRY]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)


class Fibonacci:
    """Builds models of one FIBONACCI; `numbers` are the model's, so that a test may have its prefix first."""

    def __init__(self, numbers: ExtensionCodes | None = None) -> None:
        self.numbers = numbers or ExtensionCodes()

    @property
    def int64(self) -> OperandType:
        """Type 0: a scalar."""
        return self.numbers.operand_type(NAME, 0)

    def codes(self, dimensions: tuple[int, ...] = (0,), data: bytes = QUANTIZED) -> Operand:
        """Return an output of type 1."""
        return Operand(self.numbers.operand_type(NAME, 1), dimensions, extension_data=data)

    def model(self, n: Any = None, output: Operand | None = None, operation: int = 0) -> Model:
        """Return FIBONACCI(n) → output. By default n is an INT64 input, and the output codes of any number."""
        code = self.numbers.operation_type(NAME, operation)
        n = Operand(self.int64) if n is None else n
        model = one_operation(code, [n], self.codes() if output is None else output)
        return replace(model, extensions=self.numbers.extensions)

    def constant(self, n: int) -> tuple[Operand, bytes]:
        """Return an INT64 that is known when the model is prepared."""
        return Operand(self.int64), struct.pack("<q", n)


FLOAT_N = Operand(F32, (1,))
FLOATS = Operand(F32, (0,))
