"""TFLite files with metadata for tests: the FlatBuffer of metadata_schema.fbs, and label files in a zip archive."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import flatbuffers

LABELS = 2  # TENSOR_AXIS_LABELS
NORMALIZATION = 1  # of the union ProcessUnitOptions


def _table(builder: Any, slots: int, fields: Mapping[int, Any]) -> int:
    """Write a table; `fields` are offsets, or (bits, value), by the number of the field."""
    builder.StartObject(slots)
    for number, value in fields.items():
        if isinstance(value, tuple):
            builder.PrependUint8Slot(number, value[1], 0)
        elif value:
            builder.PrependUOffsetTRelativeSlot(number, value, 0)
    end: int = builder.EndObject()
    return end


def _tables(builder: Any, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    end: int = builder.EndVector()
    return end


def _floats(builder: Any, values: Sequence[float]) -> int:
    builder.StartVector(4, len(values), 4)
    for value in reversed(values):
        builder.PrependFloat32(value)
    end: int = builder.EndVector()
    return end


def _file(builder: Any, name: str, locale: str) -> int:
    fields = {0: builder.CreateString(name), 3: builder.CreateString(locale)}
    return _table(builder, 4, fields | {2: (8, LABELS)})


def _tensor(
    builder: Any,
    name: str,
    normalization: tuple[Sequence[float], Sequence[float]] | None = None,
    files: Sequence[tuple[str, str]] = (),
) -> int:
    units = 0
    if normalization is not None:
        mean, std = (_floats(builder, values) for values in normalization)
        options = _table(builder, 2, {0: mean, 1: std})
        units = _tables(builder, [_table(builder, 2, {0: (8, NORMALIZATION), 1: options})])
    labels = _tables(builder, [_file(builder, *file) for file in files]) if files else 0
    text = builder.CreateString(name)
    return _table(builder, 7, {0: text, 4: units, 6: labels})


def metadata(
    normalization: tuple[Sequence[float], Sequence[float]] | None = None, files: Sequence[tuple[str, str]] = ()
) -> bytes:
    """Return the metadata of a model with one input, normalized so, and one output with label files (name, locale)."""
    builder = flatbuffers.Builder(256)
    inputs = _tables(builder, [_tensor(builder, "photo", normalization)])
    outputs = _tables(builder, [_tensor(builder, "classes", None, files)])
    graphs = _tables(builder, [_table(builder, 7, {2: inputs, 3: outputs})])
    texts = [builder.CreateString(text) for text in ("classifier", "of digits", "v1", "somebody", "Apache-2.0")]
    fields = {0: texts[0], 1: texts[1], 2: texts[2], 3: graphs, 4: texts[3], 5: texts[4]}
    builder.Finish(_table(builder, 8, fields), b"M001")
    return bytes(builder.Output())


def with_files(model: bytes, files: Mapping[str, bytes]) -> bytes:
    """Return a model with a zip archive of `files` appended."""
    target = io.BytesIO(model)
    with zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()
