"""Scripts for LiteRT whose models nnfmq's own engine refuses print the same after one changed import.

They make the calls of what people publish for these tasks; the models are small, and each has an operator, or a shape,
that nnfmq's engine does not support.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers
from support.drivers import Daemon, wait_for_closers
from support.litert import litert
from support.litert_scripts import add_other_names, changed, printed
from support.tflite_files import Operator, Tensor, writer

from nnfmq.compat.litert import Interpreter

# ------------------------------------------------------------------------------------------------ models

PLAIN = {"FusedActivationFunction": 0}
MULTIPLY, ADD, MAXIMUM = "STABLEHLO_MULTIPLY", "STABLEHLO_ADD", "STABLEHLO_MAXIMUM"  # nnfmq's importer has none of them


class SmallGraph:
    """A subgraph in the making: methods return tensor indexes. Sizes of -1 are open, and 1 at first."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.operators: list[Any] = []
        self._random = np.random.default_rng(6)

    def tensor(self, name: str, *shape: int, kind: str = "FLOAT32", **more: Any) -> int:
        """Add a tensor without a value."""
        signature = shape if -1 in shape else ()
        self.tensors.append(Tensor(name, [abs(size) for size in shape], kind, signature=signature, **more))
        return len(self.tensors) - 1

    def constant(self, value: Any) -> int:
        """Add a tensor with a value."""
        array = np.asarray(value)
        name = f"constant {len(self.tensors)}"
        self.tensors.append(Tensor(name, array.shape, array.dtype.name.upper(), data=array.tobytes()))
        return len(self.tensors) - 1

    def weights(self, *shape: int, least: float = -1.0, most: float = 1.0) -> int:
        """Add a tensor of random values."""
        return self.constant(self._random.uniform(least, most, shape).astype(np.float32))

    def add(
        self, name: str, inputs: Sequence[int], shape: Sequence[int], options: Any = None, kind: str = "FLOAT32"
    ) -> int:
        """Add an operator with one result; options are those of its table, or of another one that they name."""
        result = self.tensor(f"{name} {len(self.tensors)}", *shape, kind=kind)
        words = name.title().replace("_", "")
        table, values = options if isinstance(options, tuple) else (f"{words}Options", options)
        self.operators.append(Operator(name, inputs, (result,), table if values is not None else "", values or {}))
        return result

    def dense(self, x: int, rows: int, taken: int, given: int) -> int:
        """Add a fully connected layer."""
        inputs = (x, self.weights(given, taken), self.weights(given))
        return self.add("FULLY_CONNECTED", inputs, (rows, given), PLAIN)

    def file(self, inputs: Sequence[int], outputs: Sequence[int], **more: Any) -> bytes:
        """Return the file."""
        content: bytes = writer.write(self.tensors, self.operators, inputs, outputs, **more)
        return content


def detector() -> dict[str, bytes]:
    g = SmallGraph()
    image = g.tensor("normalized_input_image_tensor", 1, 4, 4, 3, kind="UINT8")
    real = g.add("CAST", [image], (1, 4, 4, 3), {})
    scaled = g.add(MULTIPLY, [real, g.constant(np.full((1, 4, 4, 3), 1 / 255, np.float32))], (1, 4, 4, 3))
    flat = g.add("RESHAPE", [scaled], (1, 48), {"NewShape": [1, 48]})
    boxes, classes = (g.dense(flat, 1, 48, 24) for _ in range(2))
    boxes = g.add("RESHAPE", [boxes], (1, 6, 4), {"NewShape": [1, 6, 4]})
    classes = g.add("RESHAPE", [classes], (1, 6, 4), {"NewShape": [1, 6, 4]})
    scores = g.add("LOGISTIC", [classes], (1, 6, 4))
    anchors = g.weights(6, 4, least=0.2, most=0.8)
    shapes = {"": (1, 3, 4), ":1": (1, 3), ":2": (1, 3), ":3": (1,)}
    outputs = [g.tensor(f"TFLite_Detection_PostProcess{name}", *shape) for name, shape in shapes.items()]
    options = {
        "max_detections": 3, "max_classes_per_detection": 1, "use_regular_nms": False, "num_classes": 3,
        "nms_score_threshold": 0.1, "nms_iou_threshold": 0.6,
        "y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0,
    }  # fmt: skip
    custom = bytes(flexbuffers.Dumps(options))
    g.operators.append(Operator("TFLite_Detection_PostProcess", (boxes, scores, anchors), outputs, custom=custom))
    return {"detect": g.file([image], outputs)}


def selector() -> dict[str, bytes]:
    g = SmallGraph()
    image = g.tensor("images", 1, 6, 6, 1)
    flat = g.add("RESHAPE", [image], (1, 36), {"NewShape": [1, 36]})
    rows = g.add("RESHAPE", [g.dense(flat, 1, 36, 40)], (8, 5), {"NewShape": [8, 5]})
    score = g.add("MEAN", [rows, g.constant(np.int32([1]))], (8,), ("ReducerOptions", {"KeepDims": False}))
    kept = g.add("GREATER", [score, g.constant(np.float32(0))], (8,), kind="BOOL")
    found = g.add("WHERE", [kept], (-1, 1), kind="INT64")
    boxes = g.add("GATHER_ND", [rows, found], (-1, 5), {})
    return {"yolo": g.file([image], [found, boxes])}


def trainable() -> dict[str, bytes]:
    def begun() -> tuple[SmallGraph, int]:
        g = SmallGraph()
        handle = g.tensor("handle", kind="RESOURCE")
        g.operators = [
            Operator("CALL_ONCE", (), (), "CallOnceOptions", {"InitSubgraphIndex": 3}),
            Operator("VAR_HANDLE", (), (handle,), "VarHandleOptions", {"Container": "", "SharedName": "weights"}),
        ]
        return g, handle

    def ended(g: SmallGraph, inputs: Sequence[int], outputs: Sequence[int]) -> Any:
        return writer.Subgraph(g.tensors, g.operators, inputs, outputs)

    train, handle = begun()
    x, y = train.tensor("train_x", 4, 2), train.tensor("train_y", 4, 1)
    weights = train.add("READ_VARIABLE", [handle], (2, 1), {})
    error = train.add("SUB", [train.add("BATCH_MATMUL", [x, weights], (4, 1), ("BatchMatMulOptions", {})), y], (4, 1))
    squares = train.add(MULTIPLY, [error, error], (4, 1))
    axes = train.constant(np.int32([0, 1]))
    loss = train.add("MEAN", [squares, axes], (), ("ReducerOptions", {"KeepDims": False}))
    turned = ("BatchMatMulOptions", {"AdjX": True})
    gradient = train.add("BATCH_MATMUL", [x, error], (2, 1), turned)
    step = train.add("MUL", [gradient, train.constant(np.float32(0.1))], (2, 1), PLAIN)
    new = train.add("SUB", [weights, step], (2, 1), PLAIN)
    train.operators.append(Operator("ASSIGN_VARIABLE", (handle, new), (), "AssignVariableOptions"))

    infer, handle = begun()
    features = infer.tensor("infer_x", 4, 2)
    weights = infer.add("READ_VARIABLE", [handle], (2, 1), {})
    product = infer.add("BATCH_MATMUL", [features, weights], (4, 1), ("BatchMatMulOptions", {}))
    result = infer.add(MAXIMUM, [product, product], (4, 1))

    save, handle = begun()
    saved = save.add("READ_VARIABLE", [handle], (2, 1), {})
    doubled = save.add(ADD, [saved, saved], (2, 1))

    begin, handle = begun()
    begin.operators = begin.operators[1:]
    first = begin.constant(np.float32([[0.5], [-0.5]]))
    begin.operators.append(Operator("ASSIGN_VARIABLE", (handle, first), (), "AssignVariableOptions"))
    keys = [
        writer.Signature("train", {"x": x, "y": y}, {"loss": loss}, 0),
        writer.Signature("infer", {"x": features}, {"output": result}, 1),
        writer.Signature("save", {}, {"doubled": doubled, "weights": saved}, 2),
    ]
    more = [ended(infer, [features], [result]), ended(save, [], [doubled, saved]), ended(begin, [], [])]
    return {"trainable": train.file([x, y], [loss], more=more, signatures=keys)}


def video() -> dict[str, bytes]:
    g = SmallGraph()
    frame, buffer = g.tensor("image", 1, 1, 2, 2, 3), g.tensor("buffer", 1, 12)
    count = g.tensor("frame_count", 1, kind="INT32")
    flat = g.add("RESHAPE", [frame], (1, 12), {"NewShape": [1, 12]})
    mixed = g.add(ADD, [flat, buffer], (1, 12))
    half = g.add(MULTIPLY, [mixed, g.constant(np.full((1, 12), 0.5, np.float32))], (1, 12))
    logits = g.dense(half, 1, 12, 4)
    next_count = g.add("ADD", [count, g.constant(np.int32([1]))], (1,), PLAIN, "INT32")
    inputs = {"image": frame, "stream/buffer": buffer, "stream/frame_count": count}
    outputs = {"logits": logits, "stream/buffer": half, "stream/frame_count": next_count}
    key = writer.Signature("serving_default", inputs, outputs)
    return {"movinet": g.file([frame, buffer, count], [logits, half, next_count], signatures=[key])}


def speech() -> dict[str, bytes]:
    encoder = SmallGraph()
    features = encoder.tensor("features", 1, -1, 4)
    louder = encoder.add(ADD, [features, features], (1, -1, 4))
    axis = encoder.constant(np.int32([1]))
    memory = encoder.add("MEAN", [louder, axis], (1, 1, 4), ("ReducerOptions", {"KeepDims": True}))
    decoder = SmallGraph()
    tokens, context = decoder.tensor("tokens", 1, -1, kind="INT32"), decoder.tensor("memory", 1, 1, 4)
    embedded = decoder.add("GATHER", [decoder.weights(6, 4), tokens], (1, -1, 4), {})
    attended = decoder.add("ADD", [embedded, context], (1, -1, 4), PLAIN)
    active = decoder.add(MAXIMUM, [attended, attended], (1, -1, 4))
    logits = decoder.add("BATCH_MATMUL", [active, decoder.weights(1, 4, 6)], (1, -1, 6), ("BatchMatMulOptions", {}))
    return {"encoder": encoder.file([features], [memory]), "decoder": decoder.file([tokens, context], [logits])}


def style() -> dict[str, bytes]:
    predict = SmallGraph()
    image = predict.tensor("style_image", 1, 4, 4, 3)
    bright = predict.add(MULTIPLY, [image, image], (1, 4, 4, 3))
    kernel = {"Padding": 1, "StrideW": 4, "StrideH": 4}
    weights = [predict.weights(5, 4, 4, 3), predict.weights(5)]
    bottleneck = predict.add("CONV_2D", [bright, *weights], (1, 1, 1, 5), ("Conv2DOptions", kernel))
    transform = SmallGraph()
    content, vector = transform.tensor("content_image", 1, -1, -1, 3), transform.tensor("mobilenet_conv", 1, 1, 1, 5)
    gain = transform.add("RESHAPE", [vector], (1, 5), {"NewShape": [1, 5]})
    gain = transform.add("RESHAPE", [transform.dense(gain, 1, 5, 3)], (1, 1, 1, 3), {"NewShape": [1, 1, 1, 3]})
    styled = transform.add("LOGISTIC", [transform.add("MUL", [content, gain], (1, -1, -1, 3), PLAIN)], (1, -1, -1, 3))
    stylized = transform.add(MAXIMUM, [styled, styled], (1, -1, -1, 3))
    return {
        "style_predict": predict.file([image], [bottleneck]),
        "style_transform": transform.file([content, vector], [stylized]),
    }


def spans() -> dict[str, bytes]:
    g = SmallGraph()
    ids, mask, segments = (g.tensor(name, 1, 8, kind="INT32") for name in ("ids", "mask", "segment_ids"))
    words = g.add("GATHER", [g.weights(20, 4), ids], (1, 8, 4), {})
    parts = g.add("GATHER", [g.weights(2, 4), segments], (1, 8, 4), {})
    seen = g.add("CAST", [g.add("RESHAPE", [mask], (1, 8, 1), {"NewShape": [1, 8, 1]}, "INT32")], (1, 8, 1), {})
    hidden = g.add("MUL", [g.add(ADD, [words, parts], (1, 8, 4)), seen], (1, 8, 4), PLAIN)
    both = g.add("BATCH_MATMUL", [hidden, g.weights(1, 4, 2)], (1, 8, 2), ("BatchMatMulOptions", {}))
    end, start = g.tensor("end_logits", 1, 8), g.tensor("start_logits", 1, 8)
    g.operators.append(Operator("UNPACK", (both,), (end, start), "UnpackOptions", {"Num": 2, "Axis": 2}))
    return {"mobilebert": g.file([ids, mask, segments], [end, start])}


def poses() -> dict[str, bytes]:
    g = SmallGraph()
    image = g.tensor("serving_default_input:0", 1, -1, -1, 3, kind="UINT8")
    real = g.add("CAST", [image], (1, -1, -1, 3), {})
    axes = g.constant(np.int32([1, 2]))
    mean = g.add("MEAN", [real, axes], (1, 3), ("ReducerOptions", {"KeepDims": False}))
    scaled = g.add(MULTIPLY, [mean, g.constant(np.full((1, 3), 1 / 255, np.float32))], (1, 3))
    people = g.add("LOGISTIC", [g.dense(scaled, 1, 3, 2 * 56)], (1, 112))
    return {"multipose": g.file([image], [g.add("RESHAPE", [people], (1, 2, 56), {"NewShape": [1, 2, 56]})])}


def commands() -> dict[str, bytes]:
    g = SmallGraph()
    samples, rate = g.tensor("decoded_sample_data", 256, 1), g.constant(np.int32(16000))
    spectrogram = g.tensor("spectrogram", 1, 3, 65)
    options = {"window_size": 128, "stride": 64, "magnitude_squared": True}
    custom = bytes(flexbuffers.Dumps(options))
    g.operators.append(Operator("AudioSpectrogram", (samples,), (spectrogram,), custom=custom))
    mfcc = g.tensor("mfcc", 1, 3, 5)
    options = {"upper_frequency_limit": 4000.0, "lower_frequency_limit": 20.0, "filterbank_channel_count": 10,
               "dct_coefficient_count": 5}  # fmt: skip
    custom = bytes(flexbuffers.Dumps(options))
    g.operators.append(Operator("Mfcc", (spectrogram, rate), (mfcc,), custom=custom))
    flat = g.add("RESHAPE", [mfcc], (1, 15), {"NewShape": [1, 15]})
    return {"commands": g.file([samples], [g.add("SOFTMAX", [g.dense(flat, 1, 15, 4)], (1, 4), {"Beta": 1.0})])}


def events() -> dict[str, bytes]:
    g = SmallGraph()
    waveform = g.tensor("waveform", -1)
    frames = g.add("RESHAPE", [waveform, g.constant(np.int32([-1, 8]))], (-1, 8), {"NewShape": [-1, 8]})
    power = g.add(MULTIPLY, [frames, frames], (-1, 8))
    weights = [g.weights(5, 8), g.weights(5)]
    embeddings = g.add("FULLY_CONNECTED", [power, *weights], (-1, 5), PLAIN)
    weights = [g.weights(3, 5), g.weights(3)]
    scores = g.add("LOGISTIC", [g.add("FULLY_CONNECTED", [embeddings, *weights], (-1, 3), PLAIN)], (-1, 3))
    return {"yamnet": g.file([waveform], [scores, embeddings, power])}


def generator() -> dict[str, bytes]:
    g = SmallGraph()
    token = g.tensor("token", 1, 1, kind="INT64")
    hidden = g.tensor("hidden", 1, 5, extra={"IsVariable": 1})
    word = g.add("RESHAPE", [g.add("GATHER", [g.weights(7, 4), token], (1, 1, 4), {})], (1, 4), {"NewShape": [1, 4]})
    weights = [g.weights(5, 4), g.weights(5, 5), g.weights(5)]
    state = g.add("RNN", [word, *weights, hidden], (1, 5), ("RNNOptions", {"FusedActivationFunction": 4}))
    logits = g.dense(state, 1, 5, 7)
    seeds = ("RandomOptions", {"Seed": 5, "Seed2": 8})
    chosen = g.add("MULTINOMIAL", [logits, g.constant(np.int32(1))], (1, 1), seeds, "INT64")
    return {"generator": g.file([token], [chosen, logits])}


# ------------------------------------------------------------------------------------------------ scripts

DETECTION = """
import numpy as np
from tflite_runtime.interpreter import Interpreter

def set_input_tensor(interpreter, image):
    input_tensor = interpreter.tensor(interpreter.get_input_details()[0]["index"])()[0]
    input_tensor[:, :] = image

def get_output_tensor(interpreter, index):
    return np.squeeze(interpreter.get_tensor(interpreter.get_output_details()[index]["index"]))

interpreter = Interpreter("detect.tflite")
interpreter.allocate_tensors()
_, height, width, _ = interpreter.get_input_details()[0]["shape"]
for frame in np.random.default_rng(1).integers(0, 256, (3, height, width, 3), np.uint8):
    set_input_tensor(interpreter, frame)
    interpreter.invoke()
    boxes, classes, scores = (get_output_tensor(interpreter, index) for index in range(3))
    for i in range(int(get_output_tensor(interpreter, 3))):
        if scores[i] >= 0.4:
            print({"bounding_box": boxes[i], "class_id": classes[i], "score": scores[i]})
"""

SELECTION = """
import numpy as np
import tensorflow as tf

interpreter = tf.lite.Interpreter(model_path="yolo.tflite", num_threads=1)
interpreter.allocate_tensors()
input_details, output_details = interpreter.get_input_details(), interpreter.get_output_details()
print([detail["shape_signature"] for detail in output_details])
for image in np.random.default_rng(2).random((4, *input_details[0]["shape"]), np.float32):
    interpreter.set_tensor(input_details[0]["index"], image)
    interpreter.invoke()
    selected = interpreter.get_tensor(output_details[0]["index"])
    boxes = interpreter.get_tensor(output_details[1]["index"])
    print(len(selected), selected.ravel().tolist(), boxes.shape, boxes[:, :4].max(axis=0))
"""

TRAINING = """
import numpy as np
import tensorflow as tf

interpreter = tf.lite.Interpreter(model_path="trainable.tflite")
interpreter.allocate_tensors()
train, infer = interpreter.get_signature_runner("train"), interpreter.get_signature_runner("infer")
save = interpreter.get_signature_runner("save")
rng = np.random.default_rng(3)
features = rng.random((40, 4, 2), np.float32)
before = infer(x=features[0])["output"]
losses = []
for epoch in range(3):
    for x in features:
        result = train(x=x, y=x @ np.float32([[2], [-1]]))
    losses.append(result["loss"])
    print("Finished %d epochs" % (epoch + 1), losses[-1])
after = infer(x=features[0])["output"]
print(before.ravel(), after.ravel(), save()["weights"].ravel())
print(interpreter.get_signature_list())
"""

VIDEO = """
import numpy as np
from tflite_runtime.interpreter import Interpreter

interpreter = Interpreter(model_path="movinet.tflite", num_threads=2)
runner = interpreter.get_signature_runner()
details = runner.get_input_details()
states = {name: np.zeros(detail["shape"], dtype=detail["dtype"]) for name, detail in details.items() if name != "image"}
labels = ["jump", "run", "sit", "walk"]
for frame in np.random.default_rng(4).random((4, *details["image"]["shape"]), np.float32):
    outputs = runner(**states, image=frame)
    logits = outputs.pop("logits")[0]
    states = outputs
    probabilities = np.exp(logits) / np.exp(logits).sum()
    best = np.argsort(probabilities)[::-1][:2]
    print(states["stream/frame_count"], [(labels[i], float(probabilities[i])) for i in best])
"""

SPEECH = """
import numpy as np
import tflite_runtime.interpreter as tflite

encoder, decoder = (tflite.Interpreter(f"{name}.tflite") for name in ("encoder", "decoder"))

def run(interpreter, *arrays):
    for detail, array in zip(interpreter.get_input_details(), arrays):
        interpreter.resize_tensor_input(detail["index"], array.shape)
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), arrays):
        interpreter.set_tensor(detail["index"], array)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])

for length in (5, 9):
    memory = run(encoder, np.random.default_rng(length).random((1, length, 4), np.float32))
    tokens = [1]
    while len(tokens) < 6 and tokens[-1] != 2:
        logits = run(decoder, np.array([tokens], np.int32), memory)
        tokens.append(int(logits[0, -1].argmax()))
    print(length, tokens, logits.shape, logits.sum())
"""

STYLE = """
import numpy as np
import tensorflow as tf

def run_style_predict(image):
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    return interpreter.tensor(interpreter.get_output_details()[0]["index"])()

def run_style_transform(bottleneck, image):
    input_details = transform.get_input_details()
    transform.resize_tensor_input(input_details[0]["index"], image.shape, strict=True)
    transform.allocate_tensors()
    transform.set_tensor(input_details[0]["index"], image)
    transform.set_tensor(input_details[1]["index"], bottleneck)
    transform.invoke()
    return transform.tensor(transform.get_output_details()[0]["index"])().copy()

interpreter = tf.lite.Interpreter(model_path="style_predict.tflite")
transform = tf.lite.Interpreter(model_path="style_transform.tflite")
rng = np.random.default_rng(5)
style_bottleneck = run_style_predict(rng.random((1, 4, 4, 3), np.float32))
print("Style Bottleneck Shape:", style_bottleneck.shape, style_bottleneck.ravel())
for size in (2, 3, 3):
    stylized = run_style_transform(style_bottleneck, rng.random((1, size, size, 3), np.float32))
    print("Stylized Image Shape:", stylized.shape, stylized.mean(), np.uint8(stylized * 255).max())
"""

SPANS = """
import numpy as np
from ai_edge_litert.interpreter import Interpreter

interpreter = Interpreter(model_path="mobilebert.tflite")
interpreter.allocate_tensors()
places = {detail["name"]: detail["index"] for detail in interpreter.get_input_details()}
results = {detail["name"]: detail["index"] for detail in interpreter.get_output_details()}
for question, context in (([3, 7], [9, 4, 11]), ([5], [12, 3, 8, 19])):
    ids = [1, *question, 2, *context][:8]
    mask, segments = [1] * len(ids), [0] * (len(question) + 2) + [1] * len(context)
    for name, values in (("ids", ids), ("mask", mask), ("segment_ids", segments[:8])):
        padded = np.zeros((1, 8), np.int32)
        padded[0, : len(values)] = values
        interpreter.set_tensor(places[name], padded)
    interpreter.invoke()
    start, end = (interpreter.get_tensor(results[f"{side}_logits"])[0] for side in ("start", "end"))
    spans = [(float(start[i] + end[j]), i, j) for i in range(8) for j in range(i, min(i + 4, 8))]
    for score, i, j in sorted(spans, reverse=True)[:3]:
        print(score, ids[i : j + 1])
"""

POSES = """
import numpy as np
import ai_edge_litert.interpreter as litert

interpreter = litert.Interpreter(model_path="multipose.tflite", num_threads=4)
for height, width in ((4, 6), (6, 4), (6, 4)):
    input_index = interpreter.get_input_details()[0]["index"]
    image = np.random.default_rng(height).integers(0, 256, (1, height, width, 3), np.uint8)
    if any(interpreter.get_input_details()[0]["shape"] != image.shape):
        interpreter.resize_tensor_input(input_index, image.shape, strict=True)
        interpreter.allocate_tensors()
    interpreter.set_tensor(input_index, image)
    interpreter.invoke()
    people = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    for person in people[0]:
        keypoints, box, score = person[:51].reshape(17, 3), person[51:55], person[55]
        nose = keypoints[0, :2] * [height, width]
        print("score %.4f" % score, "nose", nose, "box", box, int((keypoints[:, 2] > 0.5).sum()))
try:
    interpreter.resize_tensor_input(0, (1, 4, 6, 4), strict=True)
except RuntimeError as error:
    print(type(error).__name__)
"""

COMMANDS = """
import numpy as np
import tflite_runtime.interpreter as tflite

labels = ["silence", "unknown", "yes", "no"]
interpreter = tflite.Interpreter(model_path="commands.tflite", num_threads=None)
interpreter.allocate_tensors()
audio, output = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
for pitch in (0.1, 0.7, 2.0):
    samples = np.sin(pitch * np.arange(audio["shape"][0])).astype(audio["dtype"])
    interpreter.set_tensor(audio["index"], samples.reshape(audio["shape"]))
    interpreter.invoke()
    predictions = np.squeeze(interpreter.get_tensor(output["index"]))
    for node_id in predictions.argsort()[-2:][::-1]:
        print("%s (score = %.7f)" % (labels[node_id], predictions[node_id]))
"""

EVENTS = """
import numpy as np
import tensorflow as tf

with open("yamnet.tflite", "rb") as file:
    interpreter = tf.lite.Interpreter(model_content=file.read())
waveform_input_index = interpreter.get_input_details()[0]["index"]
scores_output_index, embeddings_output_index, spectrogram_output_index = (
    detail["index"] for detail in interpreter.get_output_details())
for seconds in (2, 5):
    waveform = np.zeros(8 * seconds, dtype=np.float32)
    waveform[::3] = 0.5
    interpreter.resize_tensor_input(waveform_input_index, [len(waveform)], strict=False)
    interpreter.allocate_tensors()
    interpreter.set_tensor(waveform_input_index, waveform)
    interpreter.invoke()
    scores, embeddings, spectrogram = (
        interpreter.get_tensor(scores_output_index),
        interpreter.get_tensor(embeddings_output_index),
        interpreter.get_tensor(spectrogram_output_index))
    print(scores.shape, embeddings.shape, spectrogram.shape)
    print(scores.mean(axis=0), ["music", "speech", "rain"][scores.mean(axis=0).argmax()], embeddings.sum())
"""

GENERATION = """
import numpy as np
import tflite_runtime.interpreter as tflite

words = ["the", "cat", "dog", "sat", "ran", "far", "."]
interpreter = tflite.Interpreter(model_path="generator.tflite")
interpreter.allocate_tensors()
token = interpreter.get_input_details()[0]
chosen, logits = interpreter.get_output_details()
hidden = next(d["index"] for d in interpreter.get_tensor_details() if d["name"] == "hidden")
for sentence in range(3):
    text, word = [], 0
    while len(text) < 6 and word != 6:
        text.append(words[word])
        interpreter.set_tensor(token["index"], np.array([[word]], token["dtype"]))
        interpreter.invoke()
        word = interpreter.get_tensor(chosen["index"])[0, 0]
    print(" ".join(text), interpreter.get_tensor(logits["index"]).max(), interpreter.get_tensor(hidden))
    interpreter.reset_all_variables()
    print(interpreter.get_tensor(hidden).any())
"""

SCRIPTS: dict[str, tuple[str, Callable[[], dict[str, bytes]]]] = {
    "object detection": (DETECTION, detector),
    "object detection with boxes that the model selects": (SELECTION, selector),
    "training on the device": (TRAINING, trainable),
    "video classification with streams": (VIDEO, video),
    "speech recognition": (SPEECH, speech),
    "style transfer": (STYLE, style),
    "question answering": (SPANS, spans),
    "poses of several people": (POSES, poses),
    "speech commands": (COMMANDS, commands),
    "audio events": (EVENTS, events),
    "text generation": (GENERATION, generator),
}


@pytest.fixture(autouse=True)
def _use_daemon(_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(_daemon.path))
    monkeypatch.chdir(tmp_path)
    add_other_names(monkeypatch, litert)
    yield
    gc.collect()
    wait_for_closers()


def devices(names: dict[str, Any]) -> set[str]:
    """Return the devices on which interpreters have their models, and those of further subgraphs."""
    found = [value for value in names.values() if isinstance(value, Interpreter)]
    found += [other for interpreter in found for other in interpreter._others.values()]
    return {each._allocation._model.device for each in found}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_the_same_on_the_hosted_runtime_after_one_changed_import(name: str) -> None:
    script, make = SCRIPTS[name]
    for file, content in make().items():
        Path(f"{file}.tflite").write_bytes(content)
    wanted, names = printed(script), dict[str, Any]()
    assert wanted
    assert printed(changed(script), names) == wanted
    assert devices(names) == {"litert"}
