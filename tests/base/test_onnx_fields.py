"""What an ONNX file refers to: compared with the package onnx, and with files that readers understand differently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnfmq.base.onnx_fields import (
    declared_shapes,
    external_files,
    require_files,
    with_external_data,
    without_initializers,
    without_output_shapes,
)
from nnfmq.hal.errors import InvalidArgument

message: Any = pytest.importorskip("google.protobuf.message", reason="protobuf is not installed")
onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed")
DATA = {"a.bin": np.arange(8, dtype=np.float32).tobytes(), "b.bin": np.arange(8, 16, dtype=np.float32).tobytes()}
FILES = {name: memoryview(data) for name, data in DATA.items()}


def external(name: str, location: str, **entries: int) -> Any:
    tensor = onnx.TensorProto(name=name, data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def graph(name: str, nodes: Sequence[Any], initializers: Sequence[Any] = (), sparse: Sequence[Any] = ()) -> Any:
    x, y = (onnx.helper.make_tensor_value_info(each, 1, shape) for each, shape in (("x", []), ("y", None)))
    return onnx.helper.make_graph(nodes, name, [x], [y], initializers, sparse_initializer=sparse)


def model() -> Any:
    """Return a model with tensors in other files wherever a model may have tensors."""
    deepest = graph("deepest", [], [external("w", "b.bin", offset=4, length=16)])
    inner = graph(
        "inner", [onnx.helper.make_node("If", ["c"], ["d"], then_branch=deepest)], [external("v", "a.bin", length=16)]
    )
    constant = onnx.helper.make_node("Constant", [], ["c"], value=external("", "a.bin", offset=16, length=16))
    custom = onnx.helper.make_node("Custom", ["c"], ["e"], tensors=[external("", "a.bin", length=16)], graphs=[inner])
    function = onnx.helper.make_function("f", "F", [], ["c"], [constant], [onnx.helper.make_opsetid("", 21)])
    plain = onnx.helper.make_tensor("p", 1, [2], [1, 2])
    sparse = onnx.SparseTensorProto(values=external("s", "b.bin", length=16), dims=[9])
    return onnx.helper.make_model(
        graph("main", [constant, custom], [external("u", "b.bin", offset=16), plain], [sparse]), functions=[function]
    )


def test_files_of_all_tensors_are_found_in_order() -> None:
    data = memoryview(model().SerializeToString())
    assert external_files(data) == ("a.bin", "b.bin")
    require_files(data, FILES)
    with pytest.raises(InvalidArgument, match=r"tensors in 'b\.bin', which is not one of the files given"):
        require_files(data, ["a.bin"])


def test_external_data_are_included_as_the_package_onnx_does(tmp_path: Path) -> None:
    for name, content in DATA.items():
        (tmp_path / name).write_bytes(content)
    expected = model()
    for tensor in onnx.external_data_helper._get_all_tensors(expected):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(tmp_path))
            tensor.ClearField("data_location")
            del tensor.external_data[:]
    found = onnx.load_model_from_string(bytes(with_external_data(memoryview(model().SerializeToString()), FILES)))
    unseen = [found.graph.sparse_initializer[0].values, found.functions[0].node[0].attribute[0].t]  # by that package
    assert [each.raw_data for each in unseen] == [DATA["b.bin"][:16], DATA["a.bin"][16:]]
    for each in (found, expected):
        del each.graph.sparse_initializer[:], each.functions[:]
    assert found == expected


def test_only_nested_tensors_are_included_if_asked() -> None:
    data = memoryview(model().SerializeToString())
    found = onnx.load_model_from_string(bytes(with_external_data(data, FILES, is_nested_only=True)))
    assert found.graph.initializer[0] == model().graph.initializer[0]
    assert external_files(memoryview(found.SerializeToString())) == ("b.bin",)
    plain = memoryview(onnx.helper.make_model(graph("plain", [])).SerializeToString())
    assert with_external_data(plain, {}) is plain


@pytest.mark.parametrize("entries", [{"offset": 40}, {"offset": -1}, {"length": 99}, {"length": -4}, {"offset": "x"}])
def test_a_tensor_outside_its_file_is_refused(entries: dict[str, Any]) -> None:
    data = onnx.helper.make_model(graph("g", [], [external("w", "a.bin", **entries)])).SerializeToString()
    with pytest.raises(InvalidArgument, match=r"has no valid range|has 32 bytes"):
        with_external_data(memoryview(data), FILES)


def test_an_input_without_dimensions_is_told_from_one_of_unknown_rank() -> None:
    assert declared_shapes(memoryview(model().SerializeToString())) == {"x": (), "y": None}


def test_a_model_can_state_no_shapes_of_outputs() -> None:
    stated = model()
    stated.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("z", 1, ["n", 300, None, -1, ""]))
    data = memoryview(stated.SerializeToString())
    assert declared_shapes(data)["z"] == ("n", 300, None, None, None)
    for output in stated.graph.output:
        output.type.tensor_type.ClearField("shape")
    assert onnx.ModelProto.FromString(without_output_shapes(data)) == stated


def test_initializers_of_certain_names_can_be_removed() -> None:
    whole = model()
    names = [tensor.name for tensor in whole.graph.initializer]
    data = whole.SerializeToString()
    assert onnx.ModelProto.FromString(without_initializers(memoryview(data), ("none",))) == whole
    left = onnx.ModelProto.FromString(without_initializers(memoryview(data), names[:1]))
    del whole.graph.initializer[0]
    assert left == whole


def field(number: int, value: bytes) -> bytes:
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


ENTRY = field(13, field(1, b"location") + field(2, b"a.bin"))
IN_GRAPH = field(7, field(5, ENTRY + b"\x70\x01"))
HALVES = (
    field(5, ENTRY),
    field(5, b"\x70\x01"),
)  # of an attribute's tensor: which data it has, and that they are external
AMBIGUOUS = {
    "an attribute's tensor in two parts": field(7, field(1, field(5, HALVES[0] + HALVES[1]))),
    "two graphs": IN_GRAPH + IN_GRAPH,
    "two locations": field(7, field(5, ENTRY + ENTRY)),
    "a group": b"\x0b" + IN_GRAPH,
    "a number beyond 32 bits": bytes([0xBA, 0x80, 0x80, 0x80, 0x80, 0x01]) + b"\x00" + IN_GRAPH,
    "a field without a number": bytes(2) + IN_GRAPH,
    "a number without an end": b"\xff" * 11 + IN_GRAPH,
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_readers_may_understand_differently_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"ambiguous|corrupt"):
        external_files(memoryview(AMBIGUOUS[name]))


def test_a_truncated_file_stays_truncated() -> None:
    data = model().SerializeToString()
    for size in range(len(data)):
        cut = memoryview(data[:size])
        external_files(cut)
        assert is_readable(with_external_data(cut, FILES)) == is_readable(cut)


def is_readable(data: bytes | memoryview) -> bool:
    try:
        onnx.load_model_from_string(bytes(data))
    except message.DecodeError:
        return False
    return True


def test_graphs_in_graphs_without_end_are_refused() -> None:
    data = ENTRY
    for _ in range(120):
        data = long_field(1, long_field(5, long_field(6, data)))
    with pytest.raises(InvalidArgument, match="nested more than 100"):
        external_files(memoryview(long_field(7, data)))


def long_field(number: int, value: bytes) -> bytes:
    size = len(value)
    return bytes([number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + value
