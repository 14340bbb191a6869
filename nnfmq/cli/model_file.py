"""The model of a command: its file, new shapes for its inputs (`--shape`), its `--signature`, and what executed it."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nnfmq.cli.console import open_client
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel

if TYPE_CHECKING:
    from nnfmq.client.connection.hosted_choice import FileOptions
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.importers import LoadedModel
    from nnfmq.importers.loaded_model import UnknownShapes

__all__ = [
    "ModelFile",
    "SizesNeeded",
    "add_model_arguments",
    "add_runtime_option",
    "file_options",
    "load_model",
    "program_report",
    "program_text",
    "shapes_of",
    "sizes_as_options",
]  # fmt: skip


class SizesNeeded(InvalidArgument):
    """A model leaves sizes of its inputs open, and --shape does not give them; `options` would: `--shape ids=1x128`."""

    def __init__(self, error: UnknownShapes) -> None:
        shapes = error.example_shapes().items()
        self.options = " ".join(f"--shape {shlex.quote(name)}={'x'.join(map(str, shape))}" for name, shape in shapes)
        message = f"{error.reason}; give them, for example, as {self.options}"
        super().__init__("; ".join([message, *error.advice.splitlines()]))
        self.refusal = error


def add_model_arguments(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Declare the model's file, which may be left out if it `is_optional`, --shape and --signature."""
    count = "?" if is_optional else None
    parser.add_argument("model", metavar="MODEL.tflite", type=Path, nargs=count, help="a .tflite or .onnx file")
    parser.add_argument(
        "--shape", metavar="SHAPE", type=_shape, action="append", default=[],
        help="resize an input: 4x224x224x3, or NAME=4x224x224x3",
    )  # fmt: skip
    parser.add_argument("--signature", metavar="NAME", help="load this signature of a .tflite file")


def add_runtime_option(parser: argparse.ArgumentParser, *, in_help: bool = True) -> None:
    """Declare --runtime-option, which --help shows if `in_help`."""
    parser.add_argument(
        "--runtime-option", metavar="K=V", type=_option, action="append", default=[],
        help="of a hosted runtime, as threads=1 (V is JSON)" if in_help else argparse.SUPPRESS,
    )  # fmt: skip


def load_model(arguments: argparse.Namespace) -> LoadedModel:
    """Return the model as nnfmq's own engine takes it, with inputs of the shapes given.

    Raises:
        SizesNeeded: If --shape does not give the sizes that the file leaves open.
        InvalidArgument: If the file or a shape is not supported.
        OSError: If the file cannot be read.
    """
    import nnfmq

    with sizes_as_options():
        return nnfmq.load(arguments.model, shapes=shapes_of(arguments), signature=arguments.signature)


@contextmanager
def sizes_as_options() -> Iterator[None]:
    """Raise SizesNeeded in place of UnknownShapes."""
    from nnfmq.importers.loaded_model import UnknownShapes

    try:
        yield
    except UnknownShapes as error:
        raise SizesNeeded(error) from None


class ModelFile(NamedTuple):
    """The model of a command that needs a driver; `loaded` is None if a hosted runtime has to open the file.

    `refusal` is why nnfmq's own engine does not; None if it was not asked.
    """

    loaded: LoadedModel | None
    refusal: InvalidArgument | None = None

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> ModelFile:
        """Return the model; no driver is asked. Raises as `load_model`, if a hosted runtime cannot help."""
        from nnfmq.hal.hosted import is_runtime_name

        if arguments.runtime_option or is_runtime_name(arguments.device or ""):
            return cls(None)
        from nnfmq.importers.file_format import UnknownFormat

        try:
            return cls(load_model(arguments))
        except (UnsupportedModel, UnknownFormat) as error:
            return cls(None, error)
        except SizesNeeded as error:
            return cls(None, error.refusal)

    def hosted(self, arguments: argparse.Namespace) -> tuple[str, LoadedModel]:
        """Return the device that hosts the file's runtime, that of --device or the first, and the model; blocks.

        Raises:
            SizesNeeded: If there is no such device, and sizes are open.
            UnsupportedModel: If there is none; the message says what to do.
            InvalidArgument: If the device rejects the file.
        """
        from nnfmq.client.connection.device import hosts_runtime

        options = file_options(arguments)
        with open_client(arguments.connect) as client, sizes_as_options():
            if arguments.device is None:
                return client.load_hosted(arguments.model, self.refusal, **options)
            if self.refusal is not None and not hosts_runtime(client.device(arguments.device).info):
                raise self.refusal
            return arguments.device, client.device(arguments.device).load(arguments.model, **options)


def file_options(arguments: argparse.Namespace) -> FileOptions:
    """Return the options about the model's file, for `Client.prepare`."""
    return {
        "shapes": shapes_of(arguments),
        "signature": arguments.signature,
        "runtime_options": dict(arguments.runtime_option),
    }


def shapes_of(arguments: argparse.Namespace) -> dict[str | int, tuple[int, ...]]:
    """Return the shapes given with --shape, by the input's name or index."""
    unnamed = [shape for name, shape in arguments.shape if not name]
    shapes: dict[str | int, tuple[int, ...]] = dict(enumerate(unnamed))
    shapes.update({name: shape for name, shape in arguments.shape if name})
    return shapes


def _option(text: str) -> tuple[str, Any]:
    """Argparse type: an option of a runtime and its value in JSON; text that is none is a string."""
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE with a value in JSON, as in threads=1")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


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


def program_report(model: CompiledModel, prepared_ns: int) -> dict[str, Any]:
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


def program_text(report: dict[str, Any]) -> str:
    """Return the report of `program_report` as a line of text."""
    taken = f"{report['prepared_ns'] / 1e6:,.0f} ms"
    if report["program"] in ("compiled", "cached") and not report["compiled_operations"]:
        return f"{report['device']}: the interpreter, because no operation has a kernel, ready in {taken}"
    programs = {
        "compiled": f"machine code, compiled now in {taken}",
        "cached": f"machine code from the cache, ready in {taken}",
        "interpreter": f"the interpreter, ready in {taken}",
        "baseline": f"the interpreter, ready in {taken}, until the model is compiled",
    }
    return f"{report['device']}: {programs.get(report['program'], f'ready in {taken}')}"
