"""The device `torch`: files of `torch.export.save` (.pt2) on PyTorch, on the CPU or a CUDA GPU.

Options: `device`, "cpu" (default), "cuda" or "cuda:1" ...; `threads`.

A file is loaded from an archive that `torch_archive` writes, without anything that would run as code. A driver that
trusts a file, by its SHA-256 in $NNFMQ_TRUSTED_FILES, loads it as it is: with custom objects and operators.

Inputs and outputs are tensors. On the CPU inputs are in the client's memory, unless the program changes them; outputs
are copied there. The graph is called without its containers: a dictionary's tensors are inputs or outputs of their own,
in order. A buffer that the program changes is a state. A deadline ends the execution between two operations.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from nnfmq.base.processes import raise_in_thread, set_default_variables
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import HostedDescription, Shape
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice
from nnfmq.hosted.libraries import is_trusted
from nnfmq.hosted.torch_archive import safe_archive
from nnfmq.hosted.torch_graph import Place, changed_inputs, symbol_sizes
from nnfmq.operations.declaration import Array

__all__ = ["TorchDevice"]

_thread = threading.local()
_DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?")


class TorchDevice(HostedDevice):
    """A device that runs exported programs on PyTorch."""

    name = "torch"
    reserved_bytes = 1 << 30  # libraries' data, stacks and arenas of the threads

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """See `HostedDevice.open`."""
        options.require_known("device")
        device = options.options.get("device", "cpu")
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise InvalidArgument(f"device {device!r:.80}: 'cpu', 'cuda' or 'cuda:N' is needed")
        torch = _imported()
        torch.set_num_threads(options.threads)
        program = _program(torch, file.model)
        if device != "cpu":
            program = torch.export.passes.move_to_device_pass(program, device)
        return _Model(torch, program, device, options.threads)


def _imported() -> Any:
    """Return the module. Its threads sleep while there is no work."""
    set_default_variables({"OMP_WAIT_POLICY": "PASSIVE"})
    import torch.export.passes

    # Inputs may be in memory that only the client can write; no program gets them that changes them.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
    return torch


def _program(torch: Any, data: memoryview) -> Any:
    """Return the program of a file. `torch.export.load`, which hides why an archive fails, reads older ones, too."""
    from torch.export.pt2_archive._package import load_pt2

    if is_trusted(data):
        return torch.export.load(io.BytesIO(data))
    safe = safe_archive(data, frozenset(torch._C._dispatch_get_all_op_names()).__contains__)
    return load_pt2(safe).exported_programs["model"]


class _Model(HostedModel):
    is_thread_safe = True

    def __init__(self, torch: Any, program: Any, device: str, threads: int) -> None:
        self.torch, self.device, self.threads = torch, torch.device(device), threads
        self.graph, self.ranges = program.graph_module, program.range_constraints
        nodes = list(program.graph.find_nodes(op="placeholder"))
        kinds = torch.export.graph_signature.InputKind
        changed = changed_inputs(program.graph_module)
        self.arguments: list[Any] = []  # of all placeholders; those of inputs are set when arrays are bound
        self.inputs: list[Place] = []
        self.changed_inputs = {index for index, node in enumerate(nodes) if node in changed}  # in place
        states: list[tuple[Place, int | None, bytes]] = []  # with the output that has the new value, if there is one
        new_values: dict[str, int] = {}
        outputs = self._outputs(program, new_values)
        for index, (spec, node) in enumerate(zip(program.graph_signature.input_specs, nodes, strict=True)):
            value = None
            if spec.kind is kinds.USER_INPUT and hasattr(spec.arg, "value"):
                value = spec.arg.value  # fixed by the export
            elif spec.kind is kinds.USER_INPUT:
                self.inputs.append(Place(index, spec.arg.name, node.meta["val"]))
            elif spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                value = _held(program, spec.target, self.device)
                if spec.kind is kinds.BUFFER and (node in changed or spec.target in new_values):
                    place = Place(index, spec.target, node.meta["val"])
                    states.append((place, new_values.get(spec.target), _array(torch, value).tobytes()))
                elif node in changed:
                    raise InvalidArgument(f"the program changes its constant {spec.target!r:.80}")
            else:
                raise InvalidArgument(f"{spec.arg.name!r:.80}: no input of a program may be a {spec.kind.name}")
            self.arguments.append(value)
        self.inputs += [place for place, _, _ in states]
        self.output_places = [*outputs, *(place for place, _, _ in states)]
        # The place of each output: among the results, or, below 0, among the arguments (-1: the first).
        self.outputs = [place.index for place in outputs]
        self.outputs += [-1 - place.index if new is None else new for place, new, _ in states]
        self.description = HostedDescription(
            tuple(place.described({}) for place in self.inputs),
            tuple(place.described({}) for place in self.output_places),
            states=len(states),
            initial=tuple(value for _, _, value in states),
        )

    def _outputs(self, program: Any, new_values: dict[str, int]) -> list[Place]:
        """Return the outputs; `new_values` gets the buffers of which the others are the new values."""
        kinds = self.torch.export.graph_signature.OutputKind
        places = []
        nodes = program.graph.output_node().args[0]
        for index, (spec, node) in enumerate(zip(program.graph_signature.output_specs, nodes, strict=True)):
            if spec.kind is kinds.BUFFER_MUTATION:
                new_values[spec.target] = index
            elif spec.kind in (kinds.USER_OUTPUT, kinds.LOSS_OUTPUT):
                places.append(Place(index, getattr(spec.arg, "name", ""), getattr(node, "meta", {}).get("val")))
            elif spec.kind is not kinds.USER_INPUT_MUTATION:  # the client's input stays as it is
                raise InvalidArgument(f"output {index} is a {spec.kind.name}, which does not cross")
        return places

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        symbol_sizes(self.inputs, [array.shape for array in inputs], self.ranges)
        arguments, copied = list(self.arguments), []
        for place, array in zip(self.inputs, inputs, strict=True):
            tensor = self.torch.from_numpy(array)  # in its memory
            if place.dtype == "bfloat16":
                tensor = tensor.view(self.torch.bfloat16)
            arguments[place.index] = tensor
            if place.index in self.changed_inputs or self.device.type != "cpu":
                copied.append((place.index, tensor))
        return _Run(self, arguments, copied)

    def resolve(self, shapes: Sequence[Shape | None]) -> Sequence[Shape | None]:
        known = symbol_sizes(self.inputs, [shape or () for shape in shapes], self.ranges)
        return [place.described(known).shape for place in self.output_places]


class _Run(HostedRun):
    """The graph with the tensors of one request."""

    def __init__(self, model: _Model, arguments: list[Any], copied: Sequence[tuple[int, Any]]) -> None:
        self._model, self._arguments, self._copied = model, arguments, copied
        self._thread: int | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Sequence[Array]:
        torch, model = self._model.torch, self._model
        if getattr(_thread, "count", None) != model.threads:
            torch.set_num_threads(model.threads)  # of this thread, and of those that begin
            _thread.count = model.threads
        self._thread = threading.get_ident()
        try:
            with torch.inference_mode():
                for index, tensor in self._copied:
                    self._arguments[index] = tensor.to(model.device, copy=True)
                results = model.graph(*self._arguments)
                values = (results[index] if index >= 0 else self._arguments[-1 - index] for index in model.outputs)
                return [_array(torch, value) for value in values]
        finally:
            with self._lock:
                self._thread = None

    def abort(self) -> bool:
        """Raise an exception in the executing thread, which ends it before the next operation."""
        with self._lock:
            if self._thread is not None:
                raise_in_thread(self._thread, _AbortedError)
        return True


class _AbortedError(Exception):
    """The deadline of an execution has passed."""


def _array(torch: Any, value: Any) -> Array:
    """Return a tensor as an array; bfloat16 as 16-bit words. On the CPU it is over the tensor's memory."""
    value = value.detach().to("cpu").resolve_conj().resolve_neg()
    array: Array = (value.view(torch.uint16) if value.dtype is torch.bfloat16 else value).numpy()
    return array


def _held(program: Any, name: str, device: Any) -> Any:
    """Return a parameter, buffer or constant of a program on a device.

    It requires a gradient if it does in the program: PyTorch chooses other matrix products where nothing does.
    """
    value = program.state_dict.get(name, program.constants.get(name))
    if value is None:
        raise InvalidArgument(f"the archive has no value of {name!r:.80}")
    return value.detach().to(device).requires_grad_(value.requires_grad)
