"""Small ONNX models of one node, and their results from nnfmq's interpreter and from ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.both_runners import ours
from support.onnx_runtime import onnx, runtime
from support.oracles import Array

IR_VERSION, OPSET = 8, 17


@dataclass(frozen=True, slots=True)
class OnnxCase:
    """One node. Arrays in `constants`, by position, are initializers; the other inputs are the model's."""

    operator: str
    inputs: Sequence[Array | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()
    outputs: int = 1
    opset: int = OPSET

    def __str__(self) -> str:
        shown = [f"{name}={value}" for name, value in self.attributes.items()]
        return f"{self.operator}-{self.opset} {' '.join(shown)}"[:60]

    def fed(self) -> dict[str, Array]:
        """Return the arrays of the model's inputs."""
        pairs = enumerate(self.inputs)
        return {
            f"x{place}": np.asarray(array)
            for place, array in pairs
            if array is not None and place not in self.constants
        }

    def content(self) -> bytes:
        """Return the model's file."""
        names = ["" if array is None else f"x{place}" for place, array in enumerate(self.inputs)]
        outputs = [f"y{place}" for place in range(self.outputs)]
        node = onnx.helper.make_node(self.operator, names, outputs, name="node", **self.attributes)
        return file_of([node], self.fed(), outputs, self._initializers(), self.opset)

    def _initializers(self) -> dict[str, Array]:
        arrays = {place: self.inputs[place] for place in self.constants}
        return {f"x{place}": array for place, array in arrays.items() if array is not None}


def file_of(
    nodes: Sequence[Any],
    inputs: Mapping[str, Array],
    outputs: Sequence[str] | Mapping[str, Array],
    constants: Mapping[str, Array] | None = None,
    opset: int = OPSET,
) -> bytes:
    """Return the file of a model with these nodes; `inputs` give the types and shapes of its inputs.

    `outputs` are names, or give these of the outputs, too.
    """
    helper = onnx.helper
    described = _described(inputs)
    if isinstance(outputs, Mapping):
        results = _described(outputs)
    else:
        results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    initializers = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "graph", described, results, initializers)
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(domain, 1) for domain in sorted({node.domain for node in nodes} - {""})]
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets)
    content: bytes = model.SerializeToString()
    return content


def _described(arrays: Mapping[str, Array]) -> list[Any]:
    kinds = onnx.helper.np_dtype_to_tensor_dtype
    return [onnx.helper.make_tensor_value_info(name, kinds(a.dtype), a.shape) for name, a in arrays.items()]


def results(content: bytes, fed: Mapping[str, Array]) -> list[Array]:
    """Return what nnfmq's interpreter computes."""
    return ours(content)([np.ascontiguousarray(array).reshape(array.shape) for array in fed.values()])


def expected(content: bytes, fed: Mapping[str, Array]) -> list[Array]:
    """Return what ONNX Runtime computes, without its optimizations."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, dict(fed))]


def assert_close(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    """Require equal integers and shapes, and floats within 1e-5 of the largest one."""
    assert len(found) == len(wanted)
    for ours_, theirs in zip(found, wanted, strict=True):
        assert ours_.shape == theirs.shape
        largest = float(np.abs(theirs.astype(float)).max()) if theirs.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(ours_.astype(float), theirs.astype(float), 0, 1e-5 * largest)
