"""Importers leave no cycles of references, which would keep the content of a file until the next garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.onnx_files import OnnxCase
from support.stateful_models import stream
from support.tflite_files import Operator, Tensor, writer

from nnfmq.importers import example_path, load
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.tflite.file import TfliteFile

X = Tensor("x", (2, 3))


def branching() -> bytes:
    """Return a file whose IF calls one subgraph for both conditions."""
    y = Tensor("y", (2, 3))
    callee = writer.Subgraph([X, y], [Operator("ABS", (0,), (1,))], (0,), (1,))
    options = {"ThenSubgraphIndex": 1, "ElseSubgraphIndex": 1}
    operator = Operator("IF", (0, 1), (2,), "IfOptions", options)
    content: bytes = writer.write([Tensor("c", (), "BOOL"), X, y], [operator], (0, 1), (2,), more=[callee])
    return content


FILES: dict[str, Callable[[], bytes]] = {
    "digits": lambda: Path(example_path("digits.tflite")).read_bytes(),
    "states": stream,
    "subgraphs": branching,
    "onnx": lambda: OnnxCase("Add", [np.zeros(2, np.float32)] * 2).content(),
}


@pytest.mark.parametrize("name", FILES)
def test_nothing_keeps_the_content_of_a_loaded_file(name: str) -> None:
    content = FILES[name]()
    load(content)
    gc.collect()
    gc.disable()
    try:
        loaded = load(content)
        left = [type(found).__name__ for found in gc.get_objects() if isinstance(found, (GraphBuilder, TfliteFile))]
    finally:
        gc.enable()
    assert left == []
    assert loaded.inputs
