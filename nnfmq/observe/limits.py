"""The limits of a driver: what each is of, which setting sets it, and its unit. One table for driver and commands.

The driver writes the values into the header of its statistics, in the order of the table; docs/reference/statistics.md.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BYTES", "COUNT", "LIMITS", "MILLISECONDS", "Limit"]

COUNT, BYTES, MILLISECONDS = "", "bytes", "ms"


class Limit(NamedTuple):
    """One limit.

    Attributes:
        name: What is limited.
        of: Whose: of the driver, one client, process, user, ... Those of users are of drivers that serve several.
        variable: The setting that sets it; empty if it is fixed.
        unit: COUNT, BYTES or MILLISECONDS.
    """

    name: str
    of: str
    variable: str
    unit: str = COUNT


LIMITS = (
    Limit("clients", "driver", ""),
    Limit("clients", "process", "NNFMQ_PROCESS_CLIENTS"),
    Limit("clients", "user", "NNFMQ_USER_CLIENTS"),
    Limit("memory", "driver", "NNFMQ_MEMORY_MIB", BYTES),
    Limit("memory", "user", "NNFMQ_USER_MEMORY_MIB", BYTES),
    Limit("memory", "client", "NNFMQ_CLIENT_MEMORY_MIB", BYTES),
    Limit("models", "user", "NNFMQ_USER_MODELS"),
    Limit("models", "client", "NNFMQ_CLIENT_MODELS"),
    Limit("bursts", "client", "NNFMQ_CLIENT_BURSTS"),
    Limit("threads", "user", "NNFMQ_USER_THREADS"),
    Limit("threads", "client", "NNFMQ_CLIENT_THREADS"),
    Limit("calls", "client", "NNFMQ_CLIENT_CALLS"),
    Limit("objects", "client", "NNFMQ_CLIENT_OBJECTS"),
    Limit("execution", "call", "NNFMQ_EXECUTION_LIMIT_S", MILLISECONDS),
    Limit("compilers", "driver", "NNFMQ_COMPILE_PROCESSES"),
    Limit("memory", "compiler", "NNFMQ_COMPILE_MEMORY_MIB", BYTES),
    Limit("CPU time", "compiler", "NNFMQ_COMPILE_TIME_S", MILLISECONDS),
    Limit("memory", "import", "NNFMQ_IMPORT_MEMORY_MIB", BYTES),
    Limit("programs", "driver", "NNFMQ_CACHE_MIB", BYTES),
)
"""All limits, in the order of their words. 0 in a word: no limit."""
