"""What was measured, by which build, on which machine and when: what every report about a model begins with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nnfmq.base.conditions import conditions
from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.companion_files import companion_paths
from nnfmq.importers.file_format import hosted_format, read_source
from nnfmq.queue.core import core_name

__all__ = ["file_sha256", "machine", "machine_text", "model_identity", "subject_of"]


def subject_of(model: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the identity of a model and the conditions of now, before it is measured. Raises as `model_identity`."""
    return {**model_identity(model), "conditions": machine()}


def machine() -> dict[str, Any]:
    """Return the conditions of now, before something is measured, with the load of the machine."""
    return conditions(core_name) | {"load_before": [round(value, 2) for value in os.getloadavg()]}


def machine_text(of: Mapping[str, Any]) -> str:
    """Return the conditions of `machine` as a line, which terminals and pages have."""
    cpus = ", ".join(map(str, of["cpus_allowed"]))
    build = f"nnfmq {of['packages'].get('nnfmq', 'of a source tree')}, {of['core']} core"
    load = f"load {of['load_before'][0]:g} before"
    return f"{build}; {of['cpu']}, CPUs {cpus}; {load}; {of['date']}, {of['host']}"


def model_identity(model: str | os.PathLike[str]) -> dict[str, str]:
    """Return the path of a model file, and the SHA-256 of it and the files with its weights, one after the other.

    Raises:
        InvalidArgument: If it is no regular file.
        OSError: If a file cannot be read.
    """
    source = read_source(model)
    digest = hashlib.sha256(source.data)
    with suppress(InvalidArgument):  # of a file that names no others in a readable way
        for path in companion_paths(hosted_format(source.data, source.path), source):
            digest.update(read_source(path).data)
    return {"model": str(model), "model_sha256": digest.hexdigest()}


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
