"""prepare_steps: prepare the steps of a plan on their devices; those of different drivers at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from nnfmq.hal.errors import NnfmqError
from nnfmq.runtime.prepared_model import PreparedModel

__all__ = ["StepCall", "prepare_steps"]


class StepCall(NamedTuple):
    """The preparation of one step. `driver` names its driver."""

    driver: str
    prepare: Callable[[], PreparedModel]


def prepare_steps(calls: Sequence[StepCall], progress: Callable[[int, int], None] | None = None) -> list[PreparedModel]:
    """Return the prepared models of the steps, in order; blocks. The caller closes them.

    Each driver prepares its steps one after the other. If one fails, the others' are closed as soon as they are
    prepared, and nobody waits for that.

    Args:
        calls: The steps.
        progress: Called on this thread with the numbers of prepared steps and of all. An exception ends this call.

    Raises:
        NnfmqError: The first error of a step.
    """
    groups: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        groups.setdefault(call.driver, []).append(index)
    work = _Preparations(calls)
    try:
        if len(groups) > 1:
            for group in groups.values():
                threading.Thread(target=work.run, args=[group], name="nnfmq-prepare", daemon=True).start()
        for index in range(len(calls)):
            if len(groups) == 1:
                work.run([index])
            work.wait_for_one()
            if progress is not None:
                progress(index + 1, len(calls))
    except BaseException:
        work.cancel()
        raise
    return work.results()


class _Preparations:
    """The steps that are prepared, or being prepared. Thread-safe."""

    def __init__(self, calls: Sequence[StepCall]) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._prepared: dict[int, PreparedModel] = {}
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._is_cancelled = False

    def run(self, indexes: Sequence[int]) -> None:
        """Prepare steps one after the other, until one fails or all are cancelled."""
        for index in indexes:
            if self._is_cancelled:
                return
            try:
                model = self._calls[index].prepare()
            except (NnfmqError, OSError) as error:
                self._ended.put(error)
                return
            self._keep(index, model)
            self._ended.put(None)

    def _keep(self, index: int, model: PreparedModel) -> None:
        with self._lock:
            if not self._is_cancelled:
                self._prepared[index] = model
                return
        model.close()

    def wait_for_one(self) -> None:
        """Block until a step is prepared. Raises the error of one that fails."""
        error = self._ended.get()
        try:
            if error is not None:
                raise error
        finally:
            del error  # this frame, to which it refers, would keep it

    def cancel(self) -> None:
        """Close what is prepared now or later."""
        with self._lock:
            self._is_cancelled = True
            models, self._prepared = list(self._prepared.values()), {}
        for model in models:
            model.close()

    def results(self) -> list[PreparedModel]:
        """Return the models, when all are prepared."""
        return [self._prepared[index] for index in range(len(self._calls))]
