"""`nnfmq config`: show the settings, their values and sources, and what each setting means.

`show` prints all settings or one, also if some are invalid: those are reported on stderr, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.base import settings
from nnfmq.base.settings import candidates, nearest
from nnfmq.cli.console import console, print_json, table
from nnfmq.cli.parser import CommandAction, add_actions
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLES = """\
examples:
  nnfmq config show                      # all settings
  nnfmq config explain memory_mib
  nnfmq --config lab.toml config show    # with this file only

An option takes precedence over the environment, that over files, and they over the default.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `config`, and their options."""
    add_actions(parser, _ACTIONS)


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "name", metavar="NAME", nargs="?", type=_named, help="key or variable: memory_mib, NNFMQ_MEMORY_MIB"
    )


_ACTIONS = {
    "show": CommandAction(
        "print the values of all settings, or of one, and their sources",
        ("nnfmq config show", "nnfmq config show cache_mib --json", "NNFMQ_CACHE_MIB=64 nnfmq config show cache_mib"),
        _declare,
    ),
    "explain": CommandAction(
        "print type, default, allowed values and meaning of all settings, or one",
        (
            "nnfmq config explain",
            "nnfmq config explain burst_server_polling_window",
            "nnfmq config explain NNFMQ_SOCKET --json",
        ),
        _declare,
    ),
}


def _named(text: str) -> settings.Setting[Any]:
    """Argparse type: a setting by its key or variable, in lower or upper case."""
    for setting in settings.table().values():
        if text.lower() in (setting.name.lower(), setting.variable.lower()):
            return setting
    known = frozenset(settings.table())
    raise argparse.ArgumentTypeError(f"{text!r} is no setting; {nearest(text.removeprefix('NNFMQ_'), known)}")


def execute(arguments: argparse.Namespace) -> int:
    """Print the settings; return 1 if one of those printed is invalid, else 0."""
    chosen = list(settings.table().values()) if arguments.name is None else [arguments.name]
    reports = [_report(setting) for setting in chosen]
    if arguments.json:
        print_json({"files": _files(), "settings": reports})
    elif arguments.action == "show":
        _show(console(arguments.no_color), reports)
    else:
        _explain(console(arguments.no_color), reports)
    problems = dict.fromkeys(report["problem"] for report in reports if report["problem"])
    for problem in problems:
        print(f"nnfmq: error: {problem}", file=sys.stderr)
    for line in _unknown_variables() if arguments.name is None else ():
        print(f"nnfmq: {line}", file=sys.stderr)
    return 1 if problems else 0


def _report(setting: settings.Setting[Any]) -> dict[str, Any]:
    """Return all that is known about a setting, as printed in JSON; `problem` is None if its value is valid."""
    value, source, path, problem = None, None, None, None
    try:
        effective = setting.effective()
        value, source, path = effective.value, effective.source, effective.path
        if value is None:
            value = computed_default(setting)
    except InvalidArgument as error:
        problem = str(error)
    return {
        "name": setting.name,
        "variable": setting.variable,
        "key": setting.key,
        "value": value,
        "source": source,
        "file": path,
        "problem": problem,
        "type": setting.type.name,
        "allowed": setting.type.allowed,
        "default": setting.default_text,
        "meaning": setting.meaning,
        "reader": setting.reader,
        "options": setting.options or None,
    }


def _files() -> list[dict[str, Any]]:
    return [{"path": path, "exists": os.path.exists(path)} for path in candidates()]


def _show(screen: Console, reports: list[dict[str, Any]]) -> None:
    listing = table("setting", "value", "from")
    for report in reports:
        listing.add_row(report["name"], _value_text(report), _source_text(report))
    listing.columns[0].no_wrap = True  # users copy it
    screen.print(listing)
    files = ", ".join(f"{file['path']}{'' if file['exists'] else ' (absent)'}" for file in _files())
    screen.print(f"Files: {files or 'none'}.")


def _value_text(report: dict[str, Any]) -> str:
    value = report["value"]
    if report["problem"]:
        return "invalid"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if value is None or value == "":
        return str(report["default"]).replace("`", "")
    return str(int(value)) if isinstance(value, bool) else str(value)  # 1: a variable is not True


def _source_text(report: dict[str, Any]) -> str:
    return str(report["file"] or report["source"] or "see below")


def _explain(screen: Console, reports: list[dict[str, Any]]) -> None:
    from nnfmq.cli.screen_table import named_values

    for report in reports:
        screen.print(f"{report['name']}: {report['meaning'].replace('`', '')}")
        screen.print(named_values(_facts(report)))
        screen.print()


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "value", _value_text(report)
    yield "from", _source_text(report)
    yield "default", report["default"].replace("`", "")
    yield "type", report["type"]
    yield "allowed", report["allowed"]
    yield "read by", report["reader"]
    yield "environment", report["variable"]
    example = settings.table()[report["name"]].type.toml_example
    yield "in files", f"{report['key']} = {example}" if report["key"] else "not possible"
    yield "options", (report["options"] or "none").replace("`", "")


def _unknown_variables() -> Iterator[str]:
    """Yield a hint for each variable of the environment that looks like a setting and is none."""
    variables = frozenset(setting.variable for setting in settings.table().values())
    for name in settings.unknown_variables():
        yield f"nothing reads the variable {name}; {nearest(name, variables)}"


# ----------------------------------------------------------------------------------------------------------------------
# The defaults that code computes: from the same functions that the driver and the client call.
#
# Each is computed from the effective values of other settings: the socket's default is in the runtime directory that
# $XDG_RUNTIME_DIR selects.


_MIB = 1 << 20


def computed_default(setting: settings.Setting[Any]) -> object:
    """Return the value that is used if `setting` is not set; None if it is not a single value, or not available."""
    compute = COMPUTED.get(setting.name)
    return None if compute is None else compute()


def _socket() -> str:
    from nnfmq.base.paths import SOCKET_NAME, runtime_directory

    return str(runtime_directory() / SOCKET_NAME)


def _core() -> str:
    from nnfmq.queue import core

    return str(core.core_name)


def _target() -> str | None:
    from nnfmq.engines.compiled.target import host_target

    try:
        return host_target().name
    except InvalidArgument:  # no code can be generated for this machine
        return None


def _devices() -> str:
    from nnfmq.driver.devices.configuration import PACKAGED_DEVICES

    return str(PACKAGED_DEVICES)


def _compile_processes() -> int:
    from nnfmq.base.processes import allowed_cpus

    return allowed_cpus()


def _memory_mib() -> int:
    from nnfmq.driver.memory.quota import total_limit_bytes

    return total_limit_bytes() // _MIB


def _client_memory_mib() -> int:
    from nnfmq.driver.memory.quota import quota_limit_bytes

    return quota_limit_bytes() // _MIB


def _user_memory_mib() -> int:
    from nnfmq.driver.memory.quota import user_limit_bytes

    return user_limit_bytes() // _MIB


def _below_home(folder: str) -> str | None:
    home = os.path.expanduser("~")
    return str(Path(home) / folder) if home.startswith("/") else None


COMPUTED: dict[str, Callable[[], object]] = {
    "socket": _socket,
    "core": _core,
    "target": _target,
    "devices": _devices,
    "memory_mib": _memory_mib,
    "client_memory_mib": _client_memory_mib,
    "user_memory_mib": _user_memory_mib,
    "compile_processes": _compile_processes,
    "TMPDIR": lambda: "/tmp",
    "XDG_CONFIG_HOME": lambda: _below_home(".config"),
    "XDG_STATE_HOME": lambda: _below_home(".local/state"),
    "XDG_CACHE_HOME": lambda: _below_home(".cache"),
}
"""Setting → function that returns its value if it is not set."""

DESCRIBED = (
    *(
        "guard_pages",
        "extensions",
        "runtimes",
        "trusted_files",
        "worker_start",
        "sandbox_nodes",
        "log_level",
        "log_format",
        "JOURNAL_STREAM",
        "client_class",
        "client_classes",
        "interactive_uids",
        "user",
        "worker_uids",
        "user_clients",
        "models",
        "telemetry",
        "NNFMQ_TRACE",
        "NNFMQ_RECORD",
        "NNFMQ_RECORD_LIMIT_BYTES",
    ),
    *("NNFMQ_CONFIG", "NNFMQ_DATA", "XDG_RUNTIME_DIR", "NO_COLOR"),
)
"""Settings whose default is not a single value, but described by `Setting.default_text`."""
