"""The runtimes that model_bench.py compares with: LiteRT, ONNX Runtime and OpenVINO, each in its best configuration.

Each is a context manager that yields the loaded model. If a runtime has several API variants, or reads the model in
several forms, it yields a step for each.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from latency_baselines import BaselineUnavailable
from model_bench_jobs import Array, Runner, RunnerJob, Step, inputs_for, load_source, make_step, states_of


@contextmanager
def _litert(job: RunnerJob) -> Iterator[Runner]:
    """LiteRT with its default delegate, XNNPACK; it keeps states itself."""
    try:
        from ai_edge_litert.interpreter import Interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise BaselineUnavailable("ai-edge-litert is not installed: pip install 'nnfmq[bench]'") from None
    with _captured_stderr() as captured:
        interpreter = Interpreter(model_path=str(job.source), num_threads=len(job.cpus))
        interpreter.allocate_tensors()
    details = {"threads": len(job.cpus), "delegate": "XNNPACK" if "XNNPACK" in captured[0] else "none"}
    model = load_source(job.source)
    inputs = inputs_for(model.inputs)
    input_indexes = [detail["index"] for detail in interpreter.get_input_details()]
    output_indexes = [detail["index"] for detail in interpreter.get_output_details()]
    writes = list(zip(input_indexes, inputs, strict=True))

    def step() -> list[Array]:
        for index, array in writes:
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in output_indexes]

    yield Runner({"set, invoke, get": step}, (), details)


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
def _onnx_runtime(job: RunnerJob) -> Iterator[Runner]:
    """ONNX Runtime with the model's ONNX export, all optimizations on, by `run` and by I/O binding."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime as runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from tflite_to_onnx import export_to_onnx
    except ImportError as error:
        raise BaselineUnavailable(f"{error.name} is not installed: pip install 'nnfmq[bench]'") from None
    model = load_source(job.source)
    variants: dict[str, Step] = {}
    for weights in _weight_types(model):
        exported = export_to_onnx(model.model, weights)
        session = _create_session(runtime, exported, len(job.cpus))
        inputs = [exported.to_onnx_input(array) for array in inputs_for(model.inputs)]
        for name, make in {"run": _run_variant, "bound": _io_binding_variant}.items():
            variants[f"{name}, weights {weights}"] = _restore_int8(make(session, inputs, states_of(model)), exported)
    yield Runner(variants, (), {"threads": len(job.cpus)})


def _weight_types(model: Any) -> tuple[str, ...]:
    """Return the weight types to try: with int8, results are right only on CPUs with VNNI."""
    is_quantized = not any(info.dtype == "float32" for info in model.inputs)
    has_vnni = "vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ("uint8", "int8") if is_quantized and has_vnni else ("uint8",)


def _create_session(runtime: Any, exported: Any, threads: int) -> Any:
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return runtime.InferenceSession(exported.proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _restore_int8(step: Step, exported: Any) -> Step:
    """Return the step, or one whose outputs are int8 views of the shifted uint8 outputs."""
    return (lambda: [exported.from_onnx_output(array) for array in step()]) if exported.is_shifted else step


def _run_variant(session: Any, inputs: Sequence[Array], states: Sequence[Array]) -> Step:
    names = [described.name for described in session.get_inputs()]
    feeds, run = dict(zip(names, [*inputs, *states], strict=True)), session.run
    state_names = names[len(inputs) :]

    def step() -> list[Array]:
        outputs: list[Array] = run(None, feeds)
        feeds.update(zip(state_names, outputs[len(outputs) - len(states) :], strict=True))
        return outputs[: len(outputs) - len(states)]

    return step


def _io_binding_variant(session: Any, inputs: Sequence[Array], states: Sequence[Array]) -> Step:
    binding = session.io_binding()
    input_buffers = [array.copy() for array in (*inputs, *states)]
    output_buffers = [np.zeros(o.shape, input_buffers[0].dtype) for o in session.get_outputs()]
    for described, array in zip(session.get_inputs(), input_buffers, strict=True):
        binding.bind_input(described.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for described, array in zip(session.get_outputs(), output_buffers, strict=True):
        binding.bind_output(described.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    return make_step(inputs, input_buffers, output_buffers, lambda: session.run_with_iobinding(binding))


@contextmanager
def _openvino(job: RunnerJob) -> Iterator[Runner]:
    """OpenVINO with the .tflite file, if it reads that, and with the model's ONNX export; all arrays are bound."""
    try:
        import openvino  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from tflite_to_onnx import export_to_onnx
    except ImportError as error:
        raise BaselineUnavailable(f"{error.name} is not installed: pip install 'nnfmq[bench]'") from None
    core, model = openvino.Core(), load_source(job.source)
    # In bfloat16, which it prefers on some CPUs, results would differ from those of the other runners.
    core.set_property("CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": len(job.cpus),
                              "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False})  # fmt: skip
    inputs, states, variants = inputs_for(model.inputs), states_of(model), {}
    if isinstance(job.source, Path) and not states:  # states of a .tflite file are not read
        variants["tflite"] = _openvino_step(core, core.read_model(job.source), inputs, states)
    for weights in _weight_types(model):
        exported = export_to_onnx(model.model, weights)
        shifted = [exported.to_onnx_input(array) for array in inputs]
        step = _openvino_step(core, core.read_model(exported.proto.SerializeToString()), shifted, states)
        variants[f"onnx, weights {weights}"] = _restore_int8(step, exported)
    yield Runner(variants, (), {"threads": len(job.cpus)})


def _openvino_step(core: Any, model: Any, inputs: Sequence[Array], states: Sequence[Array]) -> Step:
    from openvino import Tensor

    compiled = core.compile_model(model, "CPU")
    request = compiled.create_infer_request()
    input_buffers = [array.copy() for array in (*inputs, *states)]
    output_buffers = [np.zeros(tuple(o.shape), o.element_type.to_dtype()) for o in compiled.outputs]
    for index, array in enumerate(input_buffers):
        request.set_input_tensor(index, Tensor(array, shared_memory=True))
    for index, array in enumerate(output_buffers):
        request.set_output_tensor(index, Tensor(array, shared_memory=True))
    return make_step(inputs, input_buffers, output_buffers, lambda: request.infer(share_outputs=True))


BASELINE_RUNNERS: dict[str, Callable[[RunnerJob], Any]] = {
    "LiteRT": _litert,
    "ONNX Runtime": _onnx_runtime,
    "OpenVINO": _openvino,
}
