"""Short scripts for LiteRT print the same after one changed import: in the style of what people publish."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flatbuffers import flexbuffers
from support.drivers import Daemon, wait_for_closers
from support.litert import litert
from support.litert_scripts import add_other_names, changed, printed
from support.stateful_models import stream, streaming_window
from support.tflite_files import Operator, Tensor, writer

import nnfmq

LABEL_IMAGE = """
import numpy as np
import tflite_runtime.interpreter as tflite

interpreter = tflite.Interpreter(model_path="digits.tflite", num_threads=2)
interpreter.allocate_tensors()
input_details = interpreter.get_input_details()
output_details = interpreter.get_output_details()
floating_model = input_details[0]["dtype"] == np.float32
height, width = input_details[0]["shape"][1], input_details[0]["shape"][2]
images = np.load("images.npy")
for image in images:
    input_data = np.expand_dims(image.reshape(height, width, 1), axis=0)
    if floating_model:
        input_data = np.float32(input_data) / 16
    interpreter.set_tensor(input_details[0]["index"], input_data)
    interpreter.invoke()
    results = np.squeeze(interpreter.get_tensor(output_details[0]["index"]))
    for i in results.argsort()[-3:][::-1]:
        print("{:06.3f}: {}".format(float(results[i]), i))
"""

QUANTIZED = """
import numpy as np
from tflite_runtime.interpreter import Interpreter, OpResolverType

with open("digits_quant.tflite", "rb") as file:
    interpreter = Interpreter(
        model_content=file.read(),
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
        experimental_preserve_all_tensors=False,
        experimental_disable_delegate_clustering=False,
        experimental_default_delegate_latest_features=False,
    )
interpreter.allocate_tensors()
source, sink = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
scale, zero_point = source["quantization"]
for image in np.load("images.npy"):
    if source["dtype"] in (np.int8, np.uint8):
        limits = np.iinfo(source["dtype"])
        image = np.clip(np.round(image / 16 / scale + zero_point), limits.min, limits.max)
    interpreter.set_tensor(source["index"], image.reshape(source["shape"]).astype(source["dtype"]))
    interpreter.invoke()
    output = interpreter.get_tensor(sink["index"])
    scale_out, zero_out = sink["quantization"]
    print(output.tolist(), np.round(scale_out * (output.astype(np.float32) - zero_out), 5))
print(source, sink)
"""

BENCHMARK = """
import time
import numpy as np
import tensorflow as tf

interpreter = tf.lite.Interpreter(model_path="digits.tflite", num_threads=1)
interpreter.allocate_tensors()
details = interpreter.get_input_details()[0]
rng = np.random.default_rng(0)
times, total = [], 0.0
for run in range(20):
    interpreter.allocate_tensors()
    interpreter.set_tensor(details["index"], rng.random(details["shape"], dtype=np.float32))
    begin = time.perf_counter()
    interpreter.invoke()
    times.append(time.perf_counter() - begin)
    for output in interpreter.get_output_details():
        total += float(np.abs(interpreter.get_tensor(output["index"])).sum())
print(len(times), min(times) > 0, round(total, 2), tuple(details["shape"]), np.dtype(details["dtype"]))
"""

DETECTION = """
import numpy as np
from tflite_runtime.interpreter import Interpreter

def set_input_tensor(interpreter, index, value):
    tensor_index = interpreter.get_input_details()[index]["index"]
    input_tensor = interpreter.tensor(tensor_index)()[0]
    input_tensor[:, :] = value

def get_output_tensor(interpreter, index):
    output_details = interpreter.get_output_details()[index]
    return np.squeeze(interpreter.get_tensor(output_details["index"]))

interpreter = Interpreter("detector.tflite")
interpreter.allocate_tensors()
rng = np.random.default_rng(4)
for frame in range(3):
    set_input_tensor(interpreter, 0, rng.normal(0, 1, (12, 4)))
    set_input_tensor(interpreter, 1, rng.random((12, 4)))
    interpreter.invoke()
    boxes, classes = get_output_tensor(interpreter, 0), get_output_tensor(interpreter, 1)
    scores, count = get_output_tensor(interpreter, 2), int(get_output_tensor(interpreter, 3))
    for i in range(count):
        if scores[i] >= 0.5:
            ymin, xmin, ymax, xmax = boxes[i]
            print(frame, int(classes[i]), "%.3f (%.2f, %.2f, %.2f, %.2f)" % (scores[i], xmin, ymin, xmax, ymax))
"""

STREAMING = """
import numpy as np
import tflite_runtime.interpreter as tflite

interpreter = tflite.Interpreter(model_path="stream.tflite")
interpreter.allocate_tensors()
input_index = interpreter.get_input_details()[0]["index"]
output_index = interpreter.get_output_details()[0]["index"]
audio = np.sin(np.arange(24, dtype=np.float32))
for pass_number in range(2):
    for begin in range(0, len(audio), 3):
        interpreter.set_tensor(input_index, audio[None, begin : begin + 3])
        interpreter.invoke()
        print(pass_number, begin, np.round(interpreter.get_tensor(output_index)[0], 3).tolist())
    interpreter.reset_all_variables()
"""

STATES_OUTSIDE = """
import numpy as np
import tflite_runtime.interpreter as tflite

interpreter = tflite.Interpreter(model_path="cell.tflite")
interpreter.allocate_tensors()
input_details = interpreter.get_input_details()
output_details = interpreter.get_output_details()
states = np.zeros(input_details[1]["shape"]).astype("float32")
for block in np.arange(12, dtype=np.float32).reshape(-1, 1, 2) / 10:
    interpreter.set_tensor(input_details[1]["index"], states)
    interpreter.set_tensor(input_details[0]["index"], block)
    interpreter.invoke()
    out_block = interpreter.get_tensor(output_details[0]["index"])
    states = interpreter.get_tensor(output_details[1]["index"])
    print(np.round(out_block, 3).tolist(), np.round(states, 3).tolist())
"""

KEYWORDS = """
import numpy as np
from ai_edge_litert.interpreter import Interpreter

interpreter = Interpreter(model_path="window.tflite")
interpreter.allocate_tensors()
source, sink = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
scale, zero_point = source["quantization"]
for value in range(6):
    features = np.full(source["shape"], value, np.float32)
    interpreter.set_tensor(source["index"], (features / scale + zero_point).astype(source["dtype"]))
    interpreter.invoke()
    print(interpreter.get_tensor(sink["index"])[0, :, 0].tolist())
"""

SIGNATURE = """
import numpy as np
from ai_edge_litert.interpreter import Interpreter

interpreter = Interpreter(model_path="signature.tflite")
print(interpreter.get_signature_list())
div = interpreter.get_signature_runner("serving_default")
for values in ([6.0, 9.0, 1.0], [1.0, 2.0, 3.0]):
    output = div(x=np.array([values], np.float32), y=np.array([[3.0, 2.0, 4.0]], np.float32))
    print(sorted(output), np.round(output["quotient"], 4).tolist(), output["sum"].tolist())
for name, details in sorted(div.get_input_details().items()):
    print(name, details["name"], details["shape"], details["dtype"])
try:
    div(x=np.ones((1, 3), np.float32))
except ValueError as error:
    print(type(error).__name__)
"""

BATCH = """
import numpy as np
from tensorflow import lite

interpreter = lite.Interpreter(model_path="digits.tflite")
images = np.load("images.npy").astype(np.float32)
for size in (4, 1, 2):
    batch = images[:size].reshape(size, 8, 8, 1) / 16
    interpreter.resize_tensor_input(interpreter.get_input_details()[0]["index"], batch.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], batch)
    interpreter.invoke()
    scores = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    print(scores.shape, scores.argmax(axis=1), np.round(scores.max(axis=1), 3))
"""

LAYERS = """
import warnings
import numpy as np
import ai_edge_litert.interpreter as tflite

interpreter = tflite.Interpreter(
    "digits_quant.tflite", experimental_preserve_all_tensors=True,
    experimental_op_resolver_type=tflite.OpResolverType.BUILTIN_REF)
interpreter.allocate_tensors()
interpreter.set_tensor(0, np.load("images.npy")[0].reshape(1, 8, 8, 1).astype(np.int8))
interpreter.invoke()
for layer in interpreter.get_tensor_details()[:13]:
    value = interpreter.get_tensor(layer["index"])
    print(layer["index"], layer["name"], layer["shape"], value.dtype, int(value.astype(np.int64).sum()))
    print(layer["quantization_parameters"]["scales"], layer["quantization_parameters"]["zero_points"])
for op in interpreter._get_ops_details():
    print(op["index"], op["op_name"], op["inputs"], op["outputs"])
"""

VIEWS = """
import numpy as np
import tflite_runtime.interpreter as tflite

interpreter = tflite.Interpreter(model_path="digits.tflite")
interpreter.allocate_tensors()
source = interpreter.tensor(interpreter.get_input_details()[0]["index"])
sink = interpreter.tensor(interpreter.get_output_details()[0]["index"])
for i in range(4):
    source().fill(i / 4)
    interpreter.invoke()
    print("inference %s" % np.round(sink(), 2))
held = source()
try:
    interpreter.invoke()
except RuntimeError as error:
    print("held", type(error).__name__)
del held
interpreter.invoke()
"""

ERRORS = """
import numpy as np
import tflite_runtime.interpreter as tflite

interpreter = tflite.Interpreter(model_path="digits.tflite")
x = interpreter.get_input_details()[0]["index"]
for call in (
    lambda: interpreter.set_tensor(x, np.zeros((1, 8, 8, 1))),
    lambda: interpreter.allocate_tensors(),
    lambda: interpreter.set_tensor(x, np.zeros((1, 8, 8, 1))),
    lambda: interpreter.set_tensor(x, np.zeros((8, 8), np.float32)),
    lambda: interpreter.set_tensor(x, np.zeros((1, 8, 8, 3), np.float32)),
    lambda: interpreter.get_signature_runner("serving_default"),
    lambda: tflite.Interpreter(model_path="missing.tflite"),
    lambda: tflite.Interpreter(model_content=b"no model"),
    lambda: tflite.Interpreter("digits.tflite", num_threads=-1),
):
    try:
        print(call())
    except ValueError:
        print("ValueError")
    except RuntimeError:
        print("RuntimeError")
"""

SCRIPTS = {
    "label image": LABEL_IMAGE,
    "quantized": QUANTIZED,
    "benchmark": BENCHMARK,
    "detection": DETECTION,
    "streaming": STREAMING,
    "states outside": STATES_OUTSIDE,
    "keywords": KEYWORDS,
    "signature": SIGNATURE,
    "batch": BATCH,
    "layers": LAYERS,
    "views": VIEWS,
    "errors": ERRORS,
}

DELEGATE = """
import numpy as np
import tflite_runtime.interpreter as tflite

try:
    delegates = [tflite.load_delegate("libedgetpu.so.1", {"device": "usb"})]
except (ValueError, OSError):
    delegates = []
interpreter = tflite.Interpreter("digits.tflite", experimental_delegates=delegates)
interpreter.allocate_tensors()
image = np.load("images.npy")[0].reshape(1, 8, 8, 1).astype(np.float32) / 16
interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
interpreter.invoke()
print(np.round(interpreter.get_tensor(interpreter.get_output_details()[0]["index"]), 3))
"""


# ------------------------------------------------------------------------------------------------ models


def detector() -> bytes:
    """Return a model that selects among 12 boxes, each at an anchor, with 3 classes and a background."""
    options = {
        "max_detections": 5, "max_classes_per_detection": 1, "detections_per_class": 4, "use_regular_nms": True,
        "nms_score_threshold": 0.2, "nms_iou_threshold": 0.5, "num_classes": 3,
        "y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0,
    }  # fmt: skip
    anchors = np.random.default_rng(2).uniform(0.2, 0.8, (12, 4)).astype(np.float32)
    inputs = [Tensor("boxes", (1, 12, 4)), Tensor("scores", (1, 12, 4))]
    outputs = [Tensor("b", (1, 5, 4)), Tensor("c", (1, 5)), Tensor("s", (1, 5)), Tensor("n", (1,))]
    operator = Operator(
        "TFLite_Detection_PostProcess", (0, 1, 2), (3, 4, 5, 6), custom=bytes(flexbuffers.Dumps(options))
    )
    tensors = [*inputs, Tensor("anchors", (12, 4), data=anchors.tobytes()), *outputs]
    data: bytes = writer.write(tensors, [operator], (0, 1), (3, 4, 5, 6))
    return data


def cell() -> bytes:
    """Return a model whose state is an input and an output: y = tanh(x + s), s' = x * s + x."""
    tensors = [Tensor(name, (1, 2)) for name in ("x", "s", "sum", "y", "product", "new")]
    operators = [
        Operator("ADD", (0, 1), (2,), "AddOptions", {"FusedActivationFunction": 0}),
        Operator("TANH", (2,), (3,)),
        Operator("MUL", (0, 1), (4,), "MulOptions", {"FusedActivationFunction": 0}),
        Operator("ADD", (4, 0), (5,), "AddOptions", {"FusedActivationFunction": 0}),
    ]
    data: bytes = writer.write(tensors, operators, (0, 1), (3, 5))
    return data


def signature() -> bytes:
    """Return a model with a signature: the quotient and the sum of two tensors."""
    names = ("serving_default_x:0", "serving_default_y:0", "PartitionedCall:0", "PartitionedCall:1")
    operators = [
        Operator("DIV", (0, 1), (2,), "DivOptions", {"FusedActivationFunction": 0}),
        Operator("ADD", (0, 1), (3,), "AddOptions", {"FusedActivationFunction": 0}),
    ]
    key = writer.Signature("serving_default", {"x": 0, "y": 1}, {"quotient": 2, "sum": 3})
    data: bytes = writer.write([Tensor(name, (1, 3)) for name in names], operators, (0, 1), (2, 3), signatures=[key])
    return data


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the models and images."""
    monkeypatch.chdir(tmp_path)
    for name in ("digits.tflite", "digits_quant.tflite"):
        shutil.copy(nnfmq.example_path(name), name)
    with np.load(nnfmq.example_path("digits.npz")) as digits:
        np.save("images.npy", digits["images"][:4].astype(np.uint8))
    made = {"detector": detector, "stream": stream, "cell": cell, "window": streaming_window, "signature": signature}
    for name, make in made.items():
        Path(f"{name}.tflite").write_bytes(make())


@pytest.fixture(autouse=True)
def _use_daemon(_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(_daemon.path))
    yield
    gc.collect()
    wait_for_closers()


@pytest.fixture(autouse=True)
def _use_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    add_other_names(monkeypatch, litert)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_the_same_after_one_changed_import(name: str) -> None:
    script = SCRIPTS[name]
    wanted = printed(script)
    assert wanted
    assert printed(changed(script)) == wanted


# LiteRT's own Delegate raises in its finalizer if the library cannot be loaded.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function Delegate.__del__")
def test_a_script_that_loads_a_delegate_runs_without_it() -> None:
    wanted = printed(DELEGATE)
    with pytest.warns(UserWarning, match=r"delegate libedgetpu\.so\.1 is ignored"):
        assert printed(changed(DELEGATE)) == wanted


def test_what_needs_tensorflow_itself_says_so() -> None:
    import nnfmq.compat.tensorflow as tf

    with pytest.raises(AttributeError, match=r"`tf\.constant` needs TensorFlow itself"):
        tf.constant([1])
    with pytest.raises(AttributeError, match=r"does not convert them: `tf\.lite\.TFLiteConverter` needs TensorFlow"):
        tf.lite.TFLiteConverter()
    assert tf.lite.experimental.OpResolverType.BUILTIN_REF.value == 2
