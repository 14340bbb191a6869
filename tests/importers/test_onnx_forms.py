"""Forms of ONNX operators: both devices and sessions compute what ONNX Runtime does, and refuse illegal ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from support.onnx_files import OnnxCase, expected, results
from support.onnx_forms import BY_REFERENCE, FORMS, ILLEGAL, ILLEGAL_BY_TEXT, VERSIONS
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.importers.onnx.values import Node

_HALF = 2e-3  # of the largest element; float32 is within 1e-5
_DEVICES = ("reference", "compiled")


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_device_computes_what_onnx_runtime_computes(device: str, case: OnnxCase, shared_client: Any) -> None:
    content, fed = case.content(), case.fed()
    _require_on(shared_client.device(device), content, fed, expected(content, fed))


@pytest.mark.parametrize("case", VERSIONS, ids=str)
def test_an_operator_is_read_by_the_definition_of_its_version(case: OnnxCase) -> None:
    content, fed = case.content(), case.fed()
    for ours, theirs in zip(results(content, fed), expected(content, fed), strict=True):
        _require_close(ours, theirs)


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("case", BY_REFERENCE, ids=str)
def test_a_device_computes_what_onnx_s_reference_computes(device: str, case: OnnxCase, shared_client: Any) -> None:
    content, fed = case.content(), case.fed()
    wanted = ReferenceEvaluator(onnx.load_from_string(content)).run(None, dict(fed))
    if case.opset == 9:  # the reference takes the meaning of opset 11, in which -1 counts from the end
        wanted[0][0] = 0
    _require_on(shared_client.device(device), content, fed, wanted)


def _require_on(device: Any, content: bytes, fed: Mapping[str, Any], wanted: Sequence[Any]) -> None:
    loaded = nnfmq.load(content)
    given = [
        np.ascontiguousarray(array).astype(info.dtype).reshape(info.shape)
        for array, info in zip(fed.values(), loaded.inputs, strict=True)
    ]
    with device.prepare(loaded) as model:
        for ours, theirs in zip(model.execute(*given), wanted, strict=True):
            _require_close(ours, np.asarray(theirs))


def _require_close(ours: Any, theirs: Any) -> None:
    assert ours.shape in (theirs.shape, theirs.shape or (1,))
    relative = {"float32": 1e-5, "float16": _HALF}.get(theirs.dtype.name, 0.0)
    largest = float(np.abs(theirs.astype(float)).max()) if relative else 0.0
    wanted = theirs.reshape(ours.shape).astype(float)
    np.testing.assert_allclose(ours.astype(float), wanted, 0, relative * largest)


@pytest.mark.parametrize(("case", "message"), ILLEGAL, ids=str)
def test_what_onnx_runtime_does_not_accept_is_refused_when_it_is_loaded(case: OnnxCase, message: str) -> None:
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        expected(case.content(), case.fed())
    with pytest.raises(nnfmq.UnsupportedModel, match=re.escape(message)):
        nnfmq.load(case.content())


@pytest.mark.parametrize(("case", "message"), ILLEGAL_BY_TEXT, ids=str)
def test_what_has_no_meaning_is_refused_when_it_is_loaded(case: OnnxCase, message: str) -> None:
    with pytest.raises(nnfmq.UnsupportedModel, match=re.escape(message)):
        nnfmq.load(case.content())


BY_ATTRIBUTES = sorted((*FORMS, *VERSIONS, *BY_REFERENCE), key=lambda case: -len(case.attributes))
WITH_FEWEST_ATTRIBUTES = {(case.operator, case.opset): case for case in BY_ATTRIBUTES}


@pytest.mark.parametrize("case", WITH_FEWEST_ATTRIBUTES.values(), ids=str)
def test_a_converter_takes_each_attribute_that_is_missing_to_be_what_its_version_says(
    case: OnnxCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(node: Node, name: str, default: Any) -> Any:
        schema = onnx.defs.get_schema(node.operator, node.opset) if "." not in node.operator else None
        stated = schema.attributes[name].default_value if schema and name in schema.attributes else None
        if default is not None and name not in node.attributes and stated is not None and stated.type:
            wanted = onnx.helper.get_attribute_value(stated)
            assert default == (wanted.decode() if isinstance(wanted, bytes) else pytest.approx(wanted, 1e-7))
        return attribute(node, name, default)

    attribute = Node.attribute
    monkeypatch.setattr(Node, "attribute", checked)
    nnfmq.load(case.content())


def test_a_later_opset_than_onnx_knows_is_refused() -> None:
    latest = onnx.defs.onnx_opset_version()
    model = onnx.load_from_string(OnnxCase("Relu", [np.float32([1])]).content())
    model.opset_import[0].version = latest + 1
    with pytest.raises(nnfmq.UnsupportedModel, match=rf"opset {latest + 1}; the installed onnx .* up to {latest}"):
        nnfmq.load(model.SerializeToString())
