"""Models of hosted runtimes over the Open Inference Protocol: datatypes, shapes, sizes that each request decides."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="protobuf is not installed")

from support.asgi_calls import AsgiResponse, ask_async
from support.drivers import Daemon
from support.onnx_runtime import onnx
from support.served_models import ModelsInMemory, TestModel, run

import nnfmq
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.serving.inference_protocol.grpc import (
    decode_infer_message,
    encode_infer_message,
    encode_model_metadata,
    message_classes,
)
from nnfmq.serving.inference_protocol.http import (
    InferenceApp,
    OutputFormats,
    decode_infer_request,
    encode_infer_response,
)
from nnfmq.serving.inference_protocol.tensors import datatype_of, dtype_of
from nnfmq.serving.inference_service import InferResponse
from nnfmq.serving.request_arrays import RequestArrays
from nnfmq.serving.server import ModelServer, ServerOptions

VALUES: dict[str, tuple[str, str, Any]] = {
    "int64": ("INT64", "INT64", np.array([-(2**62), 3], np.int64)),
    "uint64": ("UINT64", "UINT64", np.array([2**64 - 1, 3], np.uint64)),
    "float64": ("DOUBLE", "FP64", np.array([1e300, -0.5])),
    "float16": ("FLOAT16", "FP16", np.array([0.5, -2], np.float16)),
    "bfloat16": ("BFLOAT16", "BF16", np.array([0x3FC0, 0xC380], np.uint16)),
    "bool": ("BOOL", "BOOL", np.array([True, False])),
    "scalar": ("INT64", "INT64", np.array(7)),
    "empty": ("FLOAT", "FP32", np.zeros((0, 2), np.float32)),
    "open": ("DOUBLE", "FP64", np.array([1.0, 2, 3])),
}
"""ONNX's type, the protocol's datatype and the value of each input."""
OPEN = {"open": ["N"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model that returns its inputs; and one that finds the places that are not zero, in any number."""
    helper, folder = onnx.helper, tmp_path_factory.mktemp("models")
    kinds = {name: getattr(onnx.TensorProto, kind) for name, (kind, _, _) in VALUES.items()}
    shapes = {name: OPEN.get(name, list(value.shape)) for name, (_, _, value) in VALUES.items()}
    inputs, outputs = (
        [helper.make_tensor_value_info(f"{side}{name}", kinds[name], shapes[name]) for name in VALUES]
        for side in ("", "same_")
    )
    same = [helper.make_node("Identity", [name], [f"same_{name}"]) for name in VALUES]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, "N"])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.INT64, [2, None])
    graphs = {
        "same": helper.make_graph(same, "g", inputs, outputs),
        "found": helper.make_graph([helper.make_node("NonZero", ["x"], ["y"])], "g", [x], [y]),
    }
    for name, graph in graphs.items():
        model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    return {name: folder / f"{name}.onnx" for name in graphs}


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[nnfmq.Client]:
    with shared_daemon.connect() as made:
        yield made


@asynccontextmanager
async def served(client: nnfmq.Client, files: dict[str, Path]) -> AsyncIterator[ModelServer]:
    models = {name: TestModel(path, device="onnxruntime") for name, path in files.items()}
    async with ModelServer(client, ModelsInMemory(client, models), ServerOptions()) as server:
        yield server


async def answered(server: ModelServer, method: str, path: str, body: bytes = b"", json_bytes: int = 0) -> AsgiResponse:
    headers = [(b"inference-header-content-length", str(json_bytes).encode())] if json_bytes else []
    response = await ask_async(InferenceApp(server), method, path, body, headers)
    assert response is not None
    return response


DESCRIBED = [
    {"name": name, "datatype": datatype, "shape": [-1] if name in OPEN else list(value.shape)}
    for name, (_, datatype, value) in VALUES.items()
]
SENT = {name: value.tobytes() for name, (_, _, value) in VALUES.items()}
ENTRIES = [
    {"name": name, "datatype": datatype, "shape": list(value.shape)} for name, (_, datatype, value) in VALUES.items()
]


def test_types_and_shapes_are_reported_exactly(client: nnfmq.Client, files: dict[str, Path]) -> None:
    async def test() -> None:
        async with served(client, files) as server:
            metadata = (await answered(server, "GET", "/v2/models/same")).json
            assert metadata["inputs"] == DESCRIBED
            assert metadata["outputs"] == [{**entry, "name": f"same_{entry['name']}"} for entry in DESCRIBED]
            by_grpc = encode_model_metadata(await server.model_metadata("same"))
            found = [(each.name, each.datatype, list(each.shape)) for each in by_grpc.inputs]
            assert found == [tuple(entry.values()) for entry in DESCRIBED]

    run(test())


def test_binary_data_of_every_type_cross_as_they_are(client: nnfmq.Client, files: dict[str, Path]) -> None:
    inputs = [{**entry, "parameters": {"binary_data_size": len(SENT[entry["name"]])}} for entry in ENTRIES]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    request = message_classes()["ModelInferRequest"](
        model_name="same",
        inputs=[message_classes()["InferInputTensor"](**entry) for entry in ENTRIES],
        raw_input_contents=list(SENT.values()),
    )

    async def test() -> None:
        async with served(client, files) as server:
            body = header + b"".join(SENT.values())
            reply = await answered(server, "POST", "/v2/models/same/infer", body, len(header))
            assert reply.status == 200, reply.body
            split = int(reply.headers["inference-header-content-length"])
            outputs = json.loads(reply.body[:split])["outputs"]
            expected = [{**entry, "name": f"same_{entry['name']}"} for entry in inputs]
            assert outputs == expected
            assert reply.body[split:] == b"".join(SENT.values())
            response = await server.infer(decode_infer_message(request.SerializeToString()))
            result = message_classes()["ModelInferResponse"]()
            result.ParseFromString(encode_infer_message(response).SerializeToString())
            found = [(each.name, each.datatype, list(each.shape)) for each in result.outputs]
            assert found == [(entry["name"], entry["datatype"], entry["shape"]) for entry in expected]
            assert list(result.raw_output_contents) == list(SENT.values())

    run(test())


def test_values_in_json_cross_as_they_are(client: nnfmq.Client, files: dict[str, Path]) -> None:
    inputs = [{**entry, "data": VALUES[entry["name"]][2].ravel().tolist()} for entry in ENTRIES]
    (bfloat16,) = (entry for entry in inputs if entry["datatype"] == "BF16")
    words = bfloat16.pop("data")
    bfloat16["parameters"] = {"binary_data_size": 4}  # JSON has its values in responses only
    header = json.dumps({"inputs": inputs}).encode()

    async def test() -> None:
        async with served(client, files) as server:
            body = header + np.array(words, "<u2").tobytes()
            reply = (await answered(server, "POST", "/v2/models/same/infer", body, len(header))).json
            del bfloat16["parameters"]
            bfloat16["data"] = [1.5, -256.0]
            assert reply["outputs"] == [{**entry, "name": f"same_{entry['name']}"} for entry in inputs]

    run(test())


def test_each_request_decides_open_sizes_and_its_values_those_of_outputs(
    client: nnfmq.Client, files: dict[str, Path]
) -> None:
    def body(*values: float, shape: Sequence[int] | None = None) -> bytes:
        entry = {"name": "x", "datatype": "FP32", "shape": shape or [1, len(values)], "data": values}
        return json.dumps({"inputs": [entry]}).encode()

    async def test() -> None:
        async with served(client, files) as server:
            metadata = (await answered(server, "GET", "/v2/models/found")).json
            assert [metadata[side][0]["shape"] for side in ("inputs", "outputs")] == [[1, -1], [2, -1]]
            for values in ([0, 1, 0, 2], [1], [0, 0]):
                reply = (await answered(server, "POST", "/v2/models/found/infer", body(*values))).json
                places = [place for place, value in enumerate(values) if value]
                assert reply["outputs"][0]["shape"] == [2, len(places)]
                assert reply["outputs"][0]["data"] == [0] * len(places) + places
            refused = await answered(server, "POST", "/v2/models/found/infer", body(1, 2, shape=[2, 1]))
            assert "input 'x' has the shape [1, -1]; the given array has [2, 1]" in refused.json["error"]

    run(test())


def test_bfloat16_has_its_datatype_and_crosses_as_bits() -> None:
    info = TensorInfo("x", (2,), "uint16", is_bfloat16=True)
    (described,), _ = RequestArrays([info], [info], 1).metadata()
    assert (described.dtype, datatype_of(described.dtype), dtype_of("BF16").name) == ("bfloat16", "BF16", "uint16")
    words = np.float32([1.5, -256]).view(np.uint32) >> 16
    response = InferResponse("m", "1", {"x": words.astype(np.uint16)}, bfloat16=frozenset("x"))
    reply = json.loads(encode_infer_response(response, OutputFormats(False)).body)
    assert reply["outputs"] == [{"name": "x", "datatype": "BF16", "shape": [2], "data": [1.5, -256.0]}]
    message = message_classes()["ModelInferResponse"]()
    message.ParseFromString(encode_infer_message(response).SerializeToString())
    assert (message.outputs[0].datatype, message.raw_output_contents[0]) == ("BF16", b"\xc0\x3f\x80\xc3")


def test_bfloat16_in_json_is_refused() -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "BF16", "shape": [1], "data": [1.5]}]}).encode()
    with pytest.raises(nnfmq.InvalidArgument, match="input 'x' is BF16, which only binary data can have"):
        decode_infer_request(body, None, model="m")
