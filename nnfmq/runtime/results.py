"""What a driver answers is judged before anything of it is used (VAL-7): check_result, and possible_devices.

The application trusts no driver. A device whose description cannot be true is left out (DEV-10). An answer to an
execution that no honest driver gives is a ProtocolError, which is a GENERAL_FAILURE to whoever looks at the status.
Shapes and times beside an error must not be, but nobody looks at them. All is compared here and not by `validation`,
for whose import every application would wait.

    SHP-2 success: a shape for every output, or none at all if all are known; each buffer sufficed
    SHP-4 OUTPUT_INSUFFICIENT_SIZE: a shape for every output, and one that did not suffice at least
    TIM-3 times only if they were asked for and all went well, -1 at least
    TIM-4 the time in the driver includes the time on the device
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nnfmq.hal.device import MAX_NUMBER_OF_CACHE_FILES
from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import NO_TIME, NO_TIMING, OutputShape, RequestArgument, Timing
from nnfmq.runtime.arguments import check_room, check_stated, is_open
from nnfmq.serialize.messages import DeviceInfo

_log = logging.getLogger("nnfmq.client")


def possible_devices(stated: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices that can be as they are described; the others are logged (DEV-10)."""
    found = []
    for info in stated:
        wrong = next(_impossible(info), None)
        if wrong is None:
            found.append(info)
        else:
            _log.warning("device %r of the driver is left out: %s", info.name, wrong)
    return found


def _impossible(info: DeviceInfo) -> Iterator[str]:
    if not info.version:
        yield "its version string is empty (DEV-4)"
    for count in (info.model_cache_files, info.data_cache_files):
        if count > MAX_NUMBER_OF_CACHE_FILES:
            yield f"it wants {count} cache files of a kind, {MAX_NUMBER_OF_CACHE_FILES} are allowed (DEV-6)"
    if info.extensions:  # few devices have any, and the module costs a millisecond
        from nnfmq.hal.extensions import is_extension_name

        for extension in info.extensions:
            types = [element.type for element in extension.operand_types]
            if not is_extension_name(extension.name):
                yield f"no extension is called {extension.name!r} (EXT-1)"
            if len(set(types)) != len(types) or not all(element.byte_size for element in extension.operand_types):
                yield f"extension {extension.name} has a type twice, or one of no bytes (EXT-1)"


def check_result(
    infos: Sequence[TensorInfo],
    outputs: Sequence[RequestArgument],
    status: ErrorStatus,
    shapes: Sequence[OutputShape],
    timing: Timing,
    is_measured: bool,
) -> None:
    """Raise ProtocolError where a driver cannot have meant its answer.

    `infos` are the model's outputs, `outputs` where the request has them.
    """
    if status is ErrorStatus.NONE:
        _check_success(infos, outputs, shapes)
        _check_timing(timing, is_measured)
    elif status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        check_stated(_asked(infos, outputs), [shape.dimensions for shape in shapes])
        if all(shape.is_sufficient for shape in shapes):
            raise ProtocolError("SHP-4: the driver says that an output is too small, and that each one suffices")


def _check_success(
    infos: Sequence[TensorInfo], outputs: Sequence[RequestArgument], shapes: Sequence[OutputShape]
) -> None:
    wanted = _asked(infos, outputs)
    if not shapes:
        unknown = [info.name for info in wanted if is_open(info)]
        if unknown:
            raise ProtocolError(f"SHP-2: the driver states no shape for the outputs {unknown}, which have none")
        return
    stated = [shape.dimensions for shape in shapes]
    check_stated(wanted, stated)
    # A buffer of the driver's has no length here: how large it is, is the driver's own affair.
    given = [triple for triple in zip(wanted, outputs, stated, strict=True) if triple[1].location.length]
    check_room([info for info, _, _ in given], [place for _, place, _ in given], [shape for _, _, shape in given])
    if not all(shape.is_sufficient for shape in shapes):
        raise ProtocolError("SHP-2: the driver says that all went well, and that an output did not suffice")


def _asked(infos: Sequence[TensorInfo], outputs: Sequence[RequestArgument]) -> list[TensorInfo]:
    """Return the outputs with what the request fills in of their dimensions."""
    if len(outputs) != len(infos):
        raise ProtocolError(f"the driver executed {len(outputs)} outputs of a model that has {len(infos)}")
    return [_filled_in(info, place.dimensions) for info, place in zip(infos, outputs, strict=True)]


def _filled_in(info: TensorInfo, given: tuple[int, ...]) -> TensorInfo:
    if not given:
        return info
    if not info.shape:
        return replace(info, shape=given)
    if len(given) != len(info.shape):
        raise ProtocolError(f"the driver executed output {info.name!r} of shape {info.shape} with shape {given}")
    return replace(info, shape=tuple(known or asked for known, asked in zip(info.shape, given, strict=True)))


def _check_timing(timing: Timing, is_measured: bool) -> None:
    if timing == NO_TIMING:
        return
    if not is_measured:
        raise ProtocolError(f"TIM-3: the driver states {timing}, which was not asked for")
    device, driver = timing.time_on_device_ns, timing.time_in_driver_ns
    is_ordered = NO_TIME in (device, driver) or device <= driver
    if min(device, driver) < NO_TIME or not is_ordered:
        raise ProtocolError(f"TIM-4: the driver states impossible times: {timing}")
