"""The runtimes that are compared with: LiteRT, ONNX Runtime and OpenVINO, each in its best configuration.

Each is a context manager that yields the loaded model. If a runtime has several API variants, or reads the model in
several forms, it yields a step for each. A runtime that cannot read a model's file gets the model's ONNX export.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.lab.bench.steps import Array, Runner, Step, make_step, states_of
from nnfmq.lab.child_processes import RunnerUnavailable

__all__ = ["PEERS", "PeerJob", "loadable", "opened_peer"]

INSTALL = "pip install 'nnfmq[bench]'"


@dataclass(frozen=True, slots=True)
class PeerJob:
    """A model for a peer: the file, what `nnfmq.load` made of it, and the number of threads."""

    path: Path
    model: Any
    threads: int

    @property
    def is_onnx(self) -> bool:
        """True if the file is read as ONNX."""
        return self.path.suffix.lower() == ".onnx"


@contextmanager
def opened_peer(name: str, job: PeerJob) -> Iterator[Runner]:
    """Load a model into the peer of this name in `PEERS`, and yield it.

    Raises:
        RunnerUnavailable: If its package is not installed, or it cannot load the model.
    """
    opened = PEERS[name](job)
    try:
        runner = opened.__enter__()
    except (InvalidArgument, RuntimeError, ValueError) as error:  # the peers' own errors are RuntimeErrors
        raise RunnerUnavailable(f"{name} cannot load the model: {' '.join(str(error).split())}") from error
    try:
        yield runner
    finally:
        opened.__exit__(None, None, None)


@contextmanager
def _litert(job: PeerJob) -> Iterator[Runner]:
    """LiteRT with its default delegate, XNNPACK; it keeps states itself."""
    try:
        from ai_edge_litert.interpreter import Interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise RunnerUnavailable(f"ai-edge-litert is not installed: {INSTALL}") from None
    if job.is_onnx:
        raise RunnerUnavailable("LiteRT reads .tflite files only")
    with _captured_stderr() as captured:
        interpreter = Interpreter(model_path=str(job.path), num_threads=job.threads)
        details = interpreter.get_input_details()
        for detail, info in zip(details, job.model.inputs, strict=True):
            if tuple(detail["shape"]) != info.shape:
                interpreter.resize_tensor_input(detail["index"], info.shape)
        interpreter.allocate_tensors()
    delegate = "XNNPACK" if "XNNPACK" in captured[0] else "none"
    input_indexes = [detail["index"] for detail in details]
    output_indexes = [detail["index"] for detail in interpreter.get_output_details()]

    def step(inputs: Sequence[Array]) -> list[Array]:
        for index, array in zip(input_indexes, inputs, strict=True):
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in output_indexes]

    yield Runner({"set, invoke, get": step}, (), {"threads": job.threads, "delegate": delegate})


@contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Capture a library's stderr, because LiteRT reports its delegate only there. After an error, print it."""
    captured: list[str] = []
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        except BaseException:
            os.write(stderr, _read_all(file))
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.append(_read_all(file).decode(errors="replace"))


def _read_all(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


@contextmanager
def _onnx_runtime(job: PeerJob) -> Iterator[Runner]:
    """ONNX Runtime, all optimizations on, by `run` and by I/O binding; with the model's ONNX export if needed."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime as runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]

        from nnfmq.lab.bench import onnx_export
    except ImportError as error:
        raise RunnerUnavailable(f"{error.name} is not installed: {INSTALL}") from None
    if job.is_onnx:
        session = _create_session(runtime, str(job.path), job.threads)
        yield Runner(_file_variants(session), (), {"threads": job.threads})
        return
    variants: dict[str, Step] = {}
    for weights in _weight_types(job.model):
        exported = onnx_export.export_to_onnx(job.model.model, weights)
        session = _create_session(runtime, exported.proto.SerializeToString(), job.threads)
        for name, make in {"run": _run_variant, "bound": _io_binding_variant}.items():
            variants[f"{name}, weights {weights}"] = _shifted(make(session, states_of(job.model)), exported)
    yield Runner(variants, (), {"threads": job.threads})


def _weight_types(model: Any) -> tuple[str, ...]:
    """Return the weight types to try: with int8, results are right only on CPUs with VNNI."""
    is_quantized = not any(info.dtype == "float32" for info in model.inputs)
    has_vnni = "vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ("uint8", "int8") if is_quantized and has_vnni else ("uint8",)


def _create_session(runtime: Any, model: str | bytes, threads: int) -> Any:
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _shifted(step: Step, exported: Any) -> Step:
    """Return the step, or one that converts between the int8 values of the model and the uint8 ones of its export."""
    if not exported.is_shifted:
        return step

    def converted(inputs: Sequence[Array]) -> list[Array]:
        outputs = step([exported.to_onnx_input(array) for array in inputs])
        return [exported.from_onnx_output(array) for array in outputs]

    return converted


def _file_variants(session: Any) -> dict[str, Step]:
    """Return the steps of an .onnx file, which has no states: without sizes that it leaves open, also a bound one."""
    variants = {"run": _file_variant(session)}
    described = [*session.get_inputs(), *session.get_outputs()]
    if all(each.type in _ORT_TYPES and all(isinstance(size, int) for size in each.shape) for each in described):
        variants["bound"] = _io_binding_variant(session, ())
    return variants


def _file_variant(session: Any) -> Step:
    """Return the step of an .onnx file. Inputs have its types; `nnfmq.load` gives 64-bit integers 32 bits."""
    names = [described.name for described in session.get_inputs()]
    is_wide = [described.type == "tensor(int64)" for described in session.get_inputs()]
    run = session.run

    def step(inputs: Sequence[Array]) -> list[Array]:
        arrays = [array.astype(np.int64) if wide else array for array, wide in zip(inputs, is_wide, strict=True)]
        outputs: list[Array] = run(None, dict(zip(names, arrays, strict=True)))
        return outputs

    return step


def _run_variant(session: Any, states: Sequence[Array]) -> Step:
    names = [described.name for described in session.get_inputs()]
    count = len(names) - len(states)
    feeds, run = dict(zip(names[count:], states, strict=True)), session.run
    input_names, state_names = names[:count], names[count:]

    def step(inputs: Sequence[Array]) -> list[Array]:
        feeds.update(zip(input_names, inputs, strict=True))
        outputs: list[Array] = run(None, feeds)
        feeds.update(zip(state_names, outputs[len(outputs) - len(states) :], strict=True))
        return outputs[: len(outputs) - len(states)]

    return step


def _io_binding_variant(session: Any, states: Sequence[Array]) -> Step:
    binding, described = session.io_binding(), session.get_inputs()
    count = len(described) - len(states)
    input_buffers = [np.zeros(each.shape, _ORT_TYPES[each.type]) for each in described[:count]]
    input_buffers += [array.copy() for array in states]
    output_buffers = [np.zeros(each.shape, _ORT_TYPES[each.type]) for each in session.get_outputs()]
    for each, array in zip(described, input_buffers, strict=True):
        binding.bind_input(each.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for each, array in zip(session.get_outputs(), output_buffers, strict=True):
        binding.bind_output(each.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    return make_step(count, input_buffers, output_buffers, lambda: session.run_with_iobinding(binding))


_ORT_TYPES = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8,
    "tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_,
}  # fmt: skip


@contextmanager
def _openvino(job: PeerJob) -> Iterator[Runner]:
    """OpenVINO with the model's file, and if that is a .tflite file with its ONNX export too; all arrays are bound."""
    try:
        import openvino  # type: ignore[import-not-found, import-untyped, unused-ignore]

        from nnfmq.lab.bench import onnx_export
    except ImportError as error:
        raise RunnerUnavailable(f"{error.name} is not installed: {INSTALL}") from None
    core = openvino.Core()
    # In bfloat16, which it prefers on some CPUs, results would differ from those of the other runners.
    core.set_property("CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads,
                              "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False})  # fmt: skip
    states = states_of(job.model)

    def from_file() -> Step:
        return _openvino_step(core, core.read_model(job.path), job.model.inputs, states)

    def from_export(weights: str) -> Step:
        exported = onnx_export.export_to_onnx(job.model.model, weights)
        read = core.read_model(exported.proto.SerializeToString())
        return _shifted(_openvino_step(core, read, (), states), exported)

    forms: dict[str, Callable[[], Step]] = {} if states else {job.path.suffix[1:]: from_file}  # it reads no states
    for weights in () if job.is_onnx else _weight_types(job.model):
        forms[f"onnx, weights {weights}"] = partial(from_export, weights)
    yield Runner(loadable(forms), (), {"threads": job.threads})


def loadable(forms: Mapping[str, Callable[[], Step]]) -> dict[str, Step]:
    """Return the steps of the forms of a model that can be loaded. If there are none, raises the last one's error."""
    steps: dict[str, Step] = {}
    failed: Exception | None = None
    for name, load in forms.items():
        try:
            steps[name] = load()
        except (InvalidArgument, RuntimeError) as error:
            failed = error
    if failed is not None and not steps:
        raise failed
    return steps


def _openvino_step(core: Any, model: Any, infos: Sequence[Any], states: Sequence[Array]) -> Step:
    """Return a step with bound arrays, with the shapes of `infos` if the file has others."""
    from openvino import Tensor

    ports = list(zip(infos, model.inputs, strict=False))
    if any(port.partial_shape.is_dynamic or tuple(port.shape) != info.shape for info, port in ports):
        model.reshape({index: list(info.shape) for index, info in enumerate(infos)})
    compiled = core.compile_model(model, "CPU")
    request = compiled.create_infer_request()
    count = len(compiled.inputs) - len(states)
    input_buffers = [np.zeros(tuple(i.shape), i.element_type.to_dtype()) for i in compiled.inputs[:count]]
    input_buffers += [array.copy() for array in states]
    output_buffers = [np.zeros(tuple(o.shape), o.element_type.to_dtype()) for o in compiled.outputs]
    for index, array in enumerate(input_buffers):
        request.set_input_tensor(index, Tensor(array, shared_memory=True))
    for index, array in enumerate(output_buffers):
        request.set_output_tensor(index, Tensor(array, shared_memory=True))
    return make_step(count, input_buffers, output_buffers, lambda: request.infer(share_outputs=True))


PEERS: dict[str, Callable[[PeerJob], AbstractContextManager[Runner]]] = {
    "LiteRT": _litert,
    "ONNX Runtime": _onnx_runtime,
    "OpenVINO": _openvino,
}
"""By their names in reports."""
