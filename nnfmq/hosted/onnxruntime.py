"""The device `onnxruntime`: ONNX files on ONNX Runtime, with any of its execution providers.

Options: `providers` and `provider_options`, as for `onnxruntime.InferenceSession`; `threads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfmq.hal.hosted import HostedDescription, HostedTensor
from nnfmq.hosted.device import HostedDevice, HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.operations.declaration import Array

__all__ = ["OnnxRuntimeDevice"]

_DTYPES = {"float": "float32", "double": "float64"}


class OnnxRuntimeDevice(HostedDevice):
    """A device that runs ONNX files on ONNX Runtime."""

    name = "onnxruntime"
    package = "onnxruntime"
    formats = ("onnx",)

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """See `HostedDevice.open`."""
        import onnxruntime

        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = options.threads
        session_options.inter_op_num_threads = 1
        providers = options.options.get("providers", ["CPUExecutionProvider"])
        return _Model(onnxruntime.InferenceSession(bytes(file.model), session_options, providers=providers))


class _Model(HostedModel):
    is_thread_safe = True

    def __init__(self, session: Any) -> None:
        self.session = session
        self.description = HostedDescription(
            tuple(map(_tensor, session.get_inputs())), tuple(map(_tensor, session.get_outputs()))
        )

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        """See `HostedModel.bind`."""
        binding = self.session.io_binding()
        for tensor, array in zip(self.description.inputs, inputs, strict=True):
            binding.bind_input(tensor.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for tensor, out in zip(self.description.outputs, outputs, strict=True):
            if out is None:
                binding.bind_output(tensor.name, "cpu")
            else:
                binding.bind_output(tensor.name, "cpu", 0, out.dtype, out.shape, out.ctypes.data)
        allocated = [tensor.name for tensor, out in zip(self.description.outputs, outputs, strict=True) if out is None]
        return _Run(self.session, binding, (inputs, outputs), allocated)


class _Run(HostedRun):
    def __init__(
        self,
        session: Any,
        binding: Any,
        arrays: tuple[Sequence[Array], Sequence[Array | None]],
        allocated: Sequence[str],
    ) -> None:
        self._session, self._binding, self._arrays, self._allocated = session, binding, arrays, allocated
        self._is_direct = all(out is not None for out in arrays[1])

    def __call__(self) -> Sequence[Array | None]:
        for name in self._allocated:  # otherwise a run takes the memory of the last results, whatever their shapes
            self._binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(self._binding)
        if self._is_direct:
            return self._arrays[1]
        values = self._binding.get_outputs()
        return [value.numpy() if out is None else None for value, out in zip(values, self._arrays[1], strict=True)]


def _tensor(node: Any) -> HostedTensor:
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    dtype = _DTYPES.get(kind, kind)
    shape = tuple(node.shape) if node.shape is not None else None
    return HostedTensor(node.name, dtype, shape)
