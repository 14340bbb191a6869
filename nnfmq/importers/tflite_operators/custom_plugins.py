"""Converters of custom operators from plug-ins: entry points of the group `nnfmq.tflite_operators`.

An entry point has the operator's custom code and refers to an `OpConverter`. Plug-ins are imported when a file has an
operator that nnfmq does not know, in the application.
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.tflite_operators.conversion import OpConverter

__all__ = ["GROUP", "plugin_converter"]

GROUP = "nnfmq.tflite_operators"


def plugin_converter(custom_code: str) -> OpConverter | None:
    """Return the converter of a custom operator; None if no plug-in has it.

    Raises:
        InvalidArgument: If two plug-ins have it, or if it cannot be imported or is no OpConverter.
    """
    from importlib.metadata import entry_points  # few applications have such a model

    found = [entry for entry in entry_points(group=GROUP) if entry.name == custom_code]
    if not found:
        return None
    if len({entry.value for entry in found}) > 1:
        raise InvalidArgument(f"has converters in several plug-ins: {', '.join(entry.value for entry in found)}")
    try:
        converter = found[0].load()
    except Exception as error:
        raise InvalidArgument(f"its plug-in {found[0].value} cannot be imported: {error}") from error
    if not isinstance(converter, OpConverter):
        raise InvalidArgument(f"its plug-in {found[0].value} is a {type(converter).__name__}, not an OpConverter")
    return converter
