"""The model of a command: its file, new shapes for its inputs (`--shape`), its `--signature`, and what executed it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.importers import LoadedModel
    from nnfmq.importers.loaded_model import UnknownShapes

__all__ = ["SizesNeeded", "add_model_arguments", "load_model", "shapes_of", "what_ran", "what_ran_text"]


class SizesNeeded(InvalidArgument):
    """A model leaves sizes of its inputs open, and --shape does not give them; `options` would: `--shape ids=1x128`."""

    def __init__(self, error: UnknownShapes) -> None:
        shapes = error.example_shapes().items()
        self.options = " ".join(f"--shape {shlex.quote(name)}={'x'.join(map(str, shape))}" for name, shape in shapes)
        super().__init__(f"{error.reason}; give them, for example, as {self.options}")


def add_model_arguments(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Declare the model's file, which may be left out if it `is_optional`, --shape and --signature."""
    count = "?" if is_optional else None
    parser.add_argument("model", metavar="MODEL.tflite", type=Path, nargs=count, help="a .tflite or .onnx file")
    parser.add_argument(
        "--shape", metavar="SHAPE", type=_shape, action="append", default=[],
        help="resize an input: 4x224x224x3, or NAME=4x224x224x3",
    )  # fmt: skip
    parser.add_argument("--signature", metavar="NAME", help="load this signature of a .tflite file")


def load_model(arguments: argparse.Namespace) -> LoadedModel:
    """Return the model, with inputs of the shapes given.

    Raises:
        SizesNeeded: If --shape does not give the sizes that the file leaves open.
        InvalidArgument: If the file or a shape is not supported.
        OSError: If the file cannot be read.
    """
    import nnfmq
    from nnfmq.importers.loaded_model import UnknownShapes

    try:
        return nnfmq.load(arguments.model, shapes=shapes_of(arguments), signature=arguments.signature)
    except UnknownShapes as error:
        raise SizesNeeded(error) from None


def shapes_of(arguments: argparse.Namespace) -> dict[str | int, tuple[int, ...]]:
    """Return the shapes given with --shape, by the input's name or index."""
    unnamed = [shape for name, shape in arguments.shape if not name]
    shapes: dict[str | int, tuple[int, ...]] = dict(enumerate(unnamed))
    shapes.update({name: shape for name, shape in arguments.shape if name})
    return shapes


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Argparse type: the name of an input, or "", and a shape."""
    name, _, shape = text.rpartition("=")
    try:
        extents = tuple(int(extent) for extent in shape.split("x"))
    except ValueError:
        extents = ()
    if not extents or min(extents) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; give positive numbers, as in 4x224x224x3")
    return name, extents


def what_ran(model: CompiledModel, prepared_ns: int) -> dict[str, Any]:
    """Return the device, the kind of program, the operations that machine code executes, and the time, for a report.

    A model on several devices, and one of a plug-in's device, has the kind `other`.
    """
    program = getattr(model, "program", None)
    return {
        "device": model.device,
        "program": "other" if program is None else program.name.lower(),
        "compiled_operations": getattr(model, "compiled_operations", 0),
        "prepared_ns": prepared_ns,
    }


def what_ran_text(ran: dict[str, Any]) -> str:
    """Return the same as a line of text."""
    taken = f"{ran['prepared_ns'] / 1e6:,.0f} ms"
    if ran["program"] in ("compiled", "cached") and not ran["compiled_operations"]:
        return f"{ran['device']}: the interpreter, because no operation has a kernel, ready in {taken}"
    programs = {
        "compiled": f"machine code, compiled now in {taken}, for later starts as well",
        "cached": f"machine code from the cache, ready in {taken}",
        "interpreter": f"the interpreter, ready in {taken}",
        "baseline": f"the interpreter, ready in {taken}, until the model is compiled",
    }
    return f"{ran['device']}: {programs.get(ran['program'], f'ready in {taken}')}"
