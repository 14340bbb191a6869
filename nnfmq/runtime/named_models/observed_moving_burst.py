"""ObservedMovingBurst: a burst that moves to new versions of its model, and shows its executions to observers."""

from __future__ import annotations

from nnfmq.runtime.model_handle import ModelLocation
from nnfmq.runtime.named_models.moving_burst import MovingBurst
from nnfmq.runtime.observed_burst import ObservedBurst

__all__ = ["ObservedMovingBurst"]


class ObservedMovingBurst(MovingBurst, ObservedBurst):
    """A moving burst of a model that is observed; for its observers each version is a model of its own."""

    def _open_at(self, location: ModelLocation, deadline_ns: int | None) -> None:
        super()._open_at(location, deadline_ns)
        self._observed = self._model.observed or self._observed
