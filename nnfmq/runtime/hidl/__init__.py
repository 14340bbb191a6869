"""HIDL's call forms, for tests of drivers that were written against android.hardware.neuralnetworks 1.0 to 1.3.

    with nnfmq.connect(interface="HIDL 1.2") as client:
        device = hidl.IDevice(client, "reference")
        status, capabilities = device.getCapabilities_1_2()
        status = device.prepareModel_1_2(model, preference, [[model_fd]], [[data_fd]], token, callback)
        status, shapes, timing = prepared.executeSynchronously(request, measure)

Methods have the HAL's names and order of arguments, and answer what it `generates`: a status, not an exception. Which
there are follows from the interface that the connection speaks: a method of a later one is an AttributeError. All are
in the tables DEVICE, PREPARED_MODEL and BUFFER. A callback is called exactly once with what the HAL hands to the form's
`notify`, `notify_1_2` or `notify_1_3`: on the caller's thread where the launch was refused, otherwise on one of its
own. Times are microseconds, UINT64_MAX where they are not available; a deadline is None or a point of the steady clock
in ns, a duration None or ns; a handle of a cache file is the sequence of its descriptors. Only a driver that is gone
raises: DeadObject, as a transaction fails in HIDL. What the driver cannot know of is judged here: a form that is older
than the connection's interface, by what it could have said; handles, and references to nothing.
(REQUIREMENTS DEV-13, EXE-15, TIM-2, CAP-2)
"""

from __future__ import annotations

from nnfmq.runtime.hidl.ibuffer import BUFFER, IBuffer
from nnfmq.runtime.hidl.iburst_context import BurstContext
from nnfmq.runtime.hidl.idevice import DEVICE, IDevice
from nnfmq.runtime.hidl.iprepared_model import PREPARED_MODEL, FencedCallback, IPreparedModel
from nnfmq.runtime.hidl.methods import NO_TIMING, UINT64_MAX, Timing

__all__ = [
    "BUFFER",
    "DEVICE",
    "NO_TIMING",
    "PREPARED_MODEL",
    "UINT64_MAX",
    "BurstContext",
    "FencedCallback",
    "IBuffer",
    "IDevice",
    "IPreparedModel",
    "Timing",
]
