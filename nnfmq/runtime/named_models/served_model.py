"""ServedModel: a model of the driver's model repository, which executes the version that the repository serves."""

from __future__ import annotations

from nnfmq.hal.summaries import clipped
from nnfmq.runtime.defaults import DEFAULT_TIMEOUT_S
from nnfmq.runtime.named_models.moving_burst import MovingBurst
from nnfmq.runtime.prepared_model import PreparedModel
from nnfmq.serialize.repository_protocol import ModelDescription

__all__ = ["ServedModel"]


class ServedModel(PreparedModel):
    """A prepared model that the driver's model repository serves under a name.

    Unless it was opened with a version, it moves when the repository serves a newer one: executions that have begun end
    on the old version, and later ones run on the new one, also over bursts that exist. `inputs`, `outputs` and `batch`
    never change: a version with others is not used. AIDL bursts and reusable executions stay with the version with
    which they were made; buffers of the driver can be used with that one only.

    `name` is the model's name, and `batch` the size of the first dimension of each input and output, whose rows are
    independent of each other; 1 = the model does not compute batches. `device` prepared the first version.
    """

    def __init__(self, prepared: PreparedModel, description: ModelDescription) -> None:
        handle = prepared.handle
        super().__init__(
            handle.connection, None, prepared.inputs, prepared.outputs, prepared.device, handle.extensions,
            description.states,
        )  # fmt: skip
        self.handle = handle
        self.name = description.name
        self.batch = description.batch

    def __repr__(self) -> str:
        return (
            f"<ServedModel {self.name!r} version {self.version} on {self._place()}: {clipped(self.handle.signature)}>"
        )

    @property
    def version(self) -> int:
        """The version that the next execution runs on; a burst has its own `version`."""
        return self.handle.location.version

    def burst(
        self, *, polling_window_us: float | None = None, timeout: float | None = DEFAULT_TIMEOUT_S
    ) -> MovingBurst:
        """Configure a burst, as `PreparedModel.burst`, which moves to a new version at its next execution. Blocks."""
        burst = super().burst(polling_window_us=polling_window_us, timeout=timeout)
        assert isinstance(burst, MovingBurst)  # `burst_configuration` chooses it by the model's version
        return burst
