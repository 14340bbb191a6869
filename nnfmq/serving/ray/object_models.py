"""Models that come from Ray's object store, written into a directory that a model repository serves.

A version is written into a directory that the repository ignores, which is then renamed: the repository never reads
half a file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.serving.providers import to_version

__all__ = ["ObjectModel", "object_models", "write_version"]

_INCOMING = ".incoming"  # no name of a model
_TFLITE = b"TFL3"


class ObjectModel(NamedTuple):
    """A model's name, its version, and the file's bytes or an ObjectRef of them."""

    name: str
    version: int
    data: Any


def object_models(models: Mapping[str, Any]) -> list[ObjectModel]:
    """Return the models of a mapping whose keys are names, of version 1, or "name/version".

    Raises:
        InvalidArgument: If a key is another one.
    """
    found = []
    for key, data in sorted(models.items(), key=lambda item: item[0]):
        name, _, version = key.partition("/")
        if not name or name.startswith(".") or "/" in version:
            raise InvalidArgument(f"the key of a model is its name, or name/version, not {key!r}")
        found.append(ObjectModel(name, to_version(version) or 1, data))
    return found


def write_version(root: Path, model: ObjectModel) -> None:
    """Write a model, whose data are bytes, into a repository's directory, unless it is there already; blocks.

    Raises:
        InvalidArgument: If the version exists with another content.
        GeneralFailure: If it cannot be written.
    """
    name, version, data = model
    target = root / name / str(version)
    file = "model.tflite" if data[4:8] == _TFLITE else "model.onnx"
    if target.is_dir():
        if not (target / file).is_file() or (target / file).read_bytes() != data:
            raise InvalidArgument(f"version {version} of model {name!r} exists with another content: use a new version")
        return
    incoming = root / _INCOMING / f"{name}-{version}-{time.monotonic_ns()}"
    try:
        incoming.mkdir(parents=True)
        (incoming / file).write_bytes(data)
        target.parent.mkdir(exist_ok=True)
        incoming.rename(target)
    except OSError as error:
        raise GeneralFailure(f"model {name!r} cannot be written: {error}") from error
