"""`nnfmq devices`: what the driver offers, how fast it says that is, and an administrator's switch."""

from __future__ import annotations

import argparse
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from nnfmq.cli.output import add_connect_argument, console, open_client, print_json, table

if TYPE_CHECKING:
    from nnfmq.runtime.client import Client

EXAMPLES = """\
examples:
  nnfmq devices
  nnfmq devices --json
  nnfmq devices --capabilities            # figures relative to the CPU; lower is better
  nnfmq devices --set reference=OFFLINE   # for all clients of the driver, until it is AVAILABLE again
"""
_STATUSES = ("AVAILABLE", "BUSY", "OFFLINE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `devices`."""
    add_connect_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--capabilities", action="store_true", help="print how fast each device says that it is")
    parser.add_argument(
        "--set",
        metavar="DEVICE=STATUS",
        type=_assignment,
        action="append",
        default=[],
        help=f"make a device {', '.join(_STATUSES[:-1])} or {_STATUSES[-1]}, for all clients; may be repeated",
    )


def _assignment(text: str) -> tuple[str, str]:
    name, _, status = text.rpartition("=")
    if not name or status.upper() not in _STATUSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not DEVICE=STATUS with a status of {', '.join(_STATUSES)}")
    return name, status.upper()


def execute(arguments: argparse.Namespace) -> int:
    """Connect, set, ask, print."""
    with open_client(arguments.connect) as client:
        _set(client, arguments.set)
        devices = [_as_dict(device) for device in client.devices()]
        if arguments.capabilities:
            for device in devices:
                device["capabilities"] = _capabilities(client, device["name"])
    if arguments.json:
        print_json({"devices": devices})
    elif arguments.capabilities:
        _print_capabilities(devices, arguments.no_color)
    else:
        _print_table(devices, arguments.no_color)
    return 0


def _set(client: Client, wanted: list[tuple[str, str]]) -> None:
    from nnfmq.hal.types import DeviceStatus

    for name, status in wanted:
        client.set_device_status(name, DeviceStatus[status])


def _as_dict(device: Any) -> dict[str, Any]:
    from nnfmq.hal.types import DeviceStatus, DeviceType

    return {
        "name": device.name,
        "type": _name(DeviceType, device.type),
        "version": device.version,
        "feature_level": int(device.feature_level),
        "status": _name(DeviceStatus, device.status),
        "extensions": [_extension_as_dict(extension) for extension in device.extensions],
    }


def _extension_as_dict(extension: Any) -> dict[str, Any]:
    fields = ("type", "is_tensor", "byte_size", "dtype")
    types = [{name: getattr(kind, name) for name in fields} for kind in extension.operand_types]
    return {"name": extension.name, "operand_types": types}


def _capabilities(client: Client, name: str) -> dict[str, Any] | None:
    """Return a device's figures by what they are about; None while it is busy or offline."""
    from nnfmq.hal.errors import DeviceUnavailable

    try:
        found = client.device(name).capabilities()
    except DeviceUnavailable:
        return None
    figures = {entry.type.name: entry.info for entry in found.operand_performance}
    figures |= {
        "relaxed float32 scalar": found.relaxed_float32_to_float16_scalar,
        "relaxed float32 tensor": found.relaxed_float32_to_float16_tensor,
        "IF": found.if_performance,
        "WHILE": found.while_performance,
    }
    return {name: {"exec_time": info.exec_time, "power_usage": info.power_usage} for name, info in figures.items()}


def _name(names: type[IntEnum], number: int) -> str:
    """Return the HAL's name of a number that a driver sent, which need not be one that we know."""
    try:
        return names(number).name
    except ValueError:
        return str(int(number))


def _print_table(devices: list[dict[str, Any]], no_color: bool) -> None:
    listing = table("device", "type", "version", ">feature level", "status", "extensions")
    listing.columns[0].no_wrap = True  # what users copy
    for device in devices:
        names = "\n".join(extension["name"] for extension in device["extensions"])
        listing.add_row(*(str(value) for value in [*device.values()][:5]), names or "none")
    console(no_color).print(listing)


def _print_capabilities(devices: list[dict[str, Any]], no_color: bool) -> None:
    """Print a row for each pair of figures, with what it is about: equal ones are told together."""
    listing = table("device", ">time", ">power", "of")
    listing.columns[0].no_wrap = True
    for device in devices:
        if device["capabilities"] is None:
            listing.add_row(device["name"], "", "", f"{device['status']}: not to be asked")
            continue
        groups: dict[tuple[float, float], list[str]] = {}
        for about, figures in device["capabilities"].items():
            groups.setdefault((figures["exec_time"], figures["power_usage"]), []).append(about)
        most = max(groups, key=lambda pair: len(groups[pair]))
        for pair in sorted(groups, key=lambda pair: pair != most):
            rest = "everything" if len(groups) == 1 else "everything else"
            about = rest if pair == most else ", ".join(groups[pair])
            listing.add_row(device["name"], f"{pair[0]:g}", f"{pair[1]:g}", about)
    console(no_color).print(listing)
