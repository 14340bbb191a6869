"""Importers: model files converted to HAL models. A file format's module is imported when such a file is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import numpy as np
from msgspec.structs import replace

from nnfmq.data import example_path
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.importers.file_format import (
    TFLITE_IMPORTER,
    ModelSource,
    SourceArgument,
    UnknownFormat,
    importer_of,
    read_source,
)
from nnfmq.importers.loaded_model import LoadedModel, ModelMetadata, TensorMetadata, UnknownShapes

__all__ = ["LoadedModel", "ModelMetadata", "SourceArgument", "TensorMetadata", "example_path", "load", "load_source"]

_GIVEN_CHARACTERS = 400  # values of inputs may be long


def load(
    source: SourceArgument,
    *,
    shapes: Mapping[str | int, Sequence[int]] | None = None,
    signature: str | None = None,
) -> LoadedModel:
    """Return the model of a file, given its path or its bytes. The content of the file decides which format it has.

    The result has its own copy of all constants; the file may change or be deleted afterwards.

    Args:
        source: A path, or the content of a file: bytes, a bytearray or a memoryview.
        shapes: New shapes of inputs, by their names or indexes, for example `{"image": (4, 224, 224, 3)}`.
        signature: One of `LoadedModel.signatures`. Its inputs and outputs become the model's, with the names that it
            gives them and sorted by these. Without it the file's first subgraph is loaded.

    Raises:
        UnsupportedModel: If operators or tensors of the model are not supported, it lists all of them; or the format
            or the opset. `Client.prepare` runs such a file on a hosted runtime, if the driver has one.
        InvalidArgument: If the file is no model, or is corrupt; the message says what the file is. If it has no such
            signature; the message lists those that it has.
        OSError: If the file cannot be read.
    """
    return load_source(read_source(source, shapes, signature))


def load_source(file: ModelSource) -> LoadedModel:
    """Return the model of a file that has been read. Raises as `load`."""
    try:
        importer = importer_of(file.data)
        if file.signature is not None and importer != TFLITE_IMPORTER:
            raise InvalidArgument("only TensorFlow Lite files have signatures")
        loaded: LoadedModel = import_module(importer).import_model(file)
    except UnknownShapes as error:
        raise UnknownShapes(error.inputs, _origin(file)) from None
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{_origin(file)}{error}{_given(file)}", error.problems) from None
    except UnknownFormat as error:
        raise UnknownFormat(f"{_origin(file)}{error}") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{_origin(file)}{error}") from None
    return replace(loaded, file_name=file.path.name) if file.path else loaded


def _origin(file: ModelSource) -> str:
    return f"{file.path}: " if file.path else ""


def _given(file: ModelSource) -> str:
    """Return the caller's shapes and values, with which an operator may not be supported although with others it is."""
    shapes = [f"{key!r} of shape {tuple(map(int, shape))}" for key, shape in file.shapes.items()]
    values = [f"{name!r} = {np.asarray(value).tolist()}" for name, value in file.values.items()]
    return f"; this is for {', '.join(shapes + values)[:_GIVEN_CHARACTERS]}" if shapes or values else ""
