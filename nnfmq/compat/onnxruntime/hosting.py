"""A session's model on ONNX Runtime itself, which the driver hosts.

A session uses it for what nnfmq's own engine refuses, as `Client.prepare` does, and if the caller wants another
execution provider than the CPU's. One preparation serves all shapes, and elements cross as they are.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nnfmq.compat.onnxruntime.interface import NodeArg
from nnfmq.compat.onnxruntime.options import SessionOptions
from nnfmq.compat.onnxruntime.providers import CPU, Provider, available_providers, is_accelerator, require_known
from nnfmq.compat.onnxruntime.shape_plans import Array, ModelBursts
from nnfmq.compat.onnxruntime.types import BFLOAT16, dtype_of_type, type_name
from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import GeneralFailure, InvalidArgument

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.hal.hosted import HostedTensor
    from nnfmq.importers.file_format import ModelSource

__all__ = ["HostedPlan", "SessionFile"]

_OF_ONNX_RUNTIME = ("ep.", "memory.", "mlas.", "optimization.", "session.")
"""What entries begin with that ONNX Runtime knows; others are for custom operators."""
_OF_THE_DEVICE = (
    "session.force_spinning_stop", "session.inter_op.", "session.intra_op.", "session.intra_op_thread_affinities",
)  # fmt: skip
"""What entries begin with about how threads wait, and on which CPUs they run: the device decides both."""
Shape: TypeAlias = tuple[int, ...]
Prepare: TypeAlias = "Callable[[Mapping[str | int, Shape]], CompiledModel]"
_FOR_EMPTY_MAX = 4  # a decoder's first step needs one


class HostedPlan:
    """A model that ONNX Runtime runs in the driver, for inputs of any shapes. Thread-safe.

    `inputs` and `outputs` are what ONNX Runtime says of them. `prepare` prepares the model again, for certain shapes of
    inputs by place.
    """

    def __init__(self, share: DriverShare, model: CompiledModel, prepare: Prepare, options: SessionOptions) -> None:
        from nnfmq.client.model.prepared_model import PreparedModel  # while an embedded driver starts
        from nnfmq.hal.hosted import call_of, is_known

        self.is_retired = False
        self._share, self._prepare, self._polling_window_us = share, prepare, options.polling_window_us
        self._model = _HostedBursts(share, model, self._polling_window_us)
        assert isinstance(model, PreparedModel) and model.planned_model is not None  # it is on one device
        call, sizes = call_of(model.planned_model), options.free_dimensions
        self.inputs = [_node(tensor, sizes) for tensor in call.inputs]
        self.outputs = [_node(tensor, sizes) for tensor in call.outputs]
        self._has_bfloat16 = any(node.dtype == BFLOAT16 for node in (*self.inputs, *self.outputs))
        dtypes = [(place, node.dtype) for place, node in enumerate(self.outputs)]
        self._views = {place: dtype for place, dtype in dtypes if dtype is not None and dtype in (np.int64, BFLOAT16)}
        self._open = [place for place, tensor in enumerate(call.inputs) if not is_known(tensor.shape)]
        self._lock = threading.Lock()  # held while `_for_empty` changes
        self._for_empty: OrderedDict[tuple[tuple[int, Shape], ...], _HostedBursts] = OrderedDict()

    def execute(self, inputs: Sequence[Array], outputs: Sequence[int]) -> list[Array]:
        """Return copies of the outputs with these indexes; blocks. Raises NnfmqError."""
        empty = [(place, inputs[place].shape) for place in self._open if not inputs[place].size]
        model = self._prepared(tuple(empty)) if empty else self._model
        if self._has_bfloat16:
            inputs = [array.view(np.uint16) if array.dtype == BFLOAT16 else array for array in inputs]
        found, views = model.execute(inputs, outputs), self._views
        return [a.view(views[place]) if place in views else a for a, place in zip(found, outputs, strict=True)]

    def retire(self) -> None:
        """Close what was prepared, as soon as no thread uses it."""
        with self._lock:
            self.is_retired = True
            for model in (self._model, *self._for_empty.values()):
                model.retire()

    def _prepared(self, empty: tuple[tuple[int, Shape], ...]) -> _HostedBursts:
        """Return the model for inputs without elements, whose shape no request can have: to the HAL 0 is unknown."""
        with self._lock:
            found = self._for_empty.pop(empty, None)
            if found is None:
                found = _HostedBursts(self._share, self._prepare(dict(empty)), self._polling_window_us)
            self._for_empty[empty] = found
            if len(self._for_empty) > _FOR_EMPTY_MAX:
                self._for_empty.popitem(last=False)[1].retire()
        return found


class _HostedBursts(ModelBursts):
    def execute(self, inputs: Sequence[Array], outputs: Sequence[int]) -> list[Array]:
        burst = self._take()
        try:
            found = burst.execute(*inputs)
            return [found[index] for index in outputs]
        finally:
            self._release(burst)


def _node(tensor: HostedTensor, sizes: Mapping[str, int]) -> NodeArg:
    """Return an input or output as ONNX Runtime describes it, with the sizes of the symbols that are fixed."""
    kind = type_name(tensor.dtype)
    stated = tensor.shape if tensor.stated is None else tensor.stated
    shape = [sizes.get(size, size) if isinstance(size, str) else size for size in stated or ()]
    return NodeArg(tensor.name, kind, shape, dtype_of_type(kind), stated is not None, stated == ())


class SessionFile:
    """A session's file, and the options with which ONNX Runtime opens it."""

    def __init__(
        self, share: DriverShare, source: ModelSource, options: SessionOptions, providers: Sequence[Provider]
    ) -> None:
        self.source = source
        self.providers = list(providers)
        """Those that the session uses, without the CPU's if the caller gave only others."""
        self._share, self._options = share, options

    def open_with_providers(self) -> HostedPlan | None:
        """Return the model with the caller's execution providers; None if none of them is an accelerator; blocks.

        Those that ONNX Runtime in the driver does not have, or with which it does not open the file, are left out, with
        a warning for each. Raises UnknownProvider after that if there is no provider of one of the names.
        """
        if not any(map(is_accelerator, self.providers)):
            return None
        given, available = self.providers, available_providers(self._share)
        listed = ", ".join(available)
        for name in [name for name, _ in self.providers if name not in available]:
            text = f"Specified provider '{name}' is not in available provider names.Available providers: '{listed}'"
            self._ignore(name, text)
        require_known(given)
        while accelerators := [provider[0] for provider in self.providers if is_accelerator(provider)]:
            try:
                return self._open(None)
            except (InvalidArgument, GeneralFailure) as error:
                name = next((name for name in accelerators if repr(name) in str(error)), accelerators[0])
                self._ignore(name, f"the driver has no provider {name!r} for this model, which is ignored: {error}")
        return None

    def _ignore(self, ignored: str, text: str) -> None:
        self.providers = [provider for provider in self.providers if provider[0] != ignored]
        warnings.warn(text, stacklevel=6)

    def open(self, refusal: InvalidArgument | GeneralFailure) -> HostedPlan:
        """Return the model on the CPU, after nnfmq's own engine has refused it; blocks. Raises NnfmqError."""
        return self._open(refusal)

    def _open(self, refusal: InvalidArgument | GeneralFailure | None) -> HostedPlan:
        from msgspec.structs import replace  # while an embedded driver starts

        source, share = replace(self.source, parsed=None), self._share
        used = [provider for provider in self.providers if provider[0] == CPU or is_accelerator(provider)]
        runtime_options = _runtime_options(self._options, used or [(CPU, {})])

        def prepare(
            shapes: Mapping[str | int, Shape], refusal: InvalidArgument | GeneralFailure | None = None
        ) -> CompiledModel:
            return share.client().prepare_hosted(
                "onnxruntime", source, refusal, shapes=shapes, runtime_options=runtime_options
            )

        return HostedPlan(share, prepare({}, refusal), prepare, self._options)


def _runtime_options(options: SessionOptions, providers: Sequence[Provider]) -> dict[str, Any]:
    """Return the options of the device `onnxruntime` that stand for a session's: those that are not the defaults."""
    from nnfmq.hal.hosted import LIBRARIES  # while an embedded driver starts

    found: dict[str, Any] = {
        "providers": [name for name, _ in providers],
        "provider_options": [{key: str(value) for key, value in chosen.items()} for _, chosen in providers],
    }
    threads = max(options.intra_op_num_threads, options.inter_op_num_threads if options.is_parallel else 0)
    if threads > 0:
        found["threads"] = threads
    found.update(options.changed_settings)
    if options.custom_op_libraries:
        found[LIBRARIES] = options.custom_op_libraries
    entries = {
        key: value
        for key, value in options.config_entries.items()
        if key.startswith(_OF_ONNX_RUNTIME) and not key.startswith(_OF_THE_DEVICE)
    }
    if entries:
        found["session_config_entries"] = entries
    return found
