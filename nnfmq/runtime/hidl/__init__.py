"""HIDL's methods, for tests of drivers that were written against android.hardware.neuralnetworks 1.0 to 1.3.

    with nnfmq.connect(interface="HIDL 1.2") as client:
        device = hidl.IDevice(client, "reference")
        status, capabilities = device.getCapabilities_1_2()
        status = device.prepareModel_1_2(model, preference, [[model_fd]], [[data_fd]], token, callback)
        status, shapes, timing = prepared.executeSynchronously(request, measure)

Methods have the HAL's names and order of parameters, and return what the HAL's `generates` lists: a status instead of
an exception. An object has the methods of the connection's interface version; one of a later version is an
AttributeError. The tables DEVICE, PREPARED_MODEL and BUFFER list all.

A callback is called exactly once with the arguments of the HAL's `notify`, `notify_1_2` or `notify_1_3`: on the
caller's thread if the launch was rejected, otherwise on a new thread.

Times are in µs, UINT64_MAX if not available. A deadline is None or a time of the monotonic clock in ns; a duration is
None or in ns. A handle of a cache file is the sequence of its fds.

Only DeadObject is raised, if the driver has exited, as a HIDL transaction fails. The client checks what the driver
cannot know: whether a method that is older than the connection's interface version could carry a value, handles, and
null references (DEV-13, EXE-15, TIM-2, CAP-2).
"""

from __future__ import annotations

from nnfmq.runtime.hidl.ibuffer import BUFFER, IBuffer
from nnfmq.runtime.hidl.iburst_context import BurstContext
from nnfmq.runtime.hidl.idevice import DEVICE, IDevice
from nnfmq.runtime.hidl.iprepared_model import PREPARED_MODEL, FencedCallback, IPreparedModel
from nnfmq.runtime.hidl.methods import NO_HIDL_TIMING, UINT64_MAX, HidlTiming

__all__ = [
    "BUFFER",
    "DEVICE",
    "NO_HIDL_TIMING",
    "PREPARED_MODEL",
    "UINT64_MAX",
    "BurstContext",
    "FencedCallback",
    "HidlTiming",
    "IBuffer",
    "IDevice",
    "IPreparedModel",
]
