"""`nnfmq devices`: list the driver's devices and their performance info, and set their status."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import add_connect_argument, console, open_client, print_json, table

if TYPE_CHECKING:
    from nnfmq.hal.capabilities import Capabilities
    from nnfmq.runtime.client import Client
    from nnfmq.serialize.messages import DeviceInfo

EXAMPLES = """\
examples:
  nnfmq devices
  nnfmq devices --json
  nnfmq devices --capabilities            # performance relative to the CPU; lower is better
  nnfmq devices --set reference=OFFLINE          # for all clients of the driver, until Ctrl-C
  nnfmq devices --set reference=OFFLINE --keep   # until it is set to AVAILABLE

--set needs a driver that was started with `nnfmq serve --allow-device-status`.
"""
_HOLD_CHECK_S = 0.2  # between two checks whether the driver still runs, while a status is held
_STATUSES = ("AVAILABLE", "BUSY", "OFFLINE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `devices`."""
    add_connect_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--capabilities", action="store_true", help="print the performance info of each device")
    parser.add_argument(
        "--set",
        metavar="DEVICE=STATUS",
        type=_assignment,
        action="append",
        default=[],
        help=f"set a device's status to {', '.join(_STATUSES[:-1])} or {_STATUSES[-1]} for all clients, until this "
        "command ends; may be repeated",
    )
    parser.add_argument("--keep", action="store_true", help="with --set: end now, and keep the status in the driver")


def _assignment(text: str) -> tuple[str, str]:
    name, _, status = text.rpartition("=")
    if not name or status.upper() not in _STATUSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not DEVICE=STATUS with a status of {', '.join(_STATUSES)}")
    return name, status.upper()


def execute(arguments: argparse.Namespace) -> int:
    """Connect, set the statuses, print the devices as they are then, hold the statuses; return the exit status."""
    from nnfmq.hal.types import DeviceStatus

    problem = _usage_problem(arguments)
    if problem:
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    with _open_administered(arguments.connect) if arguments.set else open_client(arguments.connect) as client:
        for name, status in arguments.set:
            client.set_device_status(name, DeviceStatus[status], keep=arguments.keep)
        devices = [_describe(client, info, arguments.capabilities) for info in client.devices()]
        _print(arguments, devices)
        if not arguments.keep and any(status != "AVAILABLE" for _, status in arguments.set):
            _hold(client)
    return 0


def _usage_problem(arguments: argparse.Namespace) -> str:
    if arguments.keep and not arguments.set:
        return "--keep needs --set"
    if arguments.set and arguments.connect == "embedded":
        return "--set needs a driver that other programs use; an embedded one ends with this command"
    return ""


def _open_administered(target: str | None) -> Client:
    """Connect to a running driver and return the client, which the caller closes.

    Raises:
        DeviceUnavailable: If there is none; the message says how to start one.
    """
    import nnfmq

    try:
        return nnfmq.connect(target, embedded=False)
    except nnfmq.DeviceUnavailable as error:
        remedy = "--set needs a running driver: start one with `nnfmq serve --allow-device-status`"
        raise nnfmq.DeviceUnavailable(f"{error}; {remedy}") from None


def _hold(client: Client) -> None:
    """Block until Ctrl-C. Raises DeadObject if the driver exits before."""
    print("nnfmq: the status is held until Ctrl-C; --keep makes it permanent", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):
        while client.connection.is_open:
            time.sleep(_HOLD_CHECK_S)
        client.devices()  # raises


def _print(arguments: argparse.Namespace, devices: list[dict[str, Any]]) -> None:
    if arguments.json:
        print_json({"devices": devices})
    elif arguments.capabilities:
        _print_capabilities(devices, arguments.no_color)
    else:
        _print_table(devices, arguments.no_color)
    sys.stdout.flush()


def _describe(client: Client, info: DeviceInfo, with_capabilities: bool) -> dict[str, Any]:
    """Return a device as printed in JSON. `capabilities` and `unavailable_reason` exclude each other."""
    from nnfmq.hal.types import DeviceStatus, DeviceType

    capabilities, reason = None, None
    if with_capabilities or info.status != DeviceStatus.AVAILABLE:
        capabilities, reason = query_capabilities(client, info)
    device = {
        "name": info.name,
        "type": _name(DeviceType, info.type),
        "version": info.version,
        "feature_level": int(info.feature_level),
        "status": _name(DeviceStatus, info.status),
        "unavailable_reason": reason,
        "extensions": [_describe_extension(extension) for extension in info.extensions],
        "cache_files": {"model": info.model_cache_files, "data": info.data_cache_files},
    }
    if with_capabilities:
        device["capabilities"] = None if capabilities is None else _describe_capabilities(capabilities)
    return device


def query_capabilities(client: Client, info: DeviceInfo) -> tuple[Capabilities | None, str | None]:
    """Return a device's capabilities and None, or None and the reason why the device is BUSY or OFFLINE. Blocks.

    The list of devices contains no reason; the driver puts it in the error that a call to such a device gets.
    """
    from nnfmq.hal.errors import DeviceUnavailable
    from nnfmq.hal.types import DeviceStatus

    try:
        return client.device(info.name).capabilities(), None
    except DeviceUnavailable as error:
        prefix = f"device {info.name!r} is {_name(DeviceStatus, info.status)}"
        return None, str(error).removeprefix(prefix).removeprefix(": ") or "set by an administrator"


def _describe_extension(extension: Any) -> dict[str, Any]:
    fields = ("type", "is_tensor", "byte_size", "dtype")
    types = [{name: getattr(operand_type, name) for name in fields} for operand_type in extension.operand_types]
    return {"name": extension.name, "operand_types": types}


def _describe_capabilities(capabilities: Capabilities) -> dict[str, Any]:
    infos = {entry.type.name: entry.info for entry in capabilities.operand_performance}
    infos |= {
        "relaxed float32 scalar": capabilities.relaxed_float32_to_float16_scalar,
        "relaxed float32 tensor": capabilities.relaxed_float32_to_float16_tensor,
        "IF": capabilities.if_performance,
        "WHILE": capabilities.while_performance,
    }
    return {name: {"exec_time": info.exec_time, "power_usage": info.power_usage} for name, info in infos.items()}


def _name(names: type[IntEnum], code: int) -> str:
    """Return the HAL's name of a code, or the code in digits if this version of the HAL does not define it."""
    try:
        return names(code).name
    except ValueError:
        return str(int(code))


def _print_table(devices: list[dict[str, Any]], no_color: bool) -> None:
    screen = console(no_color)
    listing = table("device", "type", "version", ">level", "status", "extensions")
    columns = ("name", "type", "version", "feature_level", "status")
    for device in devices:
        extensions = "\n".join(extension["name"] for extension in device["extensions"])
        listing.add_row(*(str(device[column]) for column in columns), extensions or "none")
    listing.columns[0].no_wrap = True  # users copy it
    screen.print(listing)
    for device in devices:
        if device["unavailable_reason"]:
            text = f"{device['name']} is {device['status']}: {device['unavailable_reason']}"
            screen.print(text, soft_wrap=True)  # users copy the command in it


def _print_capabilities(devices: list[dict[str, Any]], no_color: bool) -> None:
    """Print one row for each performance info of a device, with the types that it is valid for."""
    listing = table("device", ">time", ">power", "of")
    listing.columns[0].no_wrap = True
    for device in devices:
        if device["capabilities"] is None:
            listing.add_row(device["name"], "", "", f"{device['status']}: {device['unavailable_reason']}")
            continue
        groups: dict[tuple[float, float], list[str]] = {}
        for name, info in device["capabilities"].items():
            groups.setdefault((info["exec_time"], info["power_usage"]), []).append(name)
        largest = max(groups, key=lambda pair: len(groups[pair]))
        for pair in sorted(groups, key=lambda pair: pair != largest):
            rest = "everything" if len(groups) == 1 else "everything else"
            names = rest if pair == largest else ", ".join(groups[pair])
            listing.add_row(device["name"], f"{pair[0]:g}", f"{pair[1]:g}", names)
    console(no_color).print(listing)
