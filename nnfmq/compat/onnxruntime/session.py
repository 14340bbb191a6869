"""InferenceSession: an ONNX model that the driver runs, with the methods of ONNX Runtime's session.

    feed ── checks, as ONNX Runtime's ── ShapePlans: import, prepare for the shapes ── burst ── copies of the outputs
                                      └─ HostedPlan: ONNX Runtime in the driver, for what nnfmq's own engine refuses

A model whose shapes are known is prepared when the session is made, another one by the first run with new shapes. If
the driver dies during a run, the run is repeated once, on a new driver: it has no state.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from nnfmq.compat.onnxruntime.environment import OrtMemoryInfo
from nnfmq.compat.onnxruntime.errors import bare_message, ort_error, translated
from nnfmq.compat.onnxruntime.hosting import HostedPlan, SessionFile
from nnfmq.compat.onnxruntime.interface import NodeArg, OrtModelMetadata, open_model, read_nodes
from nnfmq.compat.onnxruntime.model_rules import refusal_of
from nnfmq.compat.onnxruntime.options import OrtRunOptions, SessionOptions
from nnfmq.compat.onnxruntime.providers import CPU, Provider, UnknownProvider, checked_providers
from nnfmq.compat.onnxruntime.shape_plans import Array, ShapePlan, ShapePlans, bindings
from nnfmq.compat.onnxruntime.types import BFLOAT16, require_element_type
from nnfmq.compat.onnxruntime.values import (
    IOBinding,
    OrtValue,
    OrtValueVector,
    require_cpu,
    require_numpy_type,
    value_over,
)
from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    GeneralFailure,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from nnfmq.importers import LoadedModel
    from nnfmq.importers.file_format import ModelSource

__all__ = ["InferenceSession", "RunProfile"]


# ----------------------------------------------------------------------------------------------------------------------
# RunProfile: the durations of a session's runs, written in the format of Chrome's traces, as ONNX Runtime does.


_MAX_EVENTS = 1_000_000  # ONNX Runtime's limit


class RunProfile:
    """Events since a session was made. `write` ends it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._events: list[tuple[str, int, int, int]] = []
        self.start_ns = time.monotonic_ns()

    def add(self, name: str, begin_ns: int) -> None:
        """Add an event of this thread that ends now; without effect after a million of them."""
        if len(self._events) < _MAX_EVENTS:
            self._events.append((name, begin_ns, time.monotonic_ns(), threading.get_native_id()))

    def write(self) -> str:
        """Write the events to a file in the current folder and return its name."""
        now = datetime.now()
        path = Path(f"{self._prefix}_{now:%Y-%m-%d_%H-%M-%S}_{now.microsecond // 1000:03}.json")
        events = [
            {
                "cat": "Session",
                "pid": os.getpid(),
                "tid": thread,
                "dur": (end_ns - begin_ns) // 1000,
                "ts": (begin_ns - self.start_ns) // 1000,
                "ph": "X",
                "name": name,
                "args": {},
            }
            for name, begin_ns, end_ns, thread in self._events
        ]
        path.write_text(json.dumps(events), encoding="utf-8")
        return str(path)


# ----------------------------------------------------------------------------------------------------------------------
# InferenceSession: an ONNX model that the driver runs, with the methods of ONNX Runtime's session.


class InferenceSession:
    """A model in the driver. Thread-safe; its part of the driver is released when it is collected."""

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str] | ModelSource,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Open a model; blocks. Of `kwargs`, `enable_fallback` is read; a ModelSource is what a session has read.

        Providers other than the CPU's are those of ONNX Runtime in the driver, if that has them; otherwise a warning
        says that they are ignored. With a name that no provider has, or arguments of another form, the CPU's is used
        instead of all, and a text printed; without `enable_fallback` that is an error.

        Raises:
            TypeError: If `sess_options` are none, or `providers` cannot be iterated.
            RuntimeError: If no provider has one of the names.
            ValueError: If the providers or their options have another form.
            Exception: As ONNX Runtime: NoSuchFile, InvalidProtobuf; its own error if it rejects a model in the driver;
                NotImplemented with all nodes that are not supported if the driver does not host it; EPFail if no driver
                can be reached.
        """
        if sess_options and not isinstance(sess_options, SessionOptions):
            raise TypeError(f"sess_options are SessionOptions, not {type(sess_options).__name__}")
        self._options = sess_options or SessionOptions()  # an empty dictionary stands for none in ONNX Runtime, too
        self._profile = RunProfile(self._options.profile_file_prefix) if self._options.enable_profiling else None
        has_fallback = int(kwargs.get("enable_fallback", 1)) == 1
        wanted = self._wanted_providers(providers, provider_options, has_fallback)
        share = DriverShare(self)
        try:
            share.connect_early(path_or_bytes)
            try:
                self._open(path_or_bytes, share, wanted)
            except UnknownProvider as error:
                if not has_fallback:
                    raise RuntimeError(str(error)) from None
                _print_fallback(error, providers)
                self._open(path_or_bytes, share, [(CPU, {})])
            if self._options.optimized_model_filepath:
                self._write_model(Path(self._options.optimized_model_filepath))
        except BaseException:
            share.abandon()
            raise
        if self._profile is not None:
            self._profile.add("session_initialization", self._read_ns)

    def _wanted_providers(self, providers: Any, provider_options: Any, has_fallback: bool) -> list[Provider]:
        try:
            return checked_providers(providers, provider_options) or list(self._options.given_providers)
        except ValueError as error:
            if not has_fallback:
                raise
            _print_fallback(error, providers)
            return [(CPU, {})]

    def _open(
        self,
        path_or_bytes: str | bytes | os.PathLike[str] | ModelSource,
        share: DriverShare,
        wanted: Sequence[Provider],
    ) -> None:
        options = self._options
        source, interface = open_model(path_or_bytes, options.external_data_folder, options.given_initializers)
        self._path = os.fspath(path_or_bytes) if isinstance(path_or_bytes, (str, os.PathLike)) else None
        self._read_ns = time.monotonic_ns()
        if self._profile is not None:
            self._profile.add(f"model_loading_{'array' if self._path is None else 'uri'}", self._profile.start_ns)
        sizes = options.free_dimensions
        if options.free_denotations and interface is not None:
            sizes = {**sizes, **_denoted_sizes(source.parsed, options.free_denotations)}
        self._declared_inputs = read_nodes(interface.inputs, sizes) if interface is not None else []
        self._declared_outputs = read_nodes(interface.outputs, sizes) if interface is not None else []
        self._overridable = read_nodes(interface.overridable, sizes) if interface is not None else []
        self._metadata = OrtModelMetadata.of(interface) if interface is not None else None
        self._share = share
        self._start(source, wanted)

    def _start(self, source: ModelSource, wanted: Sequence[Provider]) -> None:
        """Prepare the model for these providers, or let the first run prepare it; blocks."""
        from msgspec.structs import replace  # while an embedded driver starts

        self._inputs, self._outputs = self._declared_inputs, self._declared_outputs
        self._hosting = SessionFile(self._share, source, self._options, wanted)
        self._hosted: HostedPlan | None = None
        self._overriding: dict[tuple[str, ...], InferenceSession] = {}
        self._lock = threading.Lock()  # held while `_hosted` or one of `_overriding` is opened
        importer = _Importer(source, [node.name for node in self._inputs])
        self._plans = ShapePlans(
            self._share,
            importer,
            [node.form for node in self._outputs],
            self._options.polling_window_us,
        )
        with _translated(source, self._path):
            self._hosted = self._hosting.open_with_providers()
            if self._hosted is None:
                self._prepare(source)
        importer.source = self._hosting.source = replace(source, parsed=None)  # it takes as much memory as the file
        if self._hosted is not None:
            self._inputs, self._outputs = self._hosted.inputs, self._hosted.outputs
        self._places = {node.name: place for place, node in enumerate(self._outputs)}
        self._all_places = tuple(range(len(self._outputs)))

    def _prepare(self, source: ModelSource) -> None:
        """Prepare the model if its shapes are known, otherwise look whether it may be supported; or let it be hosted.

        A model that needs values of inputs is prepared by the first run.
        """
        wide = next((node.name for node in (*self._inputs, *self._outputs) if node.dtype == BFLOAT16), None)
        refusal = None if source.parsed is None else refusal_of(source.parsed)
        if wide is not None:
            refusal = InvalidArgument(f"{wide!r} has elements of bfloat16, with which it would compute as float32")
        if refusal is not None:
            self._host(refusal)
            return
        examples = [_example(node) for node in self._inputs] if all(node.is_static for node in self._inputs) else None
        try:
            if examples is None:
                _require_operators(source)
            else:
                self._plans.make(examples, may_bind=False)
        except (InvalidArgument, GeneralFailure) as error:
            if not (examples and isinstance(error, UnsupportedModel) and bindings(examples)):
                self._host(error)

    def _write_model(self, path: Path) -> None:
        """Write the model, with all its tensors, where ONNX Runtime writes an optimized one that computes the same."""
        from nnfmq.importers.companion_files import in_one_file  # most sessions write none

        try:
            path.write_bytes(in_one_file(self._hosting.source))
        except OSError as error:
            raise ort_error("InvalidArgument", f"SystemError : {error.errno}") from error

    def _host(self, refusal: InvalidArgument | GeneralFailure) -> HostedPlan:
        """Return the model on ONNX Runtime in the driver, after nnfmq's own engine has refused it; blocks."""
        with self._lock:
            if self._hosted is None:
                self._hosted = self._hosting.open(refusal)
            return self._hosted

    # ------------------------------------------------------------------------------------------------ the model

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs, without those that have a default value."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the inputs that have a default value, to which a run may give another one."""
        return list(self._overridable)

    def get_modelmeta(self) -> OrtModelMetadata:
        """Return the metadata of the model. Raises NotImplemented if the package `onnx` is not installed."""
        if self._metadata is None:
            raise ort_error("NotImplemented", "reading it needs the package onnx: pip install 'nnfmq[onnx]'")
        return self._metadata

    def get_session_options(self) -> SessionOptions:
        """Return the options of this session."""
        return self._options

    def get_providers(self) -> list[str]:
        """Return the names of the providers; the last one is the CPU's."""
        return list(self.get_provider_options())

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of each provider that were given."""
        is_hosted = self._hosted is not None
        used = {
            name: {str(key): str(value) for key, value in given.items()} if is_hosted and name != CPU else {}
            for name, given in self._hosting.providers
        }
        return used if CPU in used else {**used, CPU: {}}

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Use other execution providers from now on: the model is prepared again. Blocks; raises as the constructor."""
        wanted = checked_providers(providers, provider_options)
        plans, hosted, hosting = self._plans, self._hosted, self._hosting
        try:
            self._start(self._hosting.source, wanted)
        except UnknownProvider as error:
            self._plans, self._hosted, self._hosting = plans, hosted, hosting
            raise RuntimeError(str(error)) from None
        plans.retire()
        if hosted is not None:
            hosted.retire()

    def disable_fallback(self) -> None:
        """Do nothing: there is one provider."""

    def enable_fallback(self) -> None:
        """Do nothing: there is one provider."""

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """Return the memory of each input: the CPU's."""
        return [OrtMemoryInfo() for _ in self._inputs]

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """Return the memory of each output: the CPU's."""
        return [OrtMemoryInfo() for _ in self._outputs]

    def get_input_epdevices(self) -> list[None]:
        """Return None for each input: the driver's devices are no devices of ONNX Runtime."""
        return [None for _ in self._inputs]

    # ------------------------------------------------------------------------------------------------ running

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: OrtRunOptions | None = None,
    ) -> list[Array]:
        """Return the named outputs, or all of them, as new arrays; blocks.

        Raises:
            ValueError: If an input is missing.
            Exception: InvalidArgument if a name, type or shape is wrong; NotImplemented if nodes are not supported with
                these shapes; Fail if `run_options.terminate` is set; EPFail if the driver dies twice.
        """
        results = self._run(self._places_of(output_names), input_feed, run_options)
        require_numpy_type(*results)
        return results

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: OrtRunOptions | None = None,
    ) -> list[OrtValue]:
        """Return the named outputs, or all of them, as OrtValues; blocks. Raises as `run`."""
        places = self._places_of(output_names)
        feed = {name: value.elements for name, value in input_dict_ort_values.items()}
        return [value_over(array) for array in self._run(places, feed, run_options)]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Array], Any, str], None] | None,
        user_data: Any,
        run_options: OrtRunOptions | None = None,
    ) -> None:
        """Start a run, which calls `callback(outputs, user_data, error)` on its own thread; `error` is text or ""."""
        self._require_inputs(input_feed)
        if callback is not None and not callable(callback):
            raise TypeError(f"run_async(): callback is a function, not {callback!r:.80}")

        def run_and_call() -> None:
            results, text = [], ""
            try:
                results = self.run(output_names, input_feed, run_options)
            except Exception as error:  # noqa: BLE001  the callback gets it
                text = bare_message(error)
            if callback is not None:
                callback(results, user_data, text)

        threading.Thread(target=run_and_call, name="nnfmq-run-async", daemon=True).start()

    def io_binding(self) -> IOBinding:
        """Return an object that binds inputs and outputs to arrays of the caller."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: OrtRunOptions | None = None) -> None:
        """Run with the bound inputs, and fill the bound outputs; blocks.

        Raises:
            ValueError: If the binding is another session's.
            RuntimeError: With the text of what `run` raises.
        """
        if iobinding.session is not self:
            raise ValueError("the IOBinding belongs to another session")
        try:
            names = list(iobinding.outputs)
            if not names:
                raise ort_error("InvalidArgument", "At least one output should be requested.")
            iobinding.fill(self._run(self._places_of(names), iobinding.inputs, run_options))
        except Exception as error:
            raise RuntimeError(f"Error in execution: {bare_message(error)}") from error

    def _run(
        self, places: Sequence[int], feed: Mapping[str, Any], run_options: OrtRunOptions | None, is_last: bool = False
    ) -> list[Array]:
        if run_options is not None and not isinstance(run_options, OrtRunOptions):
            raise TypeError(f"run_options are RunOptions, not {type(run_options).__name__}")
        if run_options is not None and run_options.terminate:
            raise ort_error("Fail", "Exiting due to terminate flag being set to true.")
        begin_ns = time.monotonic_ns()
        if self._overridable and (names := tuple(node.name for node in self._overridable if node.name in feed)):
            return self._with_inputs(names)._run(places, feed, run_options)
        inputs = self._arrays(feed)
        plan: ShapePlan | HostedPlan | None = self._plans.get(self._plans.key_of(inputs))
        try:
            if plan is None:
                self._check_shapes(inputs)
                plan = self._plan_for(inputs)
            try:
                results = self._execute(plan, inputs, places)
            except (InvalidArgument, GeneralFailure, MissedDeadlineTransient) as error:
                # ONNX Runtime has a result, or its own error, and no limit for the time of a loop
                if not isinstance(plan, ShapePlan) or isinstance(error, BadState):
                    raise
                results = self._execute(self._host(_refusal(error)), inputs, places)
        except NnfmqError as error:
            is_gone = isinstance(error, DeadObject) or (plan is not None and plan.is_retired)
            if is_last or not is_gone:
                raise translated(error) from error
            if isinstance(plan, ShapePlan):
                self._plans.discard(self._plans.key_of(inputs), plan)
            return self._run(places, feed, run_options, is_last=True)
        if (profile := self._profile) is not None:  # another thread may end it meanwhile
            profile.add("model_run", begin_ns)
        return results

    def _execute(self, plan: ShapePlan | HostedPlan, inputs: list[Array], places: Sequence[int]) -> list[Array]:
        if (profile := self._profile) is None:
            return plan.execute(inputs, places)
        begin_ns = time.monotonic_ns()
        results = plan.execute(inputs, places)
        profile.add("SequentialExecutor::Execute", begin_ns)
        return results

    def _plan_for(self, inputs: Sequence[Array]) -> ShapePlan | HostedPlan:
        """Return the plan for inputs like these; blocks. A model refused once is hosted for all further shapes."""
        if self._hosted is not None:
            return self._hosted
        try:
            return self._plans.make(inputs)
        except (InvalidArgument, GeneralFailure) as error:
            return self._host(error)

    def _with_inputs(self, names: tuple[str, ...]) -> InferenceSession:
        """Return a session of the model in which these initializers are inputs; blocks when it is made."""
        from nnfmq.importers.onnx.interface import without_defaults

        with self._lock:
            if names not in self._overriding:
                source = without_defaults(self._hosting.source, names)
                providers = [(name, dict(given)) for name, given in self._hosting.providers]
                self._overriding[names] = InferenceSession(source, self._options, providers)
            return self._overriding[names]

    def _places_of(self, names: Sequence[str] | None) -> Sequence[int]:
        if not names:
            return self._all_places
        if isinstance(names, (str, Mapping, Iterator)) or not all(isinstance(name, (str, bytes)) for name in names):
            raise TypeError("run(): output_names is a list of names")
        try:
            return [self._places[name.decode() if isinstance(name, bytes) else name] for name in names]
        except KeyError as error:
            raise ort_error("InvalidArgument", f"Invalid output name:{error.args[0]}") from None

    def _arrays(self, feed: Mapping[str, Any]) -> list[Array]:
        """Return the arrays of the inputs, in order, with the types that the model has."""
        names = feed.keys()
        if len(names) != len(self._inputs) or any(node.name not in names for node in self._inputs):
            self._require_inputs(feed)
            self._reject_other_names(feed)
        arrays = []
        for node in self._inputs:
            value = feed[node.name]
            if type(value) is not np.ndarray or value.dtype != node.dtype:
                value = _as_array(node, value)
            if value.ndim and node.is_scalar and value.size == 1:
                value = value.reshape(())
            arrays.append(value)
        return arrays

    def _require_inputs(self, feed: Mapping[str, Any]) -> None:
        names = list(feed.keys())
        missing = [node.name for node in self._inputs if node.name not in names]
        if missing:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({names}).")

    def _reject_other_names(self, feed: Mapping[str, Any]) -> None:
        known = {node.name for node in self._inputs}
        for name in feed:
            if name not in known:
                raise ort_error("InvalidArgument", f"Invalid input name: {name}")

    def _check_shapes(self, arrays: Sequence[Array]) -> None:
        for node, array in zip(self._inputs, arrays, strict=True):
            node.check(array)

    # ------------------------------------------------------------------------------------------------ the rest

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Return a tensor of this shape, with unspecified elements."""
        require_cpu(device_type, device_id, vendor_id)
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type)

    def end_profiling(self) -> str:
        """Write the profile and return its file's name; "" if the options do not enable profiling."""
        profile, self._profile = self._profile, None
        return profile.write() if profile is not None else ""

    def get_profiling_start_time_ns(self) -> int:
        """Return the time at which profiling started, on the monotonic clock; 0 if it is not enabled."""
        return self._profile.start_ns if self._profile is not None else 0

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        """Do nothing: no graph is captured."""

    def set_ep_dynamic_options(self, options: dict[str, str]) -> None:
        """Accept options; without effect."""

    def get_tuning_results(self) -> list[Any]:
        """Return an empty list: kernels are not tuned."""
        return []

    def set_tuning_results(self, results: Any, *, error_on_invalid: bool = False) -> None:
        """Accept results; without effect."""

    def get_provider_graph_assignment_info(self) -> NoReturn:
        """Raise NotImplemented."""
        raise ort_error("NotImplemented", "nnfmq does not divide a graph among providers")

    def run_with_ortvaluevector(
        self,
        run_options: OrtRunOptions | None,
        feed_names: Sequence[str],
        feeds: OrtValueVector,
        fetch_names: Sequence[str],
        fetches: OrtValueVector,
        fetch_devices: Sequence[Any],
    ) -> None:
        """Run, and replace the tensors of `fetches` by the named outputs; blocks. Raises as `run`."""
        feed = dict(zip(feed_names, feeds, strict=True))
        fetches[:] = self.run_with_ort_values(fetch_names, feed, run_options)


@contextmanager
def _translated(source: ModelSource, path: str | None) -> Iterator[None]:
    """Raise nnfmq's errors as ONNX Runtime's; Fail if a file that belongs to the model cannot be read."""
    try:
        yield
    except NnfmqError as error:
        name = source.path.name if source.path is not None else "model.onnx"
        raise translated(error, name, path) from error
    except OSError as error:
        raise ort_error("Fail", f"External data cannot be read: {error}") from error


def _refusal(error: InvalidArgument | GeneralFailure | MissedDeadlineTransient) -> InvalidArgument | GeneralFailure:
    """Return the error for which a model is hosted: of a loop that takes too long, one that fails for good."""
    return GeneralFailure(str(error)) if isinstance(error, MissedDeadlineTransient) else error


class _Importer:
    """Imports a model for certain inputs. It does not refer to the session."""

    def __init__(self, source: ModelSource, names: Sequence[str]) -> None:
        self.source, self._names = source, names

    def __call__(self, inputs: Sequence[Array], bound: Sequence[int]) -> LoadedModel:
        from msgspec.structs import replace

        from nnfmq.importers import load_source

        names = self._names
        free = [place for place in range(len(names)) if place not in bound]
        shapes: dict[str | int, Sequence[int]] = {names[place]: inputs[place].shape for place in free}
        values = {names[place]: inputs[place] for place in bound}
        return load_source(replace(self.source, shapes=shapes, values=values))


def _print_fallback(error: Exception, providers: object) -> None:
    """Print what ONNX Runtime prints when it uses the CPU's provider instead of others."""
    print("*************** EP Error ***************")
    print(f"EP Error {error} when using {providers}")
    print(f"Falling back to {[CPU]} and retrying.")
    print("****************************************")


def _denoted_sizes(proto: Any, denotations: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the symbols of dimensions that have one of the denotations.

    Raises:
        Exception: NotImplemented if such a dimension has no symbol.
    """
    shapes = [info.type.tensor_type.shape.dim for info in proto.graph.input]
    found = [each for shape in shapes for each in shape if each.denotation in denotations and not each.dim_value]
    if any(not each.dim_param for each in found):
        raise ort_error("NotImplemented", "a dimension with a denotation has no name: fix it by its input's shape")
    return {each.dim_param: denotations[each.denotation] for each in found}


def _require_operators(source: ModelSource) -> None:
    """Raise UnsupportedModel if a model of unknown shapes has operators that are not supported."""
    from nnfmq.importers import load_source
    from nnfmq.importers.loaded_model import UnknownShapes

    with suppress(UnknownShapes):
        load_source(source)


def _example(node: NodeArg) -> Array:
    """Return an array of an input's type and shape, which is known; it takes no memory."""
    sizes = tuple(size for size in node.shape if isinstance(size, int))
    return np.broadcast_to(np.zeros((), node.dtype), sizes)


def _as_array(node: NodeArg, value: Any) -> Array:
    """Return the value of an input as an array, as ONNX Runtime converts it.

    Raises:
        RuntimeError: If it is neither array, list of numbers nor OrtValue, or has elements of a type that ONNX Runtime
            lacks.
        Exception: InvalidArgument if it has another type.
    """
    if value is None:
        raise ort_error("Fail", f"input {node.name} has no value: None was given")
    if isinstance(value, OrtValue):
        value = value.elements
    elif isinstance(value, list) and node.dtype is not None:
        try:
            value = np.asarray(value, node.dtype)
        except (TypeError, ValueError) as error:
            raise RuntimeError("Could not create tensor from given input list") from error
    elif not isinstance(value, np.ndarray):
        if isinstance(value, Sequence) and not isinstance(value, str):
            raise RuntimeError(f"Input must be a list of dictionaries or a single numpy array for input '{node.name}'.")
        raise RuntimeError(f"Unable to handle object of type {type(value)}")
    require_element_type(value.dtype)
    array: Array = np.asarray(value, value.dtype.newbyteorder("="))
    if array.dtype != node.dtype:
        node.check(array)
    return array
