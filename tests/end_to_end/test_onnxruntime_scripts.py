"""Short scripts for ONNX Runtime print the same after one changed import: in the style of what people publish."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, wait_for_closers
from support.onnx_files import IR_VERSION
from support.onnx_runtime import onnx
from support.ort_scripts import changed, rate_model

RNG = np.random.default_rng(3)
make = onnx.helper.make_node

CLASSIFICATION = """
import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
options.intra_op_num_threads = 1
session = ort.InferenceSession("classifier.onnx", options, providers=["CPUExecutionProvider"])
image = np.load("image.npy").astype(np.float32) / 255
batch = np.expand_dims(image.transpose(2, 0, 1), 0)
logits = session.run([session.get_outputs()[0].name], {session.get_inputs()[0].name: batch})[0]
scores = np.exp(logits) / np.exp(logits).sum()
for index in scores[0].argsort()[::-1][:3]:
    print(index, round(float(scores[0, index]), 3))
print(session.get_modelmeta().custom_metadata_map)
"""

STREAMING = """
import numpy as np
from onnxruntime import InferenceSession

session = InferenceSession("streaming.onnx")
state = np.zeros((2, 1, 8), dtype=np.float32)
for frame in np.load("audio.npy").reshape(-1, 1, 16):
    probability, state = session.run(None, {"input": frame, "state": state, "rate": np.array(16000, dtype=np.int64)})
    print(round(float(probability.item()), 3))
"""

EMBEDDING = """
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("embedding.onnx")
names = [node.name for node in session.get_inputs()]
for sentences in ([[1, 2, 3]], [[4, 5], [6, 7], [8, 9]], [[1, 2, 3]]):
    ids = np.array(sentences, dtype=np.int64)
    feed = dict(zip(names, (ids, np.ones_like(ids))))
    vectors, longest = session.run(None, feed)
    print(vectors.shape, longest.dtype, longest.tolist(), np.round(vectors[:, :3], 3).tolist())
"""

BINDING = """
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("classifier.onnx")
x = np.load("image.npy").astype(np.float32).transpose(2, 0, 1)[None] / 255
value = ort.OrtValue.ortvalue_from_numpy(x.copy(), "cpu", 0)
binding = session.io_binding()
binding.bind_input(name="x", device_type=value.device_name(), device_id=0, element_type=np.float32,
                   shape=value.shape(), buffer_ptr=value.data_ptr())
out = ort.OrtValue.ortvalue_from_shape_and_type([1, 5], np.float32, "cpu", 0)
binding.bind_ortvalue_output("y", out)
for _ in range(2):
    session.run_with_iobinding(binding)
    print(np.round(out.numpy(), 3).tolist(), np.round(binding.copy_outputs_to_cpu()[0], 3).tolist())
    value.update_inplace(x * 2)
"""

ERRORS = """
import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, NoSuchFile

session = ort.InferenceSession("classifier.onnx")
for feed in ({"x": np.zeros((1, 3), np.float32)}, {"x": np.zeros((1, 3, 8, 8))}, {"z": np.zeros(3)}, {}):
    try:
        session.run(None, feed)
    except (InvalidArgument, ValueError) as error:
        print(type(error).__name__)
try:
    ort.InferenceSession("missing.onnx")
except NoSuchFile as error:
    print(type(error).__name__)
"""

OFFLINE = """
import os
import numpy as np
import onnxruntime as rt

sess_options = rt.SessionOptions()
sess_options.graph_optimization_level = rt.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
sess_options.optimized_model_filepath = "optimized.onnx"
rt.InferenceSession("classifier.onnx", sess_options, providers=["CPUExecutionProvider"])
print(os.path.exists("optimized.onnx"))

sess_options = rt.SessionOptions()
sess_options.graph_optimization_level = rt.GraphOptimizationLevel.ORT_DISABLE_ALL
session = rt.InferenceSession("optimized.onnx", sess_options, providers=["CPUExecutionProvider"])
x = np.load("image.npy").astype(np.float32).transpose(2, 0, 1)[None] / 255
print(np.round(session.run(None, {session.get_inputs()[0].name: x})[0], 3).tolist())
os.remove("optimized.onnx")
"""

SHARED_WEIGHTS = """
import numpy as np
import onnxruntime as ort

weights = np.full((6, 5), 0.25, dtype=np.float32)
value = ort.OrtValue.ortvalue_from_numpy(weights)
options = ort.SessionOptions()
options.add_initializer("v", value)
x = np.load("image.npy").astype(np.float32).transpose(2, 0, 1)[None] / 255
for each in (ort.SessionOptions(), options):
    session = ort.InferenceSession("classifier.onnx", sess_options=each, providers=["CPUExecutionProvider"])
    print([round(float(value), 3) for value in session.run(["y"], {"x": x})[0][0]])
"""

STATES = """
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("streaming.onnx", providers=["CPUExecutionProvider"])
state = ort.OrtValue.ortvalue_from_shape_and_type([2, 1, 8], np.float32)
state.update_inplace(np.zeros((2, 1, 8), np.float32))
rate = ort.OrtValue.ortvalue_from_numpy(np.array(16000, dtype=np.int64))
for frame in np.load("audio.npy").reshape(-1, 1, 16):
    feed = {"input": ort.OrtValue.ortvalue_from_numpy(frame), "state": state, "rate": rate}
    probability, state = session.run_with_ort_values(["probability", "new_state"], feed)
    print(probability.shape(), probability.data_type(), state.device_name(), round(float(probability.numpy()[0, 0]), 3))
"""

THREADS = """
import numpy as np
import onnxruntime as ort
from concurrent.futures import ThreadPoolExecutor

opts = ort.SessionOptions()
opts.inter_op_num_threads = 1
opts.intra_op_num_threads = 1
opts.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
opts.add_session_config_entry("session.intra_op.allow_spinning", "0")
session = ort.InferenceSession("classifier.onnx", opts, providers=["CPUExecutionProvider"])
name = session.get_inputs()[0].name

def predict(seed):
    x = np.random.default_rng(seed).random((1 + seed % 2, 3, 8, 8), dtype=np.float32)
    return session.run(None, {name: x})[0].argmax(axis=1).tolist()

with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(predict, range(8))))
print(session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning"))
"""

DESCRIPTION = """
import onnxruntime

for path in ("classifier.onnx", "streaming.onnx", "embedding.onnx"):
    session = onnxruntime.InferenceSession(path, None)
    for kind, nodes in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for index, node in enumerate(nodes):
            print(f"{kind}[{index}] name={node.name}, type={node.type}, shape={node.shape}")
    meta = session.get_modelmeta()
    print(meta.producer_name, meta.graph_name, meta.domain, meta.version, meta.custom_metadata_map)
    print(session.get_providers(), session.get_provider_options())
"""

FALLBACK = """
import warnings
import numpy as np
import onnxruntime as ort

wanted = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
providers = [name for name in wanted if name in ort.get_available_providers()]
print(ort.get_device(), providers)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    session = ort.InferenceSession("classifier.onnx", providers=wanted)
    print(session.get_providers())
    session = ort.InferenceSession("classifier.onnx", providers=["CudaExecutionProvider", ("CPUExecutionProvider", {})])
print(session.get_providers(), session.run(None, {"x": np.zeros((1, 3, 8, 8), np.float32)})[0].shape)
"""

CALLBACK = """
import threading
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("classifier.onnx", providers=["CPUExecutionProvider"])
done = threading.Event()

def callback(results, user_data, error):
    user_data.append((None if error else np.round(results[0], 3).tolist(), bool(error)))
    done.set()

collected = []
for shape in ((1, 3, 8, 8), (1, 3, 9, 9)):
    done.clear()
    session.run_async(["y"], {"x": np.ones(shape, np.float32)}, callback, collected)
    done.wait()
print(collected[0])
print(collected[1][1])
"""

SCRIPTS = {
    "offline": OFFLINE,
    "shared weights": SHARED_WEIGHTS,
    "states": STATES,
    "threads": THREADS,
    "description": DESCRIPTION,
    "fallback": FALLBACK,
    "callback": CALLBACK,
    "classification": CLASSIFICATION,
    "streaming": STREAMING,
    "embedding": EMBEDDING,
    "binding": BINDING,
    "errors": ERRORS,
}


def constant(name: str, *shape: int) -> Any:
    return onnx.numpy_helper.from_array(RNG.normal(0, 0.4, shape).astype(np.float32), name)


def save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any]) -> None:
    graph = onnx.helper.make_graph(nodes, "graph", inputs, outputs, constants)
    model = onnx.helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.metadata_props.add(key="names", value="a,b,c,d,e")
    onnx.save(model, path)


def tensor(name: str, *shape: Any, kind: int = 1) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def classifier(path: Path) -> None:
    nodes = [
        make("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        make("Relu", ["c"], ["r"]),
        make("GlobalAveragePool", ["r"], ["p"]),
        make("Flatten", ["p"], ["f"]),
        make("Gemm", ["f", "v"], ["y"]),
    ]
    constants = [constant("w", 6, 3, 3, 3), constant("b", 6), constant("v", 6, 5)]
    save(path, nodes, [tensor("x", "N", 3, 8, 8)], [tensor("y", "N", 5)], constants)


def streaming(path: Path) -> None:
    """Write a voice-activity model: a state in and out, and a sampling rate that selects a branch."""
    branch = {
        name: onnx.helper.make_graph(
            [make("Mul", ["input", name], [f"{name}_y"])],
            name,
            [],
            [onnx.helper.make_empty_tensor_value_info(f"{name}_y")],
        )
        for name in ("fast", "slow")
    }
    nodes = [
        make("Equal", ["rate", "16k"], ["is_16k"]),
        make("If", ["is_16k"], ["scaled"], then_branch=branch["fast"], else_branch=branch["slow"]),
        make("Unsqueeze", ["scaled", "zero"], ["steps"]),
        make("Split", ["state"], ["h", "c"], axis=0),
        make("LSTM", ["steps", "W", "R", "B", "", "h", "c"], ["", "hn", "cn"], hidden_size=8),
        make("Concat", ["hn", "cn"], ["new_state"], axis=0),
        make("Squeeze", ["hn", "zero"], ["last"]),
        make("MatMul", ["last", "v"], ["logit"]),
        make("Sigmoid", ["logit"], ["probability"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(np.array(16000), "16k"),
        onnx.numpy_helper.from_array(np.array([0]), "zero"),
        *(onnx.numpy_helper.from_array(np.float32(value), name) for name, value in (("fast", 2), ("slow", 1))),
        *(constant("W", 1, 32, 16), constant("R", 1, 32, 8), constant("B", 1, 64), constant("v", 8, 1)),
    ]
    inputs = [tensor("input", "N", 16), tensor("state", 2, "N", 8), tensor("rate", kind=7)]
    save(path, nodes, inputs, [tensor("probability", "N", 1), tensor("new_state", 2, "N", 8)], constants)


def embedding(path: Path) -> None:
    """Write a model that averages the vectors of tokens, with GELU, and counts the tokens of each sentence."""
    nodes = [
        make("Gather", ["table", "ids"], ["e"]),
        make("Div", ["e", "root"], ["d"]),
        make("Erf", ["d"], ["f"]),
        make("Add", ["f", "one"], ["g"]),
        make("Mul", ["e", "g"], ["h"]),
        make("ReduceMean", ["h"], ["vectors"], axes=[1], keepdims=0),
        make("ReduceSum", ["mask", "axis"], ["longest"], keepdims=0),
    ]
    constants = [
        constant("table", 12, 6),
        *(onnx.numpy_helper.from_array(np.float32(value), name) for name, value in (("root", 2**0.5), ("one", 1))),
        onnx.numpy_helper.from_array(np.array([1]), "axis"),
    ]
    inputs = [tensor(name, "batch", "length", kind=7) for name in ("ids", "mask")]
    save(path, nodes, inputs, [tensor("vectors", "batch", 6), tensor("longest", "batch", kind=7)], constants)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    classifier(tmp_path / "classifier.onnx")
    streaming(tmp_path / "streaming.onnx")
    embedding(tmp_path / "embedding.onnx")
    np.save("image.npy", RNG.integers(0, 256, (8, 8, 3)).astype(np.uint8))
    np.save("audio.npy", RNG.normal(0, 1, 80).astype(np.float32))
    return tmp_path


@pytest.fixture(autouse=True)
def _use_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    yield
    gc.collect()  # a function of a script refers to the script's variables
    wait_for_closers()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_the_same_after_one_changed_import(
    name: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for script in (SCRIPTS[name], changed(SCRIPTS[name])):
        exec(compile(script, name, "exec"), {})
        printed.append(capsys.readouterr().out)
    assert printed[0].count("\n") > 1
    assert printed[1] == printed[0]


def test_a_model_with_a_branch_for_each_rate_is_prepared_for_the_rates_that_occur() -> None:
    import nnfmq.compat.onnxruntime as ort

    made = ort.InferenceSession(rate_model())
    feed = {"x": np.ones((1, 4), np.float32), "times": np.array([1, 1])}
    for rate, wanted in ((8000, 2), (16000, -1), (8000, 2)):
        (found,) = made.run(None, {**feed, "rate": np.array(rate)})
        np.testing.assert_array_equal(found, np.full((1, 4), wanted, np.float32))
    assert len(made._plans._plans) == 2
