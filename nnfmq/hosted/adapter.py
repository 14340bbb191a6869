"""The interface of adapters beside `HostedDevice`: the classes that an adapter implements, and those that it is given.

`HostedDevice.open` gets a HostedFile and OpenOptions, and returns a HostedModel, of which `bind` returns a HostedRun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct, field

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import Dimension, HostedDescription, Shape, fits_declaration
from nnfmq.hosted.libraries import Library
from nnfmq.hosted.options import require_one_of
from nnfmq.operations.declaration import Array

__all__ = ["HostedFile", "HostedModel", "HostedRun", "OpenOptions"]


class HostedFile(Struct, frozen=True):
    """A model file and those that belong to it, in memory that never changes.

    Attributes:
        format: The format of the first file.
        files: The bytes of each file by its name, read-only; the model is the first. A file of several operands is a
            copy, any other is the client's sealed memory.
        libraries: Libraries of custom operators that the driver trusts, for a device that `takes_libraries`.
    """

    format: str
    files: Mapping[str, memoryview]
    libraries: Sequence[Library] = ()

    @property
    def model(self) -> memoryview:
        """The bytes of the first file."""
        return next(iter(self.files.values()))

    @property
    def others(self) -> dict[str, memoryview]:
        """The bytes of the other files, by name."""
        return dict(list(self.files.items())[1:])


class OpenOptions(Struct, frozen=True):
    """The options of opening a file.

    Attributes:
        threads: How many threads an execution may use, the calling one included.
        signature: One of the file's signatures; None: its default.
        options: The runtime's own options, as the client gave them: check them.
        saved: What `HostedModel.save` returned for this file and these options, or None.
        saves: Whether `HostedModel.save` is called at once.
    """

    threads: int = 1
    signature: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    saved: bytes | None = None
    saves: bool = False

    def require_known(self, *names: str) -> None:
        """Check that the runtime has all options that the client gave; `names` are its own.

        Raises:
            InvalidArgument: If one is another; the message lists those that are allowed.
        """
        for name in self.options:
            require_one_of("runtime option", name, ("threads", *names))


class HostedRun:
    """An opened file that is bound to arrays; a call executes it. One thread calls it at a time."""

    def __call__(self) -> Sequence[Array | None] | None:
        """Execute once; blocks. Return None for each output that was filled in place, and an array for the others.

        The arrays are copied before the next call; one of another shape than the file declares is an error of the
        execution. None, or an empty sequence: all outputs were filled.
        """
        raise NotImplementedError

    def abort(self) -> bool:
        """End the running call, which then raises; another thread calls this. Return False if the runtime cannot."""
        return False

    def resume(self) -> None:
        """Allow calls again after `abort`, which may have come when the call had just ended."""


class HostedModel:
    """A file that a runtime has opened. Subclasses define `description` and `bind`.

    `is_thread_safe`: several threads may call the bound functions at the same time. Otherwise this module's lock
    admits one at a time, `bind` included.
    """

    is_thread_safe: ClassVar[bool] = False
    copies_floats: bool = False
    """Whether floats are private, too: the runtime sorts or branches on them in a way that must not see them change."""
    description: HostedDescription
    """What is in the file."""

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        """Return the file bound to arrays.

        Args:
            inputs: An array for each input, of its element type ("bfloat16": uint16) and with its rank. Floats are in
                the client's memory, where they may change while they are read; others are private. The arrays live as
                long as the result. Their contents are not set yet.
            outputs: An array in the client's memory for each output whose shape is known, which each call may fill;
                None for the others, which it returns.
        """
        raise NotImplementedError

    def resolve(self, shapes: Sequence[Shape | None]) -> Sequence[Shape | None]:
        """Return the shapes of the outputs if the inputs have these shapes; sizes may still be open. May block.

        It is called before `bind`, unless these are the shapes of the description, and perhaps for other shapes before.
        A runtime that infers shapes tells those of the outputs here: outputs of known shapes are filled in place. It
        may also take other sizes than those that the file states. By default outputs have the sizes that the inputs
        give to symbols of the file.

        Raises:
            Exception: If inputs cannot have these shapes.
        """
        for given, found in zip(shapes, self.description.inputs, strict=True):
            if not fits_declaration(given, found.shape):
                raise InvalidArgument(f"input {found.name!r} is {found.shape} in the file, not {given}")
        return _with_sizes(self.description, shapes)

    def save(self) -> bytes | None:
        """Return bytes with which the file opens faster (`OpenOptions.saved`), or None; also if it was opened so."""
        return None


def _with_sizes(description: HostedDescription, shapes: Sequence[Shape | None]) -> list[Shape | None]:
    """Return the shapes of the outputs with the sizes that `shapes` of inputs give to symbols, unless they differ."""
    found = dict[Dimension, set[Dimension]]()
    for tensor, shape in zip(description.inputs, shapes, strict=True):
        for symbol, size in zip(tensor.shape or (), shape or (), strict=False):
            found.setdefault(symbol, set()).add(size)
    sizes: dict[Dimension, Dimension] = {
        symbol: given.pop() for symbol, given in found.items() if isinstance(symbol, str) and len(given) == 1
    }
    outputs = (tensor.shape for tensor in description.outputs)
    return [None if shape is None else tuple(sizes.get(size, size) for size in shape) for shape in outputs]
