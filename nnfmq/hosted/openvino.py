"""The device `openvino`: OpenVINO, ONNX and TensorFlow Lite files on OpenVINO.

Options: `device`, one of OpenVINO's ("CPU" by default, "GPU", "NPU", "AUTO:GPU,CPU" ...); `config`, properties with
which OpenVINO compiles the model, of those in CONFIG; `threads`, for the device CPU. Properties that name folders or
files, such as CACHE_DIR, are not among them: they would make the worker write where a client says.

Inputs and outputs are in the client's memory, also those of which only the rank is known. A deadline cancels the
execution between two operations. Weights of an OpenVINO file (.bin) are the client's sealed memory, not a copy.

Variables are inputs and outputs of the HAL's model, as with nnfmq's own importer: each request has its own, which are
set before and read after each execution.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from nnfmq.base.onnx_fields import require_files, with_external_data
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import LIBRARIES, HostedDescription, HostedTensor, Shape
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice
from nnfmq.hosted.options import require_one_of, settings_by_name
from nnfmq.operations.declaration import Array

__all__ = ["CONFIG", "OpenVinoDevice"]

CONFIG = (
    "PERFORMANCE_HINT", "PERFORMANCE_HINT_NUM_REQUESTS", "EXECUTION_MODE_HINT", "INFERENCE_PRECISION_HINT",
    "ENABLE_CPU_PINNING", "ENABLE_HYPER_THREADING", "SCHEDULING_CORE_TYPE", "MODEL_DISTRIBUTION_POLICY",
    "CPU_DENORMALS_OPTIMIZATION", "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE", "TBB_PARTITIONER",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE", "ACTIVATIONS_SCALE_FACTOR", "MODEL_PRIORITY", "DEVICE_ID",
    "MULTI_DEVICE_PRIORITIES", "KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION",
    "KEY_CACHE_GROUP_SIZE", "VALUE_CACHE_GROUP_SIZE",
)  # fmt: skip
"""The properties of OpenVINO that a client may set."""
_DTYPES = {"f32": "float32", "f16": "float16", "f64": "float64", "bf16": "bfloat16", "boolean": "bool"}
_INTEGER = re.compile(r"([iu])(8|16|32|64)")
_XML_STARTS = (b"<", b"\xef\xbb\xbf<")


class OpenVinoDevice(HostedDevice):
    """A device that runs files on OpenVINO."""

    name = "openvino"
    saves = True
    takes_libraries = True
    reserved_bytes = 512 << 20  # stacks and arenas of its threads

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """See `HostedDevice.open`."""
        options.require_known("device", "config", LIBRARIES)
        device = options.options.get("device", "CPU")
        config = _config(options.options.get("config", {}))
        openvino = _imported()
        if device == "CPU":
            config |= {"INFERENCE_NUM_THREADS": options.threads, "NUM_STREAMS": 1}
        core = openvino.Core()
        for library in file.libraries:
            core.add_extension(library.path)
        if options.saved is not None:
            return _Model(openvino, core, core.import_model(options.saved, device, config), file, None)
        model = _read(openvino, core, file)
        variables = _variables(openvino, core, model)
        return _Model(openvino, core, core.compile_model(model, device, config), file, variables)


def _imported() -> Any:
    """Return the module. Its converter would report to its makers if their package is installed."""
    if "openvino" not in sys.modules:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # importing it fails
    import openvino

    return openvino


def _config(given: object) -> dict[str, Any]:
    """Return the properties that the client gave. Raises InvalidArgument if one is not allowed."""
    config = settings_by_name("config", given)
    for name, value in config.items():
        require_one_of("config", name, CONFIG)
        if not isinstance(value, (str, int, float)):
            raise InvalidArgument(f"config: {name} {value!r:.80} is no string, number or bool")
    return config


def _read(openvino: Any, core: Any, file: HostedFile) -> Any:
    """Return OpenVINO's model of a file, which only the front end of its format reads.

    Raises:
        InvalidArgument: If it needs other files than those given.
    """
    if file.format != "openvino":
        from openvino.frontend import FrontEndManager

        front_end = FrontEndManager().load_by_framework(file.format)
        for library in file.libraries:
            front_end.add_extension(library.path)
        if file.format == "onnx":
            require_files(file.model, file.others)  # OpenVINO would open external data below the current folder
            return front_end.convert(front_end.load(io.BytesIO(with_external_data(file.model, file.others))))
        with NamedTemporaryFile(suffix=".tflite") as copy:  # this front end reads files only
            copy.write(file.model)
            copy.flush()
            return front_end.convert(front_end.load(copy.name, enable_mmap=False))
    others = list(file.others.values())
    if len(others) > 1:
        raise InvalidArgument(f"an OpenVINO model has 1 file of weights, {len(others)} were given")
    text = bytes(file.model)
    if not text.startswith(_XML_STARTS):  # or another front end might read it
        raise InvalidArgument("an OpenVINO model is an XML file")
    weights = np.frombuffer(others[0], np.uint8) if others else np.empty(0, np.uint8)
    tensor = openvino.Tensor(weights, [weights.size], openvino.Type.u8)
    return core.read_model(text.decode(), tensor)


def _variables(openvino: Any, core: Any, model: Any) -> dict[str, Array]:
    """Return the first value of each variable of a model, by its name. Raises InvalidArgument if a file has none."""
    found = {}
    for node in (node for node in model.get_ops() if node.get_type_name() == "ReadValue"):
        name = node.get_attributes()["variable_id"]
        if node.get_input_size() == 0 or not node.get_output_partial_shape(0).is_static:
            raise InvalidArgument(f"variable {name!r} has no first value, or not one size")
        try:
            found[name] = core.compile_model(openvino.Model([node.input_value(0)], []), "CPU")()[0]
        except RuntimeError as error:
            raise InvalidArgument(f"the first value of variable {name!r} depends on inputs") from error
    return found


class _Model(HostedModel):
    is_thread_safe = True

    def __init__(
        self, openvino: Any, core: Any, compiled: Any, file: HostedFile, variables: Mapping[str, Array] | None
    ) -> None:
        self.openvino, self.core, self.compiled = openvino, core, compiled
        self.may_save = variables == {}  # those of a saved model are not known
        self.file = file  # its memory has the weights
        values = variables or {}
        self.states = [HostedTensor(name, value.dtype.name, value.shape) for name, value in values.items()]
        inputs, outputs = ((*map(_tensor, ports), *self.states) for ports in (compiled.inputs, compiled.outputs))
        initial = tuple(value.tobytes() for value in values.values())
        self.description = HostedDescription(inputs, outputs, states=len(initial), initial=initial)

    def resolve(self, shapes: Sequence[Shape | None]) -> Sequence[Shape | None]:
        sized = _read(self.openvino, self.core, self.file)
        shapes = shapes[: len(self.compiled.inputs)]
        partial = self.openvino.PartialShape
        sizes = (None if shape is None else [-1 if size is None else size for size in shape] for shape in shapes)
        sized.reshape({i: partial.dynamic() if each is None else partial(each) for i, each in enumerate(sizes)})
        return [*map(_shape, sized.outputs), *(state.shape for state in self.states)]

    def save(self) -> bytes | None:
        """Return OpenVINO's compiled model."""
        if not self.may_save:
            return None
        stream = io.BytesIO()
        self.compiled.export_model(stream)
        return stream.getvalue()

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        request = self._request(inputs, outputs) or self._request(inputs, outputs := [None] * len(outputs))
        found = {variable.name: variable for variable in request.query_state()}
        variables = [found[state.name] for state in self.states]
        values = map(self._in_place, (variable.state for variable in variables), inputs[len(self.compiled.inputs) :])
        return _Run(request, list(zip(variables, values, strict=True)), inputs, outputs)

    def _request(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> Any:
        """Return a request over these arrays, or None if it has not kept them all.

        An output that is an input, perhaps since OpenVINO has optimized the model, or that is there twice, is one
        tensor with the other: setting it replaces that.
        """
        request = self.compiled.create_infer_request()
        for index, (port, array) in enumerate(zip(self.compiled.inputs, inputs, strict=False)):
            request.set_input_tensor(index, self._in_place(port, array))
        given = [(i, out) for i, out in enumerate(outputs[: len(self.compiled.outputs)]) if out is not None]
        for index, out in given:
            request.set_output_tensor(index, self._in_place(self.compiled.outputs[index], out))
        tensors = [(request.get_input_tensor(i), x) for i, x in enumerate(inputs[: len(self.compiled.inputs)])]
        tensors += [(request.get_output_tensor(i), out) for i, out in given]
        is_over = all(not x.size or tensor.data.ctypes.data == x.ctypes.data for tensor, x in tensors)
        return request if is_over else None

    def _in_place(self, typed: Any, array: Array) -> Any:
        return self.openvino.Tensor(array, list(array.shape), typed.get_element_type())


class _Run(HostedRun):
    """Executes one request. `states` are its variables, each with the tensor that has its value before."""

    def __init__(
        self, request: Any, states: Sequence[tuple[Any, Any]], inputs: Sequence[Array], outputs: Sequence[Array | None]
    ) -> None:
        self._request, self._states, self._inputs = request, states, inputs
        self._first_state = len(outputs) - len(states)
        self._returned = [index for index, out in enumerate(outputs[: self._first_state]) if out is None]
        self._in_place: list[Array | None] = [None] * len(outputs)

    def __call__(self) -> Sequence[Array | None] | None:
        for variable, value in self._states:
            variable.state = value
        # Not `infer`: with one thread it returns the results of the last execution if this one fails, and `cancel` does
        # not end it.
        self._request.start_async()
        self._request.wait()
        if not self._returned and not self._states:
            return None
        results = list(self._in_place)
        for index in self._returned:
            results[index] = self._request.get_output_tensor(index).data
        results[self._first_state :] = [variable.state.data for variable, _ in self._states]
        return results

    def abort(self) -> bool:
        self._request.cancel()
        return True


def _tensor(port: Any) -> HostedTensor:
    kind = port.get_element_type().to_string()
    integer = _INTEGER.fullmatch(kind)
    dtype = f"{'u' * (integer[1] == 'u')}int{integer[2]}" if integer else _DTYPES.get(kind, kind)
    name = port.get_any_name() if port.get_names() else port.node.get_friendly_name()
    return HostedTensor(name, dtype, _shape(port))


def _shape(port: Any) -> Shape | None:
    shape = port.get_partial_shape()
    if not shape.rank.is_static:
        return None
    return tuple(size.get_length() if size.is_static else None for size in shape)
