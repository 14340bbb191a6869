"""The settings of nnfmq: the only code that reads its environment variables and configuration files.

Each constant is one setting, and `NAME.value()` its effective value. The order of precedence is in `setting`, the files
are in `configuration_file`. `tools/generate_docs.py` writes docs/reference/configuration.md from this
table, and `nnfmq config` prints it. To add a setting, declare it here, and run that tool.

This package is imported by both sides at their start, so it imports little, and TOML only if there is a file.
"""

from __future__ import annotations

from nnfmq.settings.configuration_file import CONFIG_VARIABLE
from nnfmq.settings.setting import (
    NAMES,
    PATH,
    PATTERN,
    SINK,
    SWITCH,
    TEXT,
    Setting,
    choice,
    integer,
    seconds,
    table,
    unknown_variables,
)

__all__ = ["Setting", "check_all", "table", "unknown_variables"]  # and the constants

_MIB_MAX = 1 << 40  # sums of it still fit into 8 bytes
_WINDOW_MAX_US = 10**9
_MIB = integer(0, _MIB_MAX, "MiB")
_MICROSECONDS = integer(0, _WINDOW_MAX_US, "µs")
_DIRECTORY = "its folder `nnfmq`"
_VARIABLE_PATH = PATH._replace(allowed="any path")

SOCKET: Setting[str | None] = Setting(
    "NNFMQ_SOCKET", PATH, None, reader="client, driver",
    meaning="path of the driver's socket, in a directory in which no other user can replace it",
    default_text="`nnfmq.sock` in the runtime directory", options="--connect, nnfmq serve --socket",
)  # fmt: skip
CORE: Setting[str | None] = Setting(
    "NNFMQ_CORE", choice("compiled", "python"), None, reader="client, driver",
    meaning="implementation of queue, codec and thread pool; an error if it is not available",
    default_text="`compiled` if it is built",
)  # fmt: skip
TARGET: Setting[str | None] = Setting(
    "NNFMQ_TARGET", choice("amx", "avx512vnni", "avx512", "avx2", "sse4.1", "neon-i8mm", "neon-dotprod", "neon"), None,
    reader="driver", meaning="instruction set of compiled code; an error if this CPU lacks it",
    default_text="the best one of this CPU",
)  # fmt: skip
DEVICES: Setting[str | None] = Setting(
    "NNFMQ_DEVICES", PATH, None, reader="driver", meaning="TOML file that lists the devices",
    default_text="the packaged one", options="nnfmq serve --devices",
)  # fmt: skip
EXTENSIONS: Setting[list[str] | None] = Setting(
    "NNFMQ_EXTENSIONS", NAMES, None, reader="driver", meaning="the extensions on offer",
    default_text="all installed", options="nnfmq serve --extensions",
)  # fmt: skip
MEMORY_MIB: Setting[int | None] = Setting(
    "NNFMQ_MEMORY_MIB", _MIB, None, reader="driver",
    meaning="memory that all clients together may take in the driver",
    default_text="a quarter of the machine's", options="nnfmq serve --memory",
)  # fmt: skip
CLIENT_MEMORY_MIB: Setting[int | None] = Setting(
    "NNFMQ_CLIENT_MEMORY_MIB", _MIB, None, reader="driver",
    meaning="memory that one client may take in the driver", default_text="half of `memory_mib`",
)  # fmt: skip
CACHE_MIB: Setting[int] = Setting(
    "NNFMQ_CACHE_MIB", _MIB, 512, reader="driver",
    meaning="compiled models kept on disk, and those that clients share; 0 keeps none",
)  # fmt: skip
COMPILE_AFTER_EXIT_S: Setting[float] = Setting(
    "NNFMQ_COMPILE_AFTER_EXIT_S", seconds(3600), 60.0, reader="driver",
    meaning="how long a process may compile a model for the cache whose client has left; 0: a compilation ends with "
    "its client",
)  # fmt: skip
MODELS: Setting[str | None] = Setting(
    "NNFMQ_MODELS", PATH, None, reader="driver", meaning="directory of the models that are served by name",
    default_text="none", options="nnfmq serve --models",
)  # fmt: skip
BURST_CONTROLLER_POLLING_WINDOW: Setting[int] = Setting(
    "NNFMQ_BURST_CONTROLLER_POLLING_WINDOW", _MICROSECONDS, 50, reader="client",
    meaning="how long a burst's client polls for a result before it sleeps",
)  # fmt: skip
BURST_SERVER_POLLING_WINDOW: Setting[int] = Setting(
    "NNFMQ_BURST_SERVER_POLLING_WINDOW", _MICROSECONDS, 50, reader="driver",
    meaning="how long a burst's driver polls for a request before it sleeps",
)  # fmt: skip
PARTITION: Setting[int] = Setting(
    "NNFMQ_PARTITION", integer(0, 2, "mode"), 1, reader="client",
    meaning="models whose devices the application does not choose: 0, all on the CPU device; 1, divided among devices, "
    "and executed by the CPU device if these fail; 2, divided among devices without this fallback",
)  # fmt: skip
CPU_ONLY: Setting[bool] = Setting(
    "NNFMQ_CPU_ONLY", SWITCH, False, reader="client", default_text="0",
    meaning="models whose devices the application does not choose are executed by the CPU device",
)  # fmt: skip
ENABLED_DEVICES: Setting[str] = Setting(
    "NNFMQ_ENABLED_DEVICES", PATTERN, "(?!sample-).*", reader="client",
    meaning="names of the devices that are used without being named by the application; by default all but the sample "
    "devices",
)  # fmt: skip
STRICT_SLICING: Setting[bool] = Setting(
    "NNFMQ_STRICT_SLICING", SWITCH, False, reader="client", default_text="0",
    meaning="1: ask devices only about parts of a model that pass the validation for their interface version",
)  # fmt: skip
COMPILE_NOTICE: Setting[bool] = Setting(
    "NNFMQ_COMPILE_NOTICE", SWITCH, True, reader="client", default_text="1",
    meaning="0: write nothing to stderr while a model is compiled",
)  # fmt: skip
SYNC_EXEC_CPU: Setting[bool] = Setting(
    "NNFMQ_SYNC_EXEC_CPU", SWITCH, False, reader="client", default_text="0",
    meaning="1: asynchronous executions on the CPU device are done when the call returns",
)  # fmt: skip
SYNC_EXEC_RUNTIME: Setting[bool] = Setting(
    "NNFMQ_SYNC_EXEC_RUNTIME", SWITCH, False, reader="client", default_text="0",
    meaning="1: asynchronous executions on any device are done when the call returns",
)  # fmt: skip
TELEMETRY: Setting[str | None] = Setting(
    "NNFMQ_TELEMETRY", SINK, None, reader="client",
    meaning="file, or socket of a collector, to which telemetry is written", default_text="none is written",
)  # fmt: skip
TELEMETRY_INTERVAL_S: Setting[float] = Setting(
    "NNFMQ_TELEMETRY_INTERVAL_S", seconds(86_400), 1.0, reader="client",
    meaning="the least time between two lines of telemetry",
)  # fmt: skip
VLOG: Setting[str] = Setting(
    "NNFMQ_VLOG",
    TEXT._replace(
        name="tags",
        allowed="`all`, `1`, or, separated by spaces, commas or colons: "
        "compilation, cpuexe, driver, execution, manager, memory, model",
        toml_example='"compilation,execution"',
    ), "", reader="client, driver", meaning="tags of which the verbose log has lines", default_text="none",
)  # fmt: skip

TRACE: Setting[str | None] = Setting(
    "NNFMQ_TRACE", _VARIABLE_PATH._replace(allowed="any path, in which %p is the pid, or `socket:PATH`"), None,
    reader="client", in_files=False, meaning="file to which the trace of this process is written when it exits",
    default_text="no trace", options="nnfmq trace -o",
)  # fmt: skip
RECORD: Setting[str | None] = Setting(
    "NNFMQ_RECORD", _VARIABLE_PATH, None, reader="client", in_files=False,
    meaning="file to which the executions of this process are recorded; FILE.PID if it exists",
    default_text="nothing is recorded", options="nnfmq record -o",
)  # fmt: skip
RECORD_TENSORS: Setting[str] = Setting(
    "NNFMQ_RECORD_TENSORS", choice("0", "1"), "1", reader="client", in_files=False,
    meaning="0: record without inputs and outputs", options="nnfmq record --no-tensors",
)  # fmt: skip
RECORD_LIMIT_BYTES: Setting[int | None] = Setting(
    "NNFMQ_RECORD_LIMIT_BYTES", integer(4096, 1 << 50, "bytes"), None, reader="client", in_files=False,
    meaning="size that a recording does not exceed", default_text="no limit",
    options="nnfmq record --limit-bytes",
)  # fmt: skip
CONFIG: Setting[str | None] = Setting(
    CONFIG_VARIABLE, _VARIABLE_PATH, None, reader="client, driver, commands", in_files=False,
    meaning="the only configuration file to read; `/dev/null`: none",
    default_text="`/etc/nnfmq/nnfmq.toml` and that of the user", options="nnfmq --config",
)  # fmt: skip
DATA: Setting[str | None] = Setting(
    "NNFMQ_DATA", _VARIABLE_PATH, None, reader="commands", in_files=False, options="nnfmq mlts bench --data",
    meaning="folder of test data; its folder `models` has MLTS's models", default_text="none",
)  # fmt: skip
XDG_CONFIG_HOME: Setting[str | None] = Setting(
    "XDG_CONFIG_HOME", _VARIABLE_PATH, None, reader="client, driver, commands", in_files=False,
    meaning=f"{_DIRECTORY} has the user's configuration file", default_text="`~/.config`",
)  # fmt: skip
XDG_RUNTIME_DIR: Setting[str | None] = Setting(
    "XDG_RUNTIME_DIR", _VARIABLE_PATH, None, reader="client, driver", in_files=False,
    meaning=f"{_DIRECTORY} is the runtime directory", default_text="`/run/user/UID`",
)  # fmt: skip
TMPDIR: Setting[str | None] = Setting(
    "TMPDIR", _VARIABLE_PATH, None, reader="client, driver", in_files=False,
    meaning="its folder `nnfmq-UID` is the runtime directory if there is no `/run/user/UID`", default_text="`/tmp`",
)  # fmt: skip
XDG_STATE_HOME: Setting[str | None] = Setting(
    "XDG_STATE_HOME", _VARIABLE_PATH, None, reader="driver", in_files=False,
    meaning=f"{_DIRECTORY} stores the key that signs caches", default_text="`~/.local/state`",
)  # fmt: skip
XDG_CACHE_HOME: Setting[str | None] = Setting(
    "XDG_CACHE_HOME", _VARIABLE_PATH, None, reader="driver", in_files=False,
    meaning=f"{_DIRECTORY} stores compiled models", default_text="`~/.cache`",
)  # fmt: skip
NO_COLOR: Setting[str | None] = Setting(
    "NO_COLOR", TEXT, None, reader="commands", in_files=False,
    meaning="plain text if it is not empty", default_text="unset", options="--no-color",
)  # fmt: skip


def check_all() -> None:
    """Check every setting, so that a driver reports an invalid one when it starts, not to some later client.

    Raises:
        InvalidArgument: If a value is not allowed, or a configuration file is not valid.
    """
    for setting in table().values():
        setting.value()
