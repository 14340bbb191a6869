"""IOBinding: arrays of the caller that are a session's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from nnfmq.compat.onnxruntime.ort_errors import ort_error
from nnfmq.compat.onnxruntime.ort_interface import NodeArg
from nnfmq.compat.onnxruntime.ort_value import OrtValue, array_at, require_cpu
from nnfmq.compat.onnxruntime.shape_plans import Array

__all__ = ["IOBinding"]


class _Session(Protocol):
    def get_inputs(self) -> list[NodeArg]: ...


class IOBinding:
    """The inputs and outputs of the runs of one session. Only memory of the CPU can be bound."""

    def __init__(self, session: _Session) -> None:
        self.session = session
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, OrtValue | None] = {}
        """For each bound output, in order, the tensor to fill; None = a new one for each run."""
        self._results: list[OrtValue] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Use an array, with its content at the time of each run, as an input. Raises RuntimeError if there is none."""
        if name not in {node.name for node in self.session.get_inputs()}:
            raise RuntimeError(f"the model has no input or output {name!r}")
        self.inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Use memory at an address, which the caller owns, as an input."""
        require_cpu(device_type, device_id)
        self.inputs[name] = array_at(buffer_ptr, shape, element_type)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Use a tensor as an input."""
        self.inputs[name] = ortvalue.numpy()

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Have an output computed: into memory at an address, which the caller owns, or into a new tensor."""
        require_cpu(device_type, device_id)
        if buffer_ptr is None:
            self.outputs[name] = None
            return
        if element_type is None or shape is None:
            raise ValueError("buffer_ptr needs element_type and shape")
        self.outputs[name] = OrtValue(array_at(buffer_ptr, shape, element_type))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Have an output written into a tensor."""
        self.outputs[name] = ortvalue

    def fill(self, results: Sequence[Array]) -> None:
        """Store the results of a run, in the order of `outputs`.

        Raises:
            Exception: InvalidArgument if a bound tensor has another shape or type.
        """
        found = []
        for (name, target), array in zip(self.outputs.items(), results, strict=True):
            if target is None:
                found.append(OrtValue(array))
                continue
            given = target.numpy()
            if given.shape != array.shape or given.dtype != array.dtype:
                text = f"is {given.dtype}{list(given.shape)}; the model computes {array.dtype}{list(array.shape)}"
                raise ort_error("InvalidArgument", f"The output OrtValue provided for output '{name}' {text}")
            given[...] = array
            found.append(target)
        self._results = found

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs of the last run, in the order in which they were bound."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[Array]:
        """Return copies of the outputs of the last run."""
        return [value.numpy().copy() for value in self._results]

    def clear_binding_inputs(self) -> None:
        """Forget all inputs."""
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget all outputs."""
        self.outputs.clear()

    def synchronize_inputs(self) -> None:
        """Do nothing: the inputs are in the CPU's memory."""

    def synchronize_outputs(self) -> None:
        """Do nothing: a run ends when its outputs are written."""

    def get_outputs_as_ortvaluevector(self) -> NoReturn:
        """Raise NotImplemented."""
        raise ort_error("NotImplemented", "nnfmq has no OrtValueVector; use get_outputs")
