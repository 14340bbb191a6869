"""The runners of model_bench.py: each loads a model once in its own process, then runs trials on request.

A *step* is timed: write the input, execute the model, read the output. States of a recurrent model are copied from one
step's outputs to the next step's inputs, within the step, unless the runtime keeps them itself. If a runtime has
several API variants, all are tried before the first trial and the fastest is used; the report has its name. A runner is
pinned to its CPUs before it creates threads, which decides their number.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cpu_pinning
import numpy as np
import numpy.typing as npt
from bench_processes import BenchmarkFailed, set_time_limit
from latency_baselines import BaselineUnavailable
from latency_client import CLIENT_WINDOW, SERVER_WINDOW
from measure_capabilities import random_input

import nnfmq
from nnfmq.cli.console import open_client
from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import ExecutionPreference
from nnfmq.runtime.model_state import initial_values

if TYPE_CHECKING:
    from nnfmq.hal.types import Model

Array = npt.NDArray[Any]
Step = Callable[[], Sequence[Array]]
SUSTAINED = ExecutionPreference.SUSTAINED_SPEED  # machine code, without a baseline program that runs first
_TRIALS_PER_VARIANT = 20  # of each API variant, to find the fastest
_SEED = 7


@dataclass(frozen=True, slots=True)
class GeneratedModel:
    """A model that is not from a file, with the attributes of `nnfmq.LoadedModel`."""

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """One runner; sent to its process. It computes on `cpus`, one thread per CPU."""

    kind: str
    source: Path | GeneratedModel
    cpus: tuple[int, ...]
    client_cpus: tuple[int, ...] = ()
    window_us: float | None = None  # None: the default window
    connect: str = "embedded"
    limit_s: int = 120


@dataclass(frozen=True, slots=True)
class Trial:
    """A request to a runner: `count` steps that are timed, after `warm_up` steps that are not."""

    count: int
    warm_up: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a runner: its processes, its details, and the outputs of its first step."""

    pids: tuple[int, ...]
    details: dict[str, Any]
    outputs: list[Array]


@dataclass(frozen=True, slots=True)
class Runner:
    """A loaded model. `variants` are steps by API variant, of which the fastest is used."""

    variants: Mapping[str, Step]
    pids: tuple[int, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def child_main(connection: Connection, job: RunnerJob) -> None:
    """Report that the runner is ready, then run the requested trials and send their times in ns. Entry point."""
    set_time_limit(job.limit_s)
    try:
        cpu_pinning.pin_to(0, job.client_cpus or job.cpus)
        with RUNNERS[job.kind](job) as runner:
            _serve(connection, job, runner)
    except BaselineUnavailable as missing:
        connection.send(missing)
    except (BenchmarkFailed, NnfmqError, ImportError, OSError) as error:
        connection.send(BenchmarkFailed(f"{job.kind}: {type(error).__name__}: {error}"))
    finally:
        connection.close()


def _serve(connection: Connection, job: RunnerJob, runner: Runner) -> None:
    outputs = [np.array(array) for array in next(iter(runner.variants.values()))()]
    connection.send(Ready((os.getpid(), *runner.pids), runner.details, outputs))
    step = None
    while True:
        set_time_limit(0)  # no limit while other runners compute; the connection closes when the benchmark ends
        try:
            trial = connection.recv()
        except EOFError:
            return
        set_time_limit(job.limit_s)
        with np.errstate(all="ignore"):
            if step is None:
                step, runner.details["api_variant"] = fastest_variant(runner.variants)
            timed(step, trial.warm_up)
            connection.send((timed(step, trial.count), runner.details))


def fastest_variant(variants: Mapping[str, Step]) -> tuple[Step, str]:
    """Return the variant with the least median time, and its name; the trials of several are interleaved."""
    if len(variants) == 1:
        return next((step, name) for name, step in variants.items())
    times: dict[str, list[int]] = {name: [] for name in variants}
    for name, step in [*variants.items()] * _TRIALS_PER_VARIANT:
        times[name] += timed(step, 1)
    best = min(times, key=lambda name: statistics.median(times[name]))
    return variants[best], best


def timed(step: Step, count: int) -> list[int]:
    """Return the time of each of `count` steps, in ns."""
    clock, samples = time.perf_counter_ns, [0] * count
    for index in range(count):
        begin = clock()
        step()
        samples[index] = clock() - begin
    return samples


# ---- nnfmq


def load_source(source: Path | GeneratedModel) -> Any:
    """Return the generated model itself, or the loaded file."""
    return source if isinstance(source, GeneratedModel) else nnfmq.load(source)


def inputs_for(infos: Sequence[TensorInfo]) -> list[Array]:
    """Return random arrays, the same for every runner."""
    random = np.random.default_rng(_SEED)
    return [random_input(info, random) for info in infos]


def states_of(model: Any) -> tuple[Array, ...]:
    """Return the initial values of a model's states, which a runtime without states has as inputs."""
    return initial_values(getattr(model, "states", ()))


def make_step(inputs: Sequence[Array], input_buffers: Sequence[Array], output_buffers: Sequence[Array],
              run: Callable[[], object]) -> Step:  # fmt: skip
    """Return the step of a runtime that reads `input_buffers` and writes `output_buffers` in place.

    Buffers beyond those of `inputs` are the model's states.
    """
    writes = list(zip(input_buffers, inputs, strict=False))
    states = input_buffers[len(inputs) :]
    first_state = len(output_buffers) - len(states)
    new_outputs, state_outputs = output_buffers[:first_state], output_buffers[first_state:]
    state_copies = list(zip(states, state_outputs, strict=True))

    def step() -> list[Array]:
        for buffer, array in writes:
            buffer[...] = array
        run()
        outputs = [array.copy() for array in new_outputs]
        for state, new_state in state_copies:
            state[...] = new_state
        return outputs

    return step


@contextmanager
def _in_process(job: RunnerJob) -> Iterator[Runner]:
    """The compiling engine, called directly."""
    from nnfmq.engines.compiled.partition import prepare
    from nnfmq.engines.compiled.thread_pool import default_thread_pool

    model = load_source(job.source)
    inputs = inputs_for(model.inputs)
    states = states_of(model)
    input_buffers = [*(array.copy() for array in inputs), *states]
    output_buffers = [*(np.zeros(i.shape, i.dtype) for i in model.outputs), *map(np.zeros_like, states)]
    begin = time.perf_counter()
    program = prepare(model.model)
    details = {"prepare_s": time.perf_counter() - begin, "threads": default_thread_pool().worker_count + 1}
    execution = program.bind(input_buffers, output_buffers)
    try:
        yield Runner({"bound": make_step(inputs, input_buffers, output_buffers, execution.run)}, (), details)
    finally:
        default_thread_pool().stop()


@contextmanager
def _burst(job: RunnerJob) -> Iterator[Runner]:
    """The device `compiled` of a driver process, over a burst; arrays are written to and read from its memory."""
    if job.window_us is not None:
        os.environ[CLIENT_WINDOW] = os.environ[SERVER_WINDOW] = str(job.window_us)
    model = load_source(job.source)
    with ExitStack() as stack:
        client = stack.enter_context(open_client(job.connect))
        cpu_pinning.pin_to(client.worker_pid, job.cpus)  # the size of its thread pool follows its affinity
        device = client.device("compiled")
        begin = time.perf_counter()
        prepared = stack.enter_context(device.prepare(model, preference=SUSTAINED, timeout=job.limit_s))
        details = {"prepare_s": time.perf_counter() - begin, "threads": len(job.cpus)}
        # When a burst is created, each process decides by the number of its allowed CPUs whether it polls.
        for pid in (0, client.worker_pid):
            cpu_pinning.pin_process(pid, None)
        burst = stack.enter_context(prepared.burst())
        inputs = inputs_for(model.inputs)
        for buffer, array in zip(burst.inputs, inputs, strict=True):
            buffer[...] = array
        cpu_pinning.pin_to(client.worker_pid, job.cpus)
        cpu_pinning.pin_to(0, job.client_cpus)
        outputs = burst.outputs

        def run() -> None:
            burst.execute(out=outputs, timeout=job.limit_s)

        step = make_step(inputs, burst.inputs, outputs, run)
        yield Runner({"in place": step}, (client.worker_pid,), details)


# ---- baselines


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


RUNNERS: dict[str, Callable[[RunnerJob], Any]] = {
    "nnfmq burst": _burst,
    "nnfmq in process": _in_process,
    "LiteRT": _litert,
    "ONNX Runtime": _onnx_runtime,
    "OpenVINO": _openvino,
}
