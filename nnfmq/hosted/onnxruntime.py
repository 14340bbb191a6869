"""The device `onnxruntime`: ONNX files on ONNX Runtime, with any of its execution providers.

Options: those of `onnxruntime_options`, and libraries of custom operators. ONNX Runtime's compiled module is called
without the Python layer above it, which keeps the file in memory, and adds 1 to 38 us to each execution.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from nnfmq.base.onnx_fields import Dimensions, declared_shapes, require_files, with_external_data, without_output_shapes
from nnfmq.driver.cache.mapped_files import may_store
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import Dimension, HostedDescription, HostedTensor
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice
from nnfmq.hosted.onnxruntime_options import CPU, LOG_FATAL, new_session_options, provider_settings
from nnfmq.hosted.optimized_onnx import SAVED_BYTES_MIN, Writing, mapped_weights
from nnfmq.operations.declaration import Array

__all__ = ["OnnxRuntimeDevice"]

_BFLOAT16 = 16  # of onnx.TensorProto.DataType: NumPy has no such type
_SORTING = (b"TopK", b"MoE")  # operators that sort indices by values, where an input has these
_log = logging.getLogger("nnfmq.hosted")
_DTYPES = {"float": "float32", "double": "float64"}


class OnnxRuntimeDevice(HostedDevice):
    """A device that runs ONNX files on ONNX Runtime."""

    name = "onnxruntime"
    takes_libraries = True
    saves = True
    reopens = True

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """See `HostedDevice.open`."""
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read by the import, which would make files, an id and a thread
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        onnxruntime.set_default_logger_severity(LOG_FATAL)
        opening = _Opening(onnxruntime, file, options, provider_settings(onnxruntime, options.options))
        return opening.of_saved(options.saved) if options.saved is not None else opening.of_file()


class _Opening(NamedTuple):
    """The file and the options of a session that is opened."""

    onnxruntime: Any
    file: HostedFile
    options: OpenOptions
    providers: Mapping[str, Mapping[str, str]]

    def of_saved(self, saved: bytes) -> HostedModel:
        """Return the model that `_Model.save` has returned. Raises Exception if the cache lacks its weights."""
        session_options = new_session_options(self.onnxruntime, self.options)
        with mapped_weights(self.onnxruntime, session_options, saved):
            return self._model(saved, session_options)

    def of_file(self) -> HostedModel:
        """Return the model of the file, written for others if that pays. Raises Exception."""
        content, size = _content(self.file), sum(map(len, self.file.files.values()))
        is_on_cpu = list(self.providers) == [CPU]
        if not is_on_cpu and b"EPContext" in content:
            raise InvalidArgument("what a provider has compiled (EPContext) is not loaded: it is code, or names files")
        is_written = self.options.saves and is_on_cpu and not self.file.libraries and size >= SAVED_BYTES_MIN
        if is_written and may_store(2 * size):
            try:
                session_options = self._session_options()
                return self._model(content, session_options, Writing(session_options, size))
            except Exception as error:  # noqa: BLE001  ONNX Runtime's; without writing, the error is that of the file
                _log.info("ONNX Runtime does not write what it has optimized: %s", error)
        return self._model(content, self._session_options())

    def _session_options(self) -> Any:
        """Return the options of a session of the file. ONNX Runtime gets what is in other files: it opens none."""
        made = new_session_options(self.onnxruntime, self.options)
        for library in self.file.libraries:
            made.register_custom_ops_library(library.path)
        if others := self.file.others:
            views = list(others.values())
            made.add_external_initializers_from_files_in_memory(list(others), views, list(map(len, views)))
        return made

    def _model(self, content: bytes, session_options: Any, writing: Writing | None = None) -> HostedModel:
        session = self._loaded(content, session_options)
        session.initialize_session(list(self.providers), list(self.providers.values()), set())
        model = _Model(self.onnxruntime, session, declared_shapes(self.file.model), writing)
        model.copies_floats = any(name in content for name in _SORTING)
        return model

    def _loaded(self, content: bytes, session_options: Any) -> Any:
        """Return ONNX Runtime's session, not initialized. Raises RuntimeError with the text of an error for a path."""
        make = self.onnxruntime.capi.onnxruntime_pybind11_state.InferenceSession
        try:
            return make(session_options, content, False, False)
        except Exception as error:
            *status, text = str(error).split(" : ", 3)
            name = next(iter(self.file.files))
            raise RuntimeError(" : ".join([*status, f"Load model from {name} failed:{text}"])) from error


def _content(file: HostedFile) -> bytes:
    """Return the model, with the tensors of other files that ONNX Runtime does not take in memory.

    It takes files in memory only for the main graph's initializers; for others it would look into its current folder.
    The model states no shapes of outputs, so that ONNX Runtime tells those that it infers: files state wrong ones.
    """
    require_files(file.model, file.others)
    return without_output_shapes(memoryview(with_external_data(file.model, file.others, is_nested_only=True)))


# ----------------------------------------------------------------------------------------------------------------------
# An open file, and its executions.


class _Model(HostedModel):
    is_thread_safe = True

    def __init__(
        self, onnxruntime: Any, session: Any, declared: Mapping[str, Dimensions | None], writing: Writing | None
    ) -> None:
        self.session, self.onnxruntime, self.writing = session, onnxruntime, writing
        self.cpu = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
        self.description = HostedDescription(
            tuple(_tensor(node, declared.get(node.name)) for node in session.inputs_meta),
            tuple(_tensor(node, declared.get(node.name)) for node in session.outputs_meta),
            providers=tuple(onnxruntime.get_available_providers()),
        )

    def save(self) -> bytes | None:
        """See `HostedModel.save`."""
        writing, self.writing = self.writing, None
        if writing is None:
            return None
        with writing:
            return writing.stored()

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        """See `HostedModel.bind`."""
        return _Run(self, inputs, outputs)


class _Run(HostedRun):
    """Executes with inputs and outputs in the client's memory, where ONNX Runtime takes it.

    The first run looks where the results are: ONNX Runtime leaves the memory of an output alone that is an input, too,
    or has the name of another one. It refuses an output of another shape than the file declares.
    """

    def __init__(self, model: _Model, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> None:
        onnxruntime, tensors = model.onnxruntime, model.description.outputs
        self._session, self._run, self._cpu = model.session, model.session.run_with_iobinding, model.cpu
        self._tensors, self._arrays = tensors, (inputs, outputs)  # the arrays live as long as this
        self._options = onnxruntime.RunOptions()
        self._binding = onnxruntime.capi.onnxruntime_pybind11_state.SessionIOBinding(model.session)
        self._feed = {
            tensor.name: _value(model, array, tensor)
            for tensor, array in zip(model.description.inputs, inputs, strict=True)
        }
        for name, value in self._feed.items():
            self._binding.bind_ortvalue_input(name, value)
        for tensor, out in zip(tensors, outputs, strict=True):
            if out is None:
                self._binding.bind_output(tensor.name, self._cpu)  # it allocates memory
            else:
                self._binding.bind_output(tensor.name, self._cpu, _element(tensor), out.shape, out.ctypes.data)
        self._addresses = [None if out is None else out.ctypes.data for out in outputs]
        self._allocated = {place for place, out in enumerate(outputs) if out is None}
        self._names = list(dict.fromkeys(tensor.name for tensor in tensors))
        self._places = [self._names.index(tensor.name) for tensor in tensors]  # in the binding
        self._is_in_place = False  # until a run has shown that all outputs are

    def __call__(self) -> Sequence[Array | None] | None:
        """See `HostedRun`."""
        for place in self._allocated:  # otherwise it would take the memory of the last results
            self._binding.bind_output(self._tensors[place].name, self._cpu)
        try:
            self._run(self._binding, self._options)
        except Exception as error:  # noqa: BLE001  ONNX Runtime's; raised again there
            return self._unbound_results(error)
        return None if self._is_in_place else self._results()

    def _results(self) -> Sequence[Array | None]:
        values = self._binding.get_outputs()
        found = [values[place] for place in self._places]
        self._allocated |= {i for i, value in enumerate(found) if value.data_ptr() != self._addresses[i]}
        self._is_in_place = not self._allocated
        return [_view(v, self._tensors[i]) if i in self._allocated else None for i, v in enumerate(found)]

    def _unbound_results(self, error: Exception) -> Sequence[Array]:
        """Execute with outputs that ONNX Runtime allocates, in whatever shapes, after an error of a run with a binding.

        Such an error has no status, and may be about the shape of an output that the file declares wrongly.
        """
        if self._options.terminate:
            raise error
        self._values = self._session.run_with_ort_values(self._feed, self._names, self._options)
        self._allocated, self._is_in_place = set(range(len(self._tensors))), False
        return [_view(self._values[place], tensor) for place, tensor in zip(self._places, self._tensors, strict=True)]

    def abort(self) -> bool:
        """See `HostedRun.abort`."""
        self._options.terminate = True
        return True

    def resume(self) -> None:
        """See `HostedRun.resume`."""
        self._options.terminate = False


def _value(model: _Model, array: Array, tensor: HostedTensor) -> Any:
    """Return an input of ONNX Runtime over the memory of an array."""
    made = model.onnxruntime.capi.onnxruntime_pybind11_state.OrtValue
    if tensor.dtype == "bfloat16":
        return made.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
    return made.ortvalue_from_numpy(array, model.cpu)


def _view(value: Any, tensor: HostedTensor) -> Array:
    """Return an array over a result of ONNX Runtime, valid until the next run."""
    dtype = np.dtype("uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    place = {"version": 3, "typestr": dtype.str, "shape": tuple(value.shape()), "data": (value.data_ptr(), True)}
    return np.asarray(SimpleNamespace(__array_interface__=place))


def _element(tensor: HostedTensor) -> Any:
    return _BFLOAT16 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype)


def _tensor(node: Any, declared: Dimensions | None) -> HostedTensor:
    """Return an input or output as ONNX Runtime reports it; it has no dimensions for an unknown rank, too."""
    kind = node.type[7:-1] if node.type.startswith("tensor(") else node.type
    inferred = tuple(node.shape) or (() if declared == () else None)
    stated, shape = inferred if declared is None else declared, inferred
    if declared is not None and inferred is not None and len(declared) != len(inferred):
        shape = None
    elif declared is not None and inferred is not None:
        pairs = list(zip(declared, inferred, strict=True))
        stated = tuple(_merged(*pair) for pair in pairs)  # as ONNX Runtime reports a shape that is stated
        is_doubtful = [isinstance(ours, int) and isinstance(theirs, int) and ours != theirs for ours, theirs in pairs]
        shape = tuple(None if doubt else size for size, doubt in zip(inferred, is_doubtful, strict=True))
    return HostedTensor(node.name, _DTYPES.get(kind, kind), shape, stated=None if stated == shape else stated)


def _merged(stated: Dimension, inferred: Dimension) -> Dimension:
    return inferred if stated is None or (isinstance(stated, str) and isinstance(inferred, int)) else stated
