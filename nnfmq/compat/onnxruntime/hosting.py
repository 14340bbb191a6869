"""A session's model on ONNX Runtime itself, which the driver hosts.

A session uses it for what nnfmq's own engine refuses, as `Client.prepare` does, and if the caller wants another
execution provider than the CPU's. One preparation serves all shapes, and elements cross as they are.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnfmq.compat.onnxruntime.environment import CPU
from nnfmq.compat.onnxruntime.interface import NodeArg
from nnfmq.compat.onnxruntime.options import SessionOptions
from nnfmq.compat.onnxruntime.shape_plans import Array
from nnfmq.compat.onnxruntime.types import dtype_of_type, type_name
from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import GeneralFailure, InvalidArgument

if TYPE_CHECKING:
    from nnfmq.client.burst.burst import ModelBurst
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.hal.hosted import HostedTensor
    from nnfmq.importers.file_format import ModelSource

__all__ = ["HostedPlan", "Provider", "SessionFile"]

_OF_THE_SESSION = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")
"""Entries about how long a session polls for results: the device decides how its threads wait."""
Provider = tuple[str, Mapping[str, Any]]
"""The name of an execution provider and its options."""


class HostedPlan:
    """A model that ONNX Runtime runs in the driver, for inputs of any shapes. Thread-safe.

    `inputs` and `outputs` are what ONNX Runtime says of them; `providers` are those that it uses.
    """

    is_retired = False

    def __init__(
        self,
        share: DriverShare,
        model: CompiledModel,
        providers: Sequence[Provider],
        options: SessionOptions,
    ) -> None:
        from nnfmq.client.model.prepared_model import PreparedModel  # while an embedded driver starts
        from nnfmq.hal.hosted import call_of

        self.providers = providers
        self._share = share
        self._model = share.adopt(model)
        self._polling_window_us = options.polling_window_us
        assert isinstance(model, PreparedModel) and model.planned_model is not None  # it is on one device
        call, sizes = call_of(model.planned_model), options.free_dimensions
        self.inputs = [_node(tensor, sizes) for tensor in call.inputs]
        self.outputs = [_node(tensor, sizes) for tensor in call.outputs]
        self._has_fixed_shapes = not any(info.has_unknown_shape for info in (*model.inputs, *model.outputs))
        self._free: deque[ModelBurst] = deque()

    def execute(self, inputs: Sequence[Array], outputs: Sequence[int]) -> list[Array]:
        """Return copies of the outputs with these indexes; blocks. Raises NnfmqError."""
        if not self._has_fixed_shapes:
            found = self._model.execute(*inputs)
            return [found[index] for index in outputs]
        burst = self._take()
        try:
            found = burst.execute(*inputs, out=burst.outputs)
            return [found[index].copy() for index in outputs]
        finally:
            self._free.append(burst)

    def _take(self) -> ModelBurst:
        try:
            return self._free.pop()
        except IndexError:
            return self._share.adopt(self._model.burst(polling_window_us=self._polling_window_us))


def _node(tensor: HostedTensor, sizes: Mapping[str, int]) -> NodeArg:
    """Return an input or output as ONNX Runtime describes it, with the sizes of the symbols that are fixed."""
    kind = type_name(tensor.dtype)
    shape = [sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape or ()]
    return NodeArg(tensor.name, kind, shape, dtype_of_type(kind), tensor.shape is not None, tensor.is_rank_0)


class SessionFile:
    """A session's file, and the options with which ONNX Runtime opens it."""

    def __init__(
        self, share: DriverShare, source: ModelSource, options: SessionOptions, providers: Sequence[Provider]
    ) -> None:
        self.source = source
        self._share, self._options = share, options
        self._providers = list(providers)

    def open_with_providers(self) -> HostedPlan | None:
        """Return the model with the caller's execution providers; None if they are only the CPU's; blocks.

        Those with which ONNX Runtime in the driver does not open the file are left out, with a warning for each.
        """
        while any(name != CPU for name, _ in self._providers):
            try:
                return self._open(None, self._providers)
            except (InvalidArgument, GeneralFailure) as error:
                self._ignore_one(str(error))
        return None

    def _ignore_one(self, reason: str) -> None:
        """Remove the first provider that the reason names, or the first of all that is not the CPU's."""
        others = [name for name, _ in self._providers if name != CPU]
        ignored = next((name for name in others if repr(name) in reason), others[0])
        self._providers = [provider for provider in self._providers if provider[0] != ignored]
        text = f"the driver has no provider {ignored!r} for this model, which is ignored: {reason}"
        warnings.warn(text, stacklevel=6)

    def open(self, refusal: InvalidArgument | GeneralFailure) -> HostedPlan:
        """Return the model on the CPU, after nnfmq's own engine has refused it; blocks. Raises NnfmqError."""
        return self._open(refusal, [provider for provider in self._providers if provider[0] == CPU] or [(CPU, {})])

    def _open(self, refusal: InvalidArgument | GeneralFailure | None, providers: Sequence[Provider]) -> HostedPlan:
        source = self.source
        model = self._share.client().prepare_hosted(
            "onnxruntime",
            source.path if source.path is not None else bytes(source.data),
            refusal,
            runtime_options=_runtime_options(self._options, providers),
        )
        return HostedPlan(self._share, model, providers, self._options)


def _runtime_options(options: SessionOptions, providers: Sequence[Provider]) -> dict[str, Any]:
    """Return the options of the device `onnxruntime` that stand for a session's: those that are not the defaults."""
    found: dict[str, Any] = {
        "providers": [name for name, _ in providers],
        "provider_options": [{key: str(value) for key, value in chosen.items()} for _, chosen in providers],
    }
    threads = max(options.intra_op_num_threads, options.inter_op_num_threads if options.is_parallel else 0)
    if threads > 0:
        found["threads"] = threads
    found.update(options.changed_settings)
    entries = {key: value for key, value in options.config_entries.items() if key not in _OF_THE_SESSION}
    if entries:
        found["session_config_entries"] = entries
    return found
