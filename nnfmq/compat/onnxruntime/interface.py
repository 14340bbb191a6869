"""NodeArg and ModelMetadata, of a session's model; and the model's file, opened as ONNX Runtime would."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from nnfmq.compat.onnxruntime.errors import load_failure, ort_error
from nnfmq.compat.onnxruntime.shape_plans import Array, OutputForm
from nnfmq.compat.onnxruntime.types import dtype_of_type, tensor_type
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from nnfmq.importers.file_format import ModelSource
    from nnfmq.importers.onnx.interface import OnnxInterface, OnnxValueType

__all__ = ["NodeArg", "OrtModelMetadata", "Replacements", "check_shape", "open_model", "read_nodes"]

_NO_VERSION = 2**63 - 1  # ONNX Runtime's, for a model without one


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output. A dimension is a size, the name of a symbol, or None; an unknown shape is empty."""

    name: str
    type: str
    shape: list[int | str | None]
    dtype: np.dtype[Any] | None = field(default=None, repr=False)
    has_shape: bool = field(default=True, repr=False)
    is_scalar: bool = field(default=False, repr=False)

    def check(self, array: Array) -> None:
        """Raise InvalidArgument, with ONNX Runtime's text, if this input does not take an array."""
        if self.dtype != array.dtype:
            actual = tensor_type(array.dtype)
            raise ort_error(
                "InvalidArgument", f"Unexpected input data type. Actual: ({actual}) , expected: ({self.type})"
            )
        if self.shape:
            check_shape("input", self.name, self.shape, array.shape)

    @property
    def is_static(self) -> bool:
        """True if the whole shape is known."""
        return self.has_shape and all(isinstance(size, int) for size in self.shape)

    @property
    def form(self) -> OutputForm:
        """The form of this output's arrays."""
        return OutputForm(self.dtype)


_ADVICE = "Please fix either the inputs/outputs or the model."


def check_shape(kind: str, name: str, expected: Sequence[int | str | None], given: Sequence[int]) -> None:
    """Raise InvalidArgument, with ONNX Runtime's text, if an array has another rank, or another known size."""
    if len(expected) != len(given):
        numbers = f"Got: {len(given)} Expected: {len(expected)}"
        raise ort_error("InvalidArgument", f"Invalid rank for {kind}: {name} {numbers} {_ADVICE}")
    wrong = [
        f" index: {index} Got: {size} Expected: {wanted}\n"
        for index, (wanted, size) in enumerate(zip(expected, given, strict=True))
        if isinstance(wanted, int) and wanted != size
    ]
    if wrong:
        text = f"Got invalid dimensions for {kind}: {name} for the following indices\n{''.join(wrong)}"
        raise ort_error("InvalidArgument", f"{text} {_ADVICE}")


@dataclass(frozen=True, slots=True)
class OrtModelMetadata:
    """The metadata of a model by its author."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]

    @classmethod
    def of(cls, interface: OnnxInterface) -> OrtModelMetadata:
        """Return the metadata of a file."""
        return cls(
            interface.producer_name,
            interface.graph_name,
            interface.domain,
            interface.description,
            interface.graph_description,
            interface.version if interface.version is not None else _NO_VERSION,
            interface.properties,
        )


def read_nodes(values: tuple[OnnxValueType, ...], sizes: Mapping[str, int]) -> list[NodeArg]:
    """Return inputs or outputs, with the sizes of the symbols that are fixed."""
    return [
        NodeArg(
            value.name,
            value.type,
            [sizes.get(size, size) if isinstance(size, str) else size for size in value.shape or ()],
            dtype_of_type(value.type),
            value.shape is not None,
            value.shape == (),
        )
        for value in values
    ]


class Replacements(Protocol):
    """Initializers of the application, in place of those of a file."""

    def require_none(self) -> None:
        """Raise NotImplemented if there are any."""
        ...

    def replace_in(self, proto: Any) -> bool:
        """Put them into an onnx.ModelProto; return whether it has changed."""
        ...


def open_model(
    path_or_bytes: str | bytes | os.PathLike[str] | ModelSource, data_folder: Path, given: Replacements
) -> tuple[ModelSource, OnnxInterface | None]:
    """Return a model's file, parsed, and its interface; without the package `onnx` the file alone.

    The folder has the external data of a model that is given as bytes. `given` replaces initializers in the result.

    Raises:
        Exception: As ONNX Runtime: NoSuchFile, InvalidProtobuf, InvalidArgument, Fail; NotImplemented for .ort files,
            and for `given` without the package `onnx`.
        TypeError: If the argument is neither a path nor bytes.
    """
    from msgspec.structs import replace

    from nnfmq.importers.file_format import ModelSource, importer_of, read_source  # while an embedded driver starts

    if not isinstance(path_or_bytes, (str, bytes, os.PathLike, ModelSource)):
        raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
    path = os.fspath(path_or_bytes) if isinstance(path_or_bytes, (str, os.PathLike)) else None
    place = load_failure(path)
    try:
        source = path_or_bytes if isinstance(path_or_bytes, ModelSource) else read_source(path_or_bytes)
        if source.data[4:8] == b"ORTM":
            raise ort_error(
                "NotImplemented", f"{place}this is a model in ONNX Runtime's own format (.ort); use its .onnx"
            )
        if find_spec("onnx") is None:
            if importer_of(source.data) != "nnfmq.importers.onnx.model":
                raise InvalidArgument("this is no ONNX model; nnfmq.load and nnfmq.compat.litert read .tflite files")
            given.require_none()
            return _with_folder(source, path_or_bytes, data_folder), None
        from nnfmq.importers.onnx.file import parse
        from nnfmq.importers.onnx.interface import read_interface

        proto = parse(source)
        if not proto.HasField("graph"):
            raise ort_error("InvalidArgument", f"{place}No graph was found in the protobuf.")
        if given.replace_in(proto):
            source = replace(source, data=proto.SerializeToString())
        source = _with_folder(source, path_or_bytes, data_folder)
        return replace(source, parsed=proto), read_interface(proto)
    except FileNotFoundError as error:
        raise ort_error("NoSuchFile", f"{place}Load model {path} failed. File doesn't exist") from error
    except (InvalidArgument, OSError) as error:
        text = "Failed to load model because protobuf parsing failed." if path is None else "Protobuf parsing failed."
        raise ort_error("InvalidProtobuf", f"{place}{text}") from error


def _with_folder(source: ModelSource, given: object, data_folder: Path) -> ModelSource:
    """Return a model with the folder that has its external data, which is `data_folder` if it was given as bytes.

    Raises:
        Exception: Fail, as ONNX Runtime, if a file is missing, or would be outside the folder.
    """
    from msgspec.structs import replace

    from nnfmq.importers.companion_files import external_names

    names = external_names(source)
    if isinstance(given, bytes):
        for name in names:
            _require_within(data_folder, name, data_folder.resolve(), (data_folder / name).resolve())
        return replace(source, path=data_folder / "model.onnx") if names else source
    if source.path is not None:
        folder = source.path.parent
        for name in names:  # symbolic links may lead elsewhere, as those of download caches do
            _require_within(folder, name, Path(os.path.abspath(folder)), Path(os.path.abspath(folder / name)))
    return source


def _require_within(folder: Path, name: str, root: Path, place: Path) -> None:
    """Require that a file with external data exists, and is in the folder."""
    if not name:
        _refuse_external("External data location cannot be empty")
    if os.path.isabs(name):
        _refuse_external(f"Absolute path not allowed for external data location: {name!r:.200}")
    if not place.is_relative_to(root):
        _refuse_external(f"External data path escapes model directory. External data path: {str(folder / name)!r}")
    if not place.is_file():
        _refuse_external(f"External data path does not exist: {str(place)!r}")


def _refuse_external(reason: str) -> NoReturn:
    raise ort_error("Fail", f"External data path validation failed. Error: {reason}")
