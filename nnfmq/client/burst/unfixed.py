"""UnfixedBurst: a burst of a model whose shapes are not all known.

The first execution with arrays lays out the burst's memory for their shapes. Later ones with these shapes send the same
packet, and cost what those of any burst cost; others lay it out again. If the driver replies that an output is larger
than its memory (OUTPUT_INSUFFICIENT_SIZE), the burst enlarges that and executes once more, within the same deadline.
The states of a model advance when an execution succeeds, so the repeated one begins with the same.

Only a burst without an execution in progress replaces its memory: a call first waits for one that was abandoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nnfmq.client.burst.burst import Burst
from nnfmq.client.burst.requests import CachedRequest, cached_requests
from nnfmq.client.model.array_layouts import ArrayLayouts, LaidOutArrays, Shape
from nnfmq.client.model.array_request import MappedArrays
from nnfmq.client.model.arrays import Array, Outputs
from nnfmq.client.model.handle import MappedState, StateValues
from nnfmq.hal.errors import BadState, ErrorStatus
from nnfmq.serialize.packets import ResultPacket

__all__ = ["UnfixedBurst"]


class UnfixedBurst(Burst):
    """A burst whose arrays are laid out for the shapes of each execution; otherwise as `ModelBurst` says.

    `inputs` and `outputs` are those of the last execution's shapes; before the first there are none if it decides them.
    """

    __slots__ = ("_kept_state", "_layouts")

    _arrays: LaidOutArrays | None
    _kept_state: StateValues | MappedState | None
    _layouts: ArrayLayouts

    def _use_memory(self, arrays: MappedArrays | None) -> None:
        self._layouts = ArrayLayouts(self._model, self, partial(cached_requests, self._slots))
        self._resources.callback(self._layouts.close)
        self._take_layout(self._layouts.first())

    # ------------------------------------------------------------------------------------------------ arrays

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The input arrays over the shared memory, of the last execution's shapes; empty once closed.

        Raises:
            InvalidArgument: Before the first execution, if the model leaves the shape of an input open.
        """
        if self._arrays is None:
            return ()
        self._arrays.require_laid_out()
        self._has_inputs = True
        return self._arrays.inputs

    @property
    def outputs(self) -> Outputs:
        """The output arrays over the shared memory, with the shapes that the last execution has reported.

        Empty before the first execution, if the model leaves the shape of an output open, and once closed.
        """
        return Outputs() if self._arrays is None else self._arrays.outputs

    @outputs.setter
    def outputs(self, _outputs: Outputs) -> None:
        """Do nothing: the arrays have them."""

    @property
    def _state(self) -> StateValues | MappedState | None:
        return self._kept_state if self._arrays is None else self._arrays.state

    @_state.setter
    def _state(self, state: StateValues | MappedState | None) -> None:
        self._kept_state = state  # when the burst is made or closed

    # ------------------------------------------------------------------------------------------------ layouts

    def lay_out(self, shapes: tuple[Shape, ...]) -> LaidOutArrays:
        """Replace the arrays by those for inputs of these shapes, and return them; for `LaidOutArrays`."""
        connection = self.channel.connection
        was_open = connection.is_open  # otherwise the CPU executes
        arrays = self._layouts.lay_out(shapes, self._arrays)
        self._take_layout(arrays)
        if was_open:  # that may have taken long, and what is sent to a driver that has died is not sent again
            connection.raise_if_closed()
        return arrays

    def _take_layout(self, arrays: LaidOutArrays) -> None:
        self._arrays = arrays
        if self._is_closed:  # by another thread
            self._arrays = None
            raise BadState("this burst is closed")
        self.channel.forget_memories(self._layouts.close_replaced())

    def _grow(self, arrays: MappedArrays, result: ResultPacket) -> bool:
        if result.status is not ErrorStatus.OUTPUT_INSUFFICIENT_SIZE or self._is_repeating:
            return False
        larger = self._layouts.grow(arrays, result.output_shapes)
        if larger is None:
            return False
        self._take_layout(larger)
        return True

    def _show(self, arrays: MappedArrays, result: ResultPacket) -> MappedArrays:
        shown = self._layouts.show(arrays, result.output_shapes, _without_replies)
        if shown is not arrays:
            self._take_layout(shown)
        return shown

    def _store(self, arrays: MappedArrays, results: Sequence[Array]) -> MappedArrays:
        stored = self._layouts.store(arrays, results, _without_replies)
        self._take_layout(stored)
        return stored


def _without_replies(requests: tuple[CachedRequest, ...]) -> tuple[CachedRequest, ...]:
    """Return the same requests: a reply that is valid for other arrays does not describe these."""
    return tuple(CachedRequest(request.packet, request.output_args, request.is_measured) for request in requests)
