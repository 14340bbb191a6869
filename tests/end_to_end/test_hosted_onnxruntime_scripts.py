"""Scripts for ONNX Runtime whose models only ONNX Runtime runs print the same after one changed import.

They make the calls of scripts that people have published; each docstring of a model names what is like it. Such a model
is executed by ONNX Runtime in the driver, because nnfmq's own engine refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, wait_for_closers
from support.onnx_runtime import onnx, runtime
from support.ort_scripts import answer, changed

import nnfmq.compat.onnxruntime as ours
from nnfmq.importers import file_format

RNG = np.random.default_rng(11)
FLOAT, INT32, INT64, BOOL, FLOAT16, DOUBLE = 1, 6, 7, 9, 10, 11
make = onnx.helper.make_node
Folder = Path


def info(name: str, *shape: int | str, kind: int = FLOAT) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, value: Any) -> Any:
    return onnx.numpy_helper.from_array(np.asarray(value), name)


def weights(name: str, *shape: int) -> Any:
    return constant(name, RNG.normal(0, 0.5, shape).astype(np.float32))


def save(path: Path, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], *constants: Any) -> None:
    graph = onnx.helper.make_graph(nodes, "graph", inputs, outputs, constants)
    domains = {"": 20, "ai.onnx.ml": 3, "com.microsoft": 1}
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
    onnx.save(onnx.helper.make_model(graph, ir_version=9, opset_imports=opsets, producer_name="tests"), path)


# ---- detectors: a script of YOLOv7's end-to-end export, and one of the zoo's Faster R-CNN

DETECTION = """
import numpy as np
import onnxruntime as ort

cuda = False
providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if cuda else ["CPUExecutionProvider"]
session = ort.InferenceSession("detector.onnx", providers=providers)
outname = [i.name for i in session.get_outputs()]
inname = [i.name for i in session.get_inputs()]
print(outname, inname, session.get_inputs()[0].shape, session.get_inputs()[0].type, session.get_outputs()[0].shape)
photo = np.load("photo.npy")
image = np.full((32, 32, 3), 114, np.uint8)
image[4:28] = photo
im = np.ascontiguousarray(np.expand_dims(image.transpose((2, 0, 1)), 0).astype(np.float32) / 255)
outputs = session.run(outname, {inname[0]: im})[0]
print(outputs.shape, outputs.dtype)
for i, (batch_id, x0, y0, x1, y1, cls_id, score) in enumerate(outputs):
    box = np.array([x0, y0, x1, y1]) - np.array([0, 4, 0, 4])
    print(i, int(batch_id), box.round().astype(np.int32).tolist(), int(cls_id), round(float(score), 3))
"""


def detector(folder: Folder) -> None:
    nodes = [
        make("Conv", ["images", "w"], ["features"], strides=[8, 8]),
        make("Reshape", ["features", "as rows"], ["flat"]),
        make("Split", ["flat"], ["raw", "logits"], axis=1, num_outputs=2),
        make("Transpose", ["raw"], ["turned"], perm=[0, 2, 1]),
        make("Abs", ["turned"], ["positive"]),
        make("Mul", ["positive", "scale"], ["boxes"]),
        make("Sigmoid", ["logits"], ["scores"]),
        make("NonMaxSuppression", ["boxes", "scores", "most", "iou", "least"], ["found"], center_point_box=1),
        make("Split", ["found"], ["batch", "class", "place"], axis=1, num_outputs=3),
        make("Concat", ["batch", "place"], ["where"], axis=1),
        make("GatherND", ["boxes", "where"], ["chosen"]),
        make("GatherND", ["scores", "found"], ["score"]),
        make("Unsqueeze", ["score", "last"], ["column"]),
        make("Cast", ["batch"], ["batch f"], to=FLOAT),
        make("Cast", ["class"], ["class f"], to=FLOAT),
        make("Concat", ["batch f", "chosen", "class f", "column"], ["output"], axis=1),
    ]
    constants = weights("w", 8, 3, 8, 8), constant("as rows", [1, 8, 16]), constant("scale", np.float32(9))
    limits = constant("most", [4]), constant("iou", np.float32([0.6])), constant("least", np.float32([0.4]))
    out = [info("output", "detections", 7)]
    save(
        folder / "detector.onnx", nodes, [info("images", 1, 3, 32, 32)], out, *constants, *limits, constant("last", [1])
    )
    np.save(folder / "photo.npy", RNG.integers(0, 256, (24, 32, 3)).astype(np.uint8))


REGIONS = """
import math
import numpy as np
import onnxruntime

sess = onnxruntime.InferenceSession("regions.onnx", None)
image = np.load("photo.npy").astype("float32").transpose(2, 0, 1)
image -= np.array([102.9801, 115.9465, 122.7717], "float32").reshape(3, 1, 1)
padded = np.zeros((3, math.ceil(image.shape[1] / 32) * 32, math.ceil(image.shape[2] / 32) * 32), dtype=np.float32)
padded[:, : image.shape[1], : image.shape[2]] = image
boxes, labels, scores = sess.run(None, {sess.get_inputs()[0].name: padded})
print([(node.name, node.type, node.shape) for node in sess.get_inputs() + sess.get_outputs()])
print(boxes.shape, labels.dtype, scores.shape)
for box, label, score in zip(boxes, labels, scores):
    if score > 0.3:
        print(label, np.round(box, 2).tolist(), round(float(score), 3))
"""


def regions(folder: Folder) -> None:
    nodes = [
        make("Unsqueeze", ["image", "first"], ["batch"]),
        make("RoiAlign", ["batch", "boxes", "zeros"], ["crops"], output_height=2, output_width=2, sampling_ratio=2),
        make("Flatten", ["crops"], ["rows"]),
        make("MatMul", ["rows", "w"], ["logits"]),
        make("Softmax", ["logits"], ["p"]),
        make("ReduceMax", ["p", "last"], ["scores"], keepdims=0),
        make("ArgMax", ["p"], ["labels"], axis=1, keepdims=0),
        make("Identity", ["boxes"], ["out"]),
    ]
    corners = np.float32([[1, 2, 9, 11], [0, 0, 20, 20], [5.5, 3, 17, 29], [12, 12, 14, 15]])
    constants = constant("first", [0]), constant("boxes", corners), constant("zeros", [0] * 4), constant("last", [1])
    outputs = [info("out", "n", 4), info("labels", "n", kind=INT64), info("scores", "n")]
    w = constant("w", RNG.normal(0, 0.01, (12, 5)).astype(np.float32))
    save(folder / "regions.onnx", nodes, [info("image", 3, "height", "width")], outputs, *constants, w)


# ---- scikit-learn: examples of sklearn-onnx

CLASSIFIER = """
import numpy
import onnxruntime as rt

X_test = numpy.load("iris.npy")
with open("logreg.onnx", "rb") as f:
    onx = f.read()
sess = rt.InferenceSession(onx, providers=["CPUExecutionProvider"])
print("inputs", [(i.name, i.type, i.shape) for i in sess.get_inputs()])
print("outputs", [(o.name, o.type, o.shape) for o in sess.get_outputs()])
res = sess.run(None, {"X": X_test.astype(numpy.float32)})
print("labels", res[0], res[0].dtype)
print("probabilities type:", type(res[1]), res[1].dtype)
print(numpy.round(res[1][:2], 5))
label = sess.run(["label"], {"X": X_test.astype(numpy.float32)[:1]})[0]
print(label.tolist(), sess.run([], {"X": X_test.astype(numpy.float32)[:0]})[0].shape)
"""


def logreg(folder: Folder) -> None:
    np.save(folder / "iris.npy", RNG.uniform(0, 7, (6, 4)))
    coefficients = RNG.normal(0, 1, 12)
    nodes = [
        make("LinearClassifier", ["X"], ["label", "raw"], domain="ai.onnx.ml", coefficients=coefficients.tolist(),
             intercepts=[0.2, -0.1, 0.3], classlabels_ints=[10, 12, 14], multi_class=1, post_transform="SOFTMAX"),
        make("Normalizer", ["raw"], ["probabilities"], domain="ai.onnx.ml", norm="L1"),
    ]  # fmt: skip
    outputs = [info("label", "n", kind=INT64), info("probabilities", "n", 3)]
    save(folder / "logreg.onnx", nodes, [info("X", "n", 4)], outputs)


FOREST = """
import numpy
from onnxruntime import InferenceSession, SessionOptions, GraphOptimizationLevel

so = SessionOptions()
so.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_EXTENDED
so.intra_op_num_threads = 1
so.add_session_config_entry("session.disable_prepacking", "1")
sess1 = InferenceSession("forest.onnx", so, providers=["CPUExecutionProvider"])
X = numpy.load("iris.npy")
for dtype in (numpy.float64, numpy.float32):
    try:
        got = sess1.run(None, {"X": X.astype(dtype)})[0]
        print(got.dtype, got.shape, [round(float(y), 9) for y in got.ravel()])
    except Exception as e:
        print(type(e).__name__, e)
meta = sess1.get_modelmeta()
print(meta.producer_name, meta.graph_name, meta.custom_metadata_map, sess1.get_providers())
"""


def forest(folder: Folder) -> None:
    split = onnx.helper.make_tensor("t", DOUBLE, [6], [3.3, 0, 0, 1.25, 0, 0])
    leaf = onnx.helper.make_tensor("u", DOUBLE, [4], [0.1, 0.7, -0.4, 1 / 3])
    trees = make(
        "TreeEnsembleRegressor", ["X"], ["variable"], domain="ai.onnx.ml", n_targets=1, target_ids=[0] * 4,
        nodes_treeids=[0, 0, 0, 1, 1, 1], nodes_nodeids=[0, 1, 2] * 2, nodes_featureids=[1, 0, 0, 3, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * 2,
        nodes_values_as_tensor=split, nodes_truenodeids=[1, 0, 0] * 2, nodes_falsenodeids=[2, 0, 0] * 2,
        target_treeids=[0, 0, 1, 1], target_nodeids=[1, 2] * 2, target_weights_as_tensor=leaf,
    )  # fmt: skip
    save(folder / "forest.onnx", [trees], [info("X", "n", 4, kind=DOUBLE)], [info("variable", "n", 1)])
    np.save(folder / "iris.npy", RNG.uniform(0, 7, (6, 4)))


# ---- PyTorch: the tutorial of exporting, here with GridSample; and a 3D network of a medical image

SUPER_RESOLUTION = """
import numpy as np
import onnxruntime

ort_session = onnxruntime.InferenceSession("warp.onnx", providers=["CPUExecutionProvider"])
x = np.load("frames.npy")
grid = np.stack(np.meshgrid(np.linspace(-1, 1, 5), np.linspace(-1, 1, 4)), -1).astype(np.float32)

def to_numpy(tensor):
    return np.asarray(tensor)

for batch in (1, 3):
    ort_inputs = {ort_session.get_inputs()[0].name: to_numpy(x[:batch]),
                  ort_session.get_inputs()[1].name: to_numpy(np.repeat(grid[None], batch, 0))}
    ort_outs = ort_session.run(None, ort_inputs)
    print(ort_outs[0].shape, np.round(ort_outs[0][-1, 0, 1], 4).tolist())
    np.testing.assert_allclose(ort_outs[0][:, :, 0, 0], x[:batch, :, 0, 0], rtol=1e-03, atol=1e-05)
img_out_y = np.uint8((ort_outs[0][0, 0] * 255.0).clip(0, 255))
print(img_out_y.tolist())
"""


def warp(folder: Folder) -> None:
    node = make("GridSample", ["x", "grid"], ["y"], mode="cubic", padding_mode="border", align_corners=1)
    inputs = [info("x", "batch", 2, 6, 6), info("grid", "batch", "h", "w", 2)]
    save(folder / "warp.onnx", [node], inputs, [info("y", "batch", 2, "h", "w")])
    np.save(folder / "frames.npy", RNG.uniform(0, 1, (3, 2, 6, 6)).astype(np.float32))


SEGMENTATION = """
import numpy as np
import onnxruntime as ort

opts = ort.SessionOptions()
opts.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
opts.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
opts.enable_mem_pattern = False
opts.log_severity_level = 3
sess = ort.InferenceSession("volume.onnx", sess_options=opts, providers=["CPUExecutionProvider"])
volume = np.load("volume.npy").astype(np.float16)
roi, votes = 4, np.zeros((8, 6, 6), np.int64)
for start in range(0, volume.shape[0], roi):
    patch = volume[None, None, start:start + roi]
    seg, prob = sess.run(["segmentation", "probability"], {"image": patch})
    votes[start:start + roi] = seg[0]
    print(seg.dtype, seg.shape, prob.dtype, round(float(prob.max()), 3))
print(np.unique(votes, return_counts=True)[1].tolist(), votes[3, 2].tolist())
"""


def volume(folder: Folder) -> None:
    nodes = [
        make("Cast", ["image"], ["wide"], to=FLOAT),
        make("Conv", ["wide", "w", "b"], ["c"], pads=[1] * 6),
        make("InstanceNormalization", ["c", "one", "zero"], ["n"]),
        make("LeakyRelu", ["n"], ["r"]),
        make("ConvTranspose", ["r", "v"], ["logits"], pads=[1] * 6),
        make("Softmax", ["logits"], ["p"], axis=1),
        make("Cast", ["p"], ["probability"], to=FLOAT16),
        make("ArgMax", ["p"], ["segmentation"], axis=1, keepdims=0),
    ]
    norm = constant("one", np.ones(4, np.float32)), constant("zero", np.zeros(4, np.float32))
    outputs = [info("segmentation", "n", "d", 6, 6, kind=INT64), info("probability", "n", 3, "d", 6, 6, kind=FLOAT16)]
    constants = weights("w", 4, 1, 3, 3, 3), weights("b", 4), weights("v", 4, 3, 3, 3, 3), *norm
    save(folder / "volume.onnx", nodes, [info("image", "n", 1, "d", 6, 6, kind=FLOAT16)], outputs, *constants)
    np.save(folder / "volume.npy", RNG.normal(0, 1, (8, 6, 6)))


# ---- transformers: greedy generation with a cache and I/O binding, and 4-bit weights with OrtValues

GENERATION = """
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("decoder.onnx", providers=["CPUExecutionProvider"])
input_ids = np.array([[3, 1, 4]], dtype=np.int64)
past = {"past_key": onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 2, 0, 8), np.float32)),
        "past_value": onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 2, 0, 8), np.float32))}
all_token_ids = input_ids
for step in range(6):
    io_binding = session.io_binding()
    io_binding.bind_cpu_input("input_ids", input_ids)
    for name, value in past.items():
        io_binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        io_binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(io_binding)
    logits, *present = io_binding.get_outputs()
    past = dict(zip(past, present))
    next_token = int(np.argmax(logits.numpy()[:, -1, :]))
    input_ids = np.array([[next_token]], dtype=np.int64)
    all_token_ids = np.concatenate([all_token_ids, input_ids], axis=-1)
    print(logits.shape(), logits.data_type(), present[0].shape(), logits.device_name())
print(all_token_ids.tolist(), np.round(io_binding.copy_outputs_to_cpu()[0][0, -1, :3], 4).tolist())
"""


def decoder(folder: Folder) -> None:
    attention = make(
        "GroupQueryAttention", ["q", "k", "v", "past_key", "past_value", "seqlens_k", "total"],
        ["mixed", "present_key", "present_value"], num_heads=2, kv_num_heads=2, domain="com.microsoft",
    )  # fmt: skip
    lengths = [
        make("Shape", ["past_key"], ["past length"], start=2, end=3),
        make("Shape", ["input_ids"], ["new length"], start=1),
        make("Add", ["past length", "new length"], ["length"]),
        make("Cast", ["length"], ["total"], to=INT32),
        make("Sub", ["total", "one"], ["seqlens_k"]),
    ]
    products = [make("MatMul", ["x", f"w{name}"], [name]) for name in "qkv"]
    rest = [make("Add", ["mixed", "x"], ["h"]), make("MatMul", ["h", "head"], ["logits"])]
    cache = ["batch", 2]
    inputs = [info("input_ids", "batch", "sequence", kind=INT64)]
    inputs += [info(f"past_{name}", *cache, "past_sequence", 8) for name in ("key", "value")]
    outputs = [info("logits", "batch", "sequence", 11)]
    outputs += [info(f"present_{name}", *cache, "past_sequence + sequence", 8) for name in ("key", "value")]
    nodes = [make("Gather", ["table", "input_ids"], ["x"]), *lengths, *products, attention, *rest]
    constants = [weights(f"w{name}", 16, 16) for name in "qkv"]
    constants += [weights("table", 11, 16), weights("head", 16, 11), constant("one", np.int32([1]))]
    save(folder / "decoder.onnx", nodes, inputs, outputs, *constants)


QUANTIZED = """
import numpy as np
import onnxruntime as ort

sess_options = ort.SessionOptions()
sess_options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
sess = ort.InferenceSession("int4.onnx", sess_options, providers=["CPUExecutionProvider"])
input_data = np.load("tokens.npy")
x = ort.OrtValue.ortvalue_from_numpy(input_data)
print(x.device_name(), x.shape(), x.data_type(), x.is_tensor(), np.array_equal(x.numpy(), input_data))
run_options = ort.RunOptions()
run_options.log_severity_level = 3
warm = sess.run([], {"x": x}, run_options)
for _ in range(3):
    y, large = sess.run_with_ort_values(["y", "large"], {"x": x}, run_options)
print(y.shape(), np.round(y.numpy()[0], 2).tolist(), np.array_equal(warm[0], y.numpy()))
print(large.data_type(), large.numpy().tolist())
out = np.zeros((4, 8), np.float32)
binding = sess.io_binding()
binding.bind_input("x", "cpu", 0, np.float32, x.shape(), x.data_ptr())
binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
sess.run_with_iobinding(binding, run_options)
print(np.array_equal(out, y.numpy()))
"""


def int4(folder: Folder) -> None:
    nodes = [
        make("MatMulNBits", ["x", "b", "scales"], ["y"], domain="com.microsoft", K=32, N=8, bits=4, block_size=32),
        make("Greater", ["y", "half"], ["mask"]),
        make("NonZero", ["mask"], ["large"]),
    ]
    packed = constant("b", RNG.integers(0, 256, (8, 1, 16)).astype(np.uint8))
    scales = constant("scales", RNG.uniform(0.01, 0.1, 8).astype(np.float32))
    outputs = [info("y", "tokens", 8), info("large", 2, "count", kind=INT64)]
    save(
        folder / "int4.onnx",
        nodes,
        [info("x", "tokens", 32)],
        outputs,
        packed,
        scales,
        constant("half", np.float32(0.5)),
    )
    np.save(folder / "tokens.npy", RNG.normal(0, 1, (4, 32)).astype(np.float32))


# ---- others: a voice whose length the model decides, errors of ONNX Runtime's own example, run_async

SPEECH = """
import numpy as np
import onnxruntime

model = onnxruntime.InferenceSession("voice.onnx", sess_options=onnxruntime.SessionOptions(),
                                     providers=["CPUExecutionProvider"])
for phonemes in ([1, 5, 2], [4, 4, 9, 0, 7], [1]):
    text = np.expand_dims(np.array(phonemes, dtype=np.int64), 0)
    text_lengths = np.array([text.shape[1]], dtype=np.int64)
    for scale in (1.0, 2.5):
        audio = model.run(None, {"input": text, "input_lengths": text_lengths,
                                 "scales": np.array([0.0, scale, 0.8], dtype=np.float32)})[0].squeeze((0, 1))
        peak = max(0.01, np.max(np.abs(audio)))
        pcm = np.clip(audio * (32767 / peak), -32767, 32767).astype("int16")
        print(audio.shape, audio.dtype, pcm[:6].tolist())
"""


def voice(folder: Folder) -> None:
    """Write a model of a voice: each phoneme sounds for a time that depends on its number and on a scale."""
    body_nodes = [
        make("Gather", ["samples", "i"], ["count"]),
        make("Gather", ["pitches", "i"], ["pitch"]),
        make("Range", ["zero", "count", "one"], ["steps"]),
        make("Cast", ["steps"], ["steps f"], to=FLOAT),
        make("Mul", ["steps f", "pitch"], ["phase"]),
        make("Sin", ["phase"], ["wave"]),
        make("Concat", ["before", "wave"], ["after"], axis=0),
        make("Identity", ["go"], ["go on"]),
    ]
    body_inputs = [info("i", kind=INT64), info("go", kind=BOOL), info("before", "n")]
    body = onnx.helper.make_graph(body_nodes, "body", body_inputs, [info("go on", kind=BOOL), info("after", "m")])
    nodes = [
        make("Squeeze", ["input", "first"], ["ids"]),
        make("Cast", ["ids"], ["ids f"], to=FLOAT),
        make("Gather", ["scales", "one"], ["length scale"]),
        make("Mul", ["ids f", "length scale"], ["lengths"]),
        make("Ceil", ["lengths"], ["whole"]),
        make("Cast", ["whole"], ["samples"], to=INT64),
        make("Gather", ["table", "ids"], ["pitches"]),
        make("Squeeze", ["input_lengths", "first"], ["phonemes"]),
        make("Loop", ["phonemes", "", "nothing"], ["audio"], body=body),
        make("Unsqueeze", ["audio", "both"], ["output"]),
    ]
    inputs = [info("input", "batch", "phonemes", kind=INT64), info("input_lengths", "batch", kind=INT64)]
    inputs.append(info("scales", 3))
    constants = [constant("zero", 0), constant("one", 1), constant("first", [0]), constant("both", [0, 1])]
    constants += [constant("nothing", np.zeros(1, np.float32)), weights("table", 10)]
    save(folder / "voice.onnx", nodes, inputs, [info("output", "batch", 1, "time")], *constants)


ERRORS = """
import numpy
import onnxruntime as rt
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

sess = rt.InferenceSession("lookup.onnx", providers=rt.get_available_providers())
input_name, output_name = sess.get_inputs()[0].name, sess.get_outputs()[0].name
feeds = [
    numpy.array([1, 2], dtype=numpy.int32), numpy.zeros((2, 3, 1), dtype=numpy.int64), numpy.array([[1, 2, 3]]),
    numpy.array([[7, 0]]), numpy.array([[1, 99]]), numpy.array([[1.5, 2]]), [[3, 4]], numpy.array([["a", "b"]]),
    3, numpy.array([[], []], dtype=numpy.int64),
]
for x in feeds:
    try:
        print(sess.run([output_name], {input_name: x})[0].tolist())
    except (Fail, InvalidArgument) as e:
        print(type(e).__name__, e)
    except RuntimeError as e:
        print("RuntimeError", str(e).splitlines()[0])
for outputs, feed in ((["misspelled"], {input_name: feeds[3]}), ([output_name], {"misspelled": feeds[3]}),
                      ([output_name], {}), (output_name, {input_name: feeds[3]})):
    try:
        print(sess.run(outputs, feed))
    except Exception as e:
        print(type(e).__name__)
"""


def lookup(folder: Folder) -> None:
    nodes = [make("Gather", ["table", "ids"], ["rows"]), make("Unique", ["rows"], ["unique"], sorted=1)]
    table = constant("table", np.arange(10) // 2 + 2**40)
    save(folder / "lookup.onnx", nodes, [info("ids", "n", 2, kind=INT64)], [info("unique", "m", kind=INT64)], table)


ASYNC = """
import threading
import numpy as np
import onnxruntime as onnxrt

class MyData:
    def __init__(self, id):
        self.id = id
        self.event = threading.Event()

    def save(self, res, err):
        self.res, self.err = res, err
        self.event.set()

def callback(res: np.ndarray, data: MyData, err: str) -> None:
    data.save(res, err)

so = onnxrt.SessionOptions()
so.intra_op_num_threads = 2
sess = onnxrt.InferenceSession("stats.onnx", so, providers=["CPUExecutionProvider"])
x = np.arange(12, dtype=np.float64).reshape(3, 4) - 5
for data, feed in ((MyData(1), x), (MyData(2), x[:1] * 0), (MyData(3), x.astype(np.float32))):
    try:
        sess.run_async(["places", "x_sum"], {"x": feed}, callback, data)
        data.event.wait(30)
        print(data.id, [each.tolist() for each in data.res], [str(each.dtype) for each in data.res], data.err)
    except Exception as e:
        print(type(e).__name__)
"""


def stats(folder: Folder) -> None:
    nodes = [make("Unique", ["x"], ["values", "places"], sorted=1), make("ReduceSum", ["x"], ["x_sum"])]
    outputs = [info("values", "n", kind=DOUBLE), info("places", "n", kind=INT64), info("x_sum", 1, 1, kind=DOUBLE)]
    save(folder / "stats.onnx", nodes, [info("x", "rows", 4, kind=DOUBLE)], outputs)


SCRIPTS: dict[str, tuple[str, Callable[[Folder], None]]] = {
    "a YOLO with its NMS": (DETECTION, detector),
    "a Faster R-CNN": (REGIONS, lambda folder: (detector(folder), regions(folder))[1]),
    "a classifier of scikit-learn": (CLASSIFIER, logreg),
    "a forest of scikit-learn in float64": (FOREST, forest),
    "a network of PyTorch with GridSample": (SUPER_RESOLUTION, warp),
    "a segmentation of volumes in float16": (SEGMENTATION, volume),
    "a decoder with its cache bound": (GENERATION, decoder),
    "weights of 4 bits and OrtValues": (QUANTIZED, int4),
    "a voice": (SPEECH, voice),
    "common errors": (ERRORS, lookup),
    "run_async": (ASYNC, stats),
}


@pytest.fixture(autouse=True)
def _use_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    monkeypatch.chdir(tmp_path)
    yield
    wait_for_closers()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_the_same_on_a_hosted_runtime_after_one_changed_import(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, write = SCRIPTS[name]
    write(tmp_path)
    printed, hosted = [], []
    for text in (script, changed(script)):
        names: dict[str, Any] = {}
        exec(compile(text, name, "exec"), names)
        printed.append(capsys.readouterr().out)
        hosted += [value._hosted is not None for value in names.values() if isinstance(value, ours.InferenceSession)]
        names.clear()  # functions of the script refer to it
    assert printed[1] == printed[0]
    assert printed[0].count("\n") > 1
    assert hosted == [True], "the driver did not execute it with ONNX Runtime"


# ---- single calls: results, classes of errors and their texts


def wide(folder: Folder) -> None:
    """Write a model of bfloat16."""
    save(folder / "wide.onnx", [make("Identity", ["x"], ["y"])], [info("x", "n", kind=16)], [info("y", "n", kind=16)])


IDS = np.array([[7, 0]])
WORDS = np.array([0x3F80, 0xC000], np.uint16)


def fed(ids: Any, *outputs: str) -> Callable[[Any, Any], Any]:
    return lambda ort, sessions: sessions["lookup"].run(outputs, {"ids": ids})


def with_output(kind: Any, *shape: int) -> Callable[[Any, Any], Any]:
    def run(ort: Any, sessions: Any) -> Any:
        binding, target = sessions["int4"].io_binding(), ort.OrtValue.ortvalue_from_shape_and_type(shape, kind)
        binding.bind_cpu_input("x", np.ones((4, 32), np.float32))
        binding.bind_ortvalue_output("y", target)
        binding.bind_output("large")
        sessions["int4"].run_with_iobinding(binding)
        return target.numpy(), binding.copy_outputs_to_cpu()

    return run


def words(ort: Any) -> Any:
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(WORDS, 16)


def bound_words(ort: Any, sessions: Any) -> Any:
    binding, found = sessions["wide"].io_binding(), np.zeros(2, np.uint16)
    binding.bind_ortvalue_input("x", words(ort))
    binding.bind_output("y", "cpu", 0, 16, [2], found.ctypes.data)
    sessions["wide"].run_with_iobinding(binding)
    return found


def with_entries(ort: Any, sessions: Any) -> Any:
    options = ort.SessionOptions()
    for key, value in (("session.dynamic_block_base", "4"), ("mlas.disable_kleidiai", "1"), ("acme.level", "3")):
        options.add_session_config_entry(key, value)
    options.add_session_config_entry("session.intra_op.spin_duration_us", "10")
    return ort.InferenceSession("lookup.onnx", options).run(None, {"ids": IDS})


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all outputs": fed(IDS),
    "an output twice": fed(IDS, "unique", "unique"),
    "a list": fed([[7, 0]]),
    "no elements": fed(IDS[:0]),
    "Fortran's order": fed(np.asfortranarray([[1, 2], [3, 4]])),
    "no input": lambda ort, sessions: sessions["lookup"].run(None, {"other": IDS}),
    "another input": lambda ort, sessions: sessions["lookup"].run(None, {"ids": IDS, "other": IDS}),
    "another output": fed(IDS, "other"),
    "another type": fed(IDS.astype(np.int32)),
    "another rank": fed(IDS[0]),
    "another size": fed(np.zeros((1, 3), np.int64)),
    "a tuple": fed(((7, 0),)),
    "a number": fed(7),
    "an index out of bounds": fed(IDS + 5),
    "an output in memory of the caller": with_output(np.float32, 4, 8),
    "an output of another size": with_output(np.float32, 4, 9),
    "an output of another rank": with_output(np.float32, 32),
    "an output of another type": with_output(np.float64, 4, 8),
    "no output bound": lambda ort, sessions: sessions["int4"].run_with_iobinding(sessions["int4"].io_binding()),
    "another name bound": lambda ort, sessions: sessions["int4"].io_binding().bind_cpu_input("other", IDS),
    "described bfloat16": lambda ort, sessions: [str(n) for n in sessions["wide"].get_inputs()],
    "bfloat16": lambda ort, sessions: sessions["wide"].run_with_ort_values(None, {"x": words(ort)})[0].data_type(),
    "bfloat16 in memory of the caller": bound_words,
    "bfloat16 as an array": lambda ort, sessions: sessions["wide"].run(None, {"x": words(ort)}),
    "words for bfloat16": lambda ort, sessions: sessions["wide"].run(None, {"x": WORDS}),
    "configuration entries": with_entries,
}


def test_calls_of_hosted_sessions_have_onnx_runtime_s_results_and_errors(tmp_path: Path) -> None:
    for write in (lookup, int4, wide):
        write(tmp_path)
    made = {
        ort: {name: ort.InferenceSession(f"{name}.onnx") for name in ("lookup", "int4", "wide")}
        for ort in (runtime, ours)
    }
    for name, call in CALLS.items():
        found, wanted = (answer(lambda ort=ort, call=call: call(ort, made[ort])) for ort in (ours, runtime))
        assert found == wanted, name
    assert all(session._hosted is not None for session in made[ours].values())


def test_a_hosted_session_reads_its_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup(tmp_path)
    read, source = [], file_format.read_source
    monkeypatch.setattr(file_format, "read_source", lambda *given: read.append(given) or source(*given))
    assert ours.InferenceSession("lookup.onnx").run(None, {"ids": IDS})[0].tolist() == [2**40, 2**40 + 3]
    assert read == [("lookup.onnx",)]
