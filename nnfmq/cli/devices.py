"""`nnfmq devices`: list the devices of all drivers, or of one, and their performance info, and set their status."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import add_connect_argument, console, open_client, open_running, open_runtime, print_json, table

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client
    from nnfmq.client.partitioned.devices import RuntimeDevice
    from nnfmq.hal.capabilities import Capabilities
    from nnfmq.serialize.messages import DeviceInfo

EXAMPLES = """\
examples:
  nnfmq devices                           # of all drivers of this user, as nnfmq.Runtime names them
  nnfmq devices --connect gpu.sock --json
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
    if arguments.connect is None and not arguments.set:
        _print(arguments, _of_all_drivers(arguments.capabilities))
        return 0
    connect = _open_administered if arguments.set else partial(open_client, monitor=True)
    with connect(arguments.connect) as client:
        for name, status in arguments.set:
            client.set_device_status(name, DeviceStatus[status], keep=arguments.keep)
        driver = _driver_name(arguments.connect)
        ask = arguments.capabilities
        devices = [_describe(info, driver, ask, partial(query_capabilities, client, info)) for info in client.devices()]
        _print(arguments, devices)
        if not arguments.keep and any(status != "AVAILABLE" for _, status in arguments.set):
            _hold(client)
    return 0


def _of_all_drivers(with_capabilities: bool) -> list[dict[str, Any]]:
    """Return the devices of all drivers, or of an embedded driver if none listens, and the CPU device. Blocks."""
    with open_runtime(None) as runtime:
        return [
            _describe(_named(device), device.driver, with_capabilities, partial(_query, device), device.is_cpu)
            for device in runtime.devices()
        ]


def _named(device: RuntimeDevice) -> DeviceInfo:
    """Return a device's description with its name in the Runtime."""
    from msgspec.structs import replace

    return replace(device.info, name=device.name, version=device.version_string)


def _query(device: RuntimeDevice) -> tuple[Capabilities | None, str | None]:
    return _capabilities_or_reason(lambda: device.capabilities, device.info)


def _driver_name(target: str | None) -> str:
    from nnfmq.base.paths import client_socket

    return "embedded" if target == "embedded" else Path(target or client_socket()).stem


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
        return open_running(target, monitor=True)
    except nnfmq.DeviceUnavailable as error:
        raise nnfmq.DeviceUnavailable(f"{error}; --set needs the option --allow-device-status of it") from None


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


def _describe(
    info: DeviceInfo,
    driver: str,
    with_capabilities: bool,
    query: Callable[[], tuple[Capabilities | None, str | None]],
    is_cpu: bool = False,
) -> dict[str, Any]:
    """Return a device as printed in JSON. `query` is `query_capabilities`, whose results exclude each other."""
    from nnfmq.hal.types import DeviceStatus, DeviceType

    capabilities, reason = None, None
    if with_capabilities or info.status != DeviceStatus.AVAILABLE:
        capabilities, reason = query()
    device = {
        "name": info.name,
        "driver": driver,
        "is_cpu": is_cpu,
        "type": _name(DeviceType, info.type),
        "version": info.version,
        "feature_level": int(info.feature_level),
        "status": _name(DeviceStatus, info.status),
        "unavailable_reason": reason,
        "extensions": [_describe_extension(extension) for extension in info.extensions],
        "runs_files": _formats(info),
        "cache_files": {"model": info.model_cache_files, "data": info.data_cache_files},
    }
    if with_capabilities:
        device["capabilities"] = None if capabilities is None else _describe_capabilities(capabilities)
    return device


def _formats(info: DeviceInfo) -> list[str] | None:
    """Return the formats of files that a device runs on the runtime that it hosts; None if it hosts none.

    X
    """
    from nnfmq.client.connection.device import hosts_runtime
    from nnfmq.hal.hosted import runtime_named

    if not hosts_runtime(info):
        return None
    runtime = runtime_named(info.name.split("@")[0])
    return list(runtime.formats) if runtime is not None else []


def query_capabilities(client: Client, info: DeviceInfo) -> tuple[Capabilities | None, str | None]:
    """Return a device's capabilities and None, or None and the reason why the device is BUSY or OFFLINE. Blocks.

    The list of devices contains no reason; the driver puts it in the error that a call to such a device gets.
    """
    return _capabilities_or_reason(lambda: client.device(info.name).capabilities(), info)


def _capabilities_or_reason(
    ask: Callable[[], Capabilities], info: DeviceInfo
) -> tuple[Capabilities | None, str | None]:
    from nnfmq.hal.errors import DeviceUnavailable
    from nnfmq.hal.types import DeviceStatus

    try:
        return ask(), None
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
    has_several = len({device["driver"] for device in devices if not device["is_cpu"]}) > 1
    drivers = ["driver"] if has_several else []
    listing = table("device", *drivers, "type", "version", ">level", "status", "extensions")
    columns = ("name", *drivers, "type", "version", "feature_level", "status")
    for device in devices:
        extensions = "\n".join(extension["name"] for extension in device["extensions"])
        if device["runs_files"]:
            extensions += f"\nruns {', '.join(device['runs_files'])} files"
        shown = device | {"driver": "-" if device["is_cpu"] else device["driver"]}  # it has none before its first model
        listing.add_row(*(str(shown[column]) for column in columns), extensions or "none")
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
