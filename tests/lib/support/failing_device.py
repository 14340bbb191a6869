"""A driver with a device that fails on demand: its inputs say how, so each execution decides.

`test-failing` adds 100 to the correct result, so a test sees who has executed: the device or the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from support.drivers import Daemon, running_daemon, short_folder
from support.plugins import add_plugin, path_with

DEVICE = "test-failing"
FAIL, DIE, MISS, EXHAUST = 13.0, 14.0, 15.0, 16.0
"""First values of the first input that make the device fail, its process die, and raise two other errors."""

_SOURCE = """
import os
import signal

from nnfmq.engines.function import FunctionProgram
from nnfmq.hal.errors import GeneralFailure, MissedDeadlineTransient, ResourceExhaustedTransient
from nnfmq.driver.devices.device import DeviceBase

ERRORS = {13.0: GeneralFailure, 15.0: MissedDeadlineTransient, 16.0: ResourceExhaustedTransient}


class Failing(DeviceBase):
    name = "test-failing"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        def run(inputs):
            first = float(inputs[0].flat[0])
            if first == 14.0:
                os.kill(os.getpid(), signal.SIGKILL)
            if first in ERRORS:
                raise ERRORS[first]("as the test wants")
            return [sum(inputs) + 100]

        return FunctionProgram(model, run)
"""


@contextmanager
def failing_driver(site: Path) -> Iterator[Daemon]:
    """Run a driver that has the device, which is installed into the folder `site`."""
    add_plugin(site, "nnfmq_failing", _SOURCE, {"failing": "nnfmq_failing:Failing"}, "nnfmq.devices")
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


def four(value: float) -> npt.NDArray[np.float32]:
    """Return an input of `models.add_model` that is this value four times."""
    return np.full(4, value, np.float32)
