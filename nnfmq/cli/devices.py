"""`nnfmq devices`: what the driver offers."""

from __future__ import annotations

import argparse
from enum import IntEnum
from typing import Any

from nnfmq.cli.output import add_connect_argument, console, open_client, print_json, table

EXAMPLES = """\
examples:
  nnfmq devices
  nnfmq devices --json
  nnfmq devices --connect embedded
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `devices`."""
    add_connect_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Connect, ask, print."""
    with open_client(arguments.connect) as client:
        devices = [_as_dict(device) for device in client.devices()]
    if arguments.json:
        print_json({"devices": devices})
    else:
        _print_table(devices, arguments.no_color)
    return 0


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


def _name(names: type[IntEnum], number: int) -> str:
    """Return the HAL's name of a number that a driver sent, which need not be one that we know."""
    try:
        return names(number).name
    except ValueError:
        return str(int(number))


def _print_table(devices: list[dict[str, Any]], no_color: bool) -> None:
    listing = table("device", "type", "version", ">feature level", "status", "extensions")
    for device in devices:
        names = "\n".join(extension["name"] for extension in device["extensions"])
        listing.add_row(*(str(value) for value in [*device.values()][:-1]), names or "none")
    console(no_color).print(listing)
