"""The choice of a hosted runtime: for a model file that nnfmq's own engine does not support, and for hosted models.

nnfmq's own devices come first, because they are the fast default. What they refuse goes to the first device of the
driver that hosts a runtime (`hal.hosted`) and prepares the file. `Client.prepare` and `nnfmq.Runtime` choose here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.client.connection.device import Device
from nnfmq.client.connection.prepare_arguments import (
    FinishedModel,
    ModelArgument,
    NamedModel,
    PrepareOptions,
    is_file,
    name_for_display,
    to_hal_model,
    to_model,
    to_preference,
    to_priority,
    with_time_left,
)
from nnfmq.hal.errors import BadState, DeviceUnavailable, GeneralFailure, InvalidArgument, NnfmqError, UnsupportedModel
from nnfmq.hal.hosted import call_of, is_hosted, is_runtime_name, runtimes_of
from nnfmq.hal.summaries import listed
from nnfmq.hal.types import DEFAULT_PREFERENCE, Model, Priority

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.client.model.prepared_model import PreparedModel
    from nnfmq.importers.file_format import ModelSource, SourceArgument
    from nnfmq.importers.hosted import HostedSource
    from nnfmq.importers.loaded_model import LoadedModel

__all__ = ["FileOptions", "GivenModel", "Host", "Hosting"]

ResultT = TypeVar("ResultT")
_log = logging.getLogger("nnfmq.client")


# ----------------------------------------------------------------------------------------------------------------------
# GivenModel: the model of `prepare` after its import, or the file that was refused.


class FileOptions(TypedDict, total=False):
    """The keyword arguments of `Device.prepare` that are about a model file."""

    shapes: Mapping[str | int, Sequence[int]] | None
    signature: str | None
    runtime_options: Mapping[str, Any] | None


class GivenModel(Struct, frozen=True):
    """A model as an application gave it: `model` is what was imported; None if the file is for a hosted runtime.

    That is a file that the importer has refused: `refusal` is why; or one that came with options of a runtime. The file
    is a ModelSource if the caller has read it.
    """

    model: Model | FinishedModel | None
    file: SourceArgument | ModelSource | None
    file_options: FileOptions
    refusal: InvalidArgument | GeneralFailure | None = None

    @classmethod
    def of(cls, argument: ModelArgument, options: PrepareOptions, *, is_imported: bool = True) -> GivenModel:
        """Return the model that does not change any more, and make `options` those for it: nothing of its file.

        Unless `is_imported`, a file is for a hosted runtime in any case. Raises as `to_model`, if no hosted runtime can
        help; or InvalidArgument if the preference or the priority is none.
        """
        of_file, file = _without_file(argument, options), argument if is_file(argument) else None
        if file is None and of_file["runtime_options"]:
            raise InvalidArgument(f"`runtime_options` are for a model file, this is a {type(argument).__name__}")
        if file is not None and (of_file["runtime_options"] or not is_imported):
            return cls(None, file, of_file)
        try:
            return cls(to_model(argument, of_file["shapes"], of_file["signature"]), file, of_file)
        except InvalidArgument as error:
            if file is None or not _is_refusal(error):
                raise
            error.__context__ = None  # it refers to the importer's frames, and these to the content of the file
            return cls(None, file, of_file, error.with_traceback(None))

    @classmethod
    def of_read_file(
        cls, file: ModelSource, refusal: InvalidArgument | GeneralFailure | None, options: PrepareOptions
    ) -> GivenModel:
        """Return a file for a hosted runtime that the caller has read, and `options` as `of`."""
        return cls(None, file, _without_file(b"" if file.path is None else file.path, options), refusal)

    @property
    def label(self) -> str:
        """The file, for messages."""
        file = self.file
        given = file if not isinstance(file, Struct) else file.data if file.path is None else file.path
        assert given is not None  # it is what a runtime shall run
        return str(given) if isinstance(given, (str, os.PathLike)) else f"a model of {len(given):,} bytes"


def _without_file(argument: ModelArgument, options: PrepareOptions) -> FileOptions:
    """Return the options about the model's file, and make `options` the others, checked. Raises InvalidArgument."""
    options["name"] = name_for_display(argument, options.get("name"))
    options["preference"] = to_preference(options.get("preference", DEFAULT_PREFERENCE))
    options["priority"] = to_priority(options.get("priority", Priority.MEDIUM))
    return FileOptions(
        shapes=options.pop("shapes", None),
        signature=options.pop("signature", None),
        runtime_options=options.pop("runtime_options", None),
    )


def _is_refusal(error: InvalidArgument) -> bool:
    from nnfmq.importers.file_format import UnknownFormat  # imported by what has raised
    from nnfmq.importers.loaded_model import UnknownShapes

    return isinstance(error, (UnsupportedModel, UnknownShapes, UnknownFormat))


# ----------------------------------------------------------------------------------------------------------------------
# Hosting: the devices that host runtimes, in the order in which they are tried.


class Host(Struct, frozen=True):
    """A device that hosts a runtime: its name for the application, its name in the driver, and its methods.

    `load` and `supported_operations` are those of Device, `prepare` takes a model and options.
    """

    name: str
    runtime: str
    load: Callable[..., LoadedModel]
    supported_operations: Callable[..., Sequence[bool]]
    prepare: Callable[[Model | NamedModel, PrepareOptions], PreparedModel]

    @classmethod
    def of(cls, device: Device) -> Host:
        """Return a device of one client."""
        name = device.info.name
        return cls(name, name, device.load, device.supported_operations, lambda model, to: device.prepare(model, **to))

    def may_run(self, format: str) -> bool:
        """Return whether files of this format are for this device, as far as the client knows its runtime."""
        return not is_runtime_name(self.runtime) or self.runtime in [known.name for known in runtimes_of(format)]


class Hosting(Struct, frozen=True):
    """The devices that host runtimes, in the order in which they are tried.

    `why_absent` returns how to get a runtime of this name, in the words of the driver; "" if it has it.
    `is_synchronous` is that of the models.
    """

    hosts: Sequence[Host]
    why_absent: Callable[[str], str]
    is_synchronous: bool = False

    def prepare(
        self,
        given: GivenModel,
        options: PrepareOptions,
        prepare_own: Callable[[Model | FinishedModel, PrepareOptions], CompiledModel],
    ) -> CompiledModel:
        """Return the model, prepared by `prepare_own` on nnfmq's own devices, or on a hosted runtime; blocks.

        Which device runs a file that nnfmq's own do not, is logged once.

        Raises:
            UnsupportedModel: If neither runs the model. The message has the reasons of both, or how to install a
                runtime that would.
            NnfmqError: What `prepare_own` raises; the error of the device, for a model that is hosted already.
        """
        deadline_ns = deadline_after(options.get("timeout"))

        def prepare_hosted(host: Host, model: Model | NamedModel) -> PreparedModel:
            prepared = host.prepare(model, with_time_left(options, deadline_ns))
            prepared.planned_model = to_hal_model(model)
            prepared.is_synchronous = self.is_synchronous
            _log_once(given, host.name)
            return prepared

        if given.model is not None:
            if is_hosted(to_hal_model(given.model)):
                return prepare_hosted(self.host_of(given.model, deadline_ns), given.model)
            try:
                return prepare_own(given.model, options)
            except (GeneralFailure, UnsupportedModel) as error:
                if given.file is None:
                    raise
                given = replace(given, refusal=error.with_traceback(None))  # which refers to this frame
        return self.first(given, deadline_ns, prepare_hosted)

    def first(self, given: GivenModel, deadline_ns: int | None, use: Callable[[Host, LoadedModel], ResultT]) -> ResultT:
        """Return `use(host, loaded)` of the first device for which that and loading the file succeed; blocks.

        Raises:
            UnsupportedModel: If none does; `UnknownShapes` and GeneralFailure if that is the file's refusal. Without
                one, InvalidArgument, or the error of the only device.
            OSError: If the file cannot be read.
            MissedDeadline: If the deadline passes.
            DeadObject: If the driver exits.
        """
        source = _read(given)
        hosts = [host for host in self.hosts if host.may_run(source.format)] if source is not None else []
        rejections: dict[str, str] = {}  # without the errors, which would refer to this frame
        for host in hosts:
            try:
                loaded = host.load(source, **given.file_options, timeout=remaining_s(deadline_ns))
                return use(host, loaded)
            except BadState:
                raise
            except (InvalidArgument, GeneralFailure, DeviceUnavailable) as error:
                if given.refusal is None and len(hosts) == 1:
                    raise
                rejections[host.name] = str(error).removeprefix(f"{host.runtime}: ")
        raise _with_advice(given, self._advice(source, rejections)) from None

    def _advice(self, source: HostedSource | None, rejections: Mapping[str, str]) -> str:
        """Return why no hosted runtime runs a file, or how to install one that may."""
        if rejections:
            return "\n".join(f"device {name!r} rejects it: {text}" for name, text in rejections.items())
        absent = self._absent(source.format) if source is not None else ""
        return f"a hosted runtime may run it: {absent}" if absent else ""

    def _absent(self, format: str) -> str:
        """Return advice to get the first runtime that runs files of a format; "" if it is there, or none is known."""
        runtimes = runtimes_of(format)
        try:
            return self.why_absent(runtimes[0].name) if runtimes else ""
        except NnfmqError:  # the refusal is what the caller has to know
            return ""

    def host_of(self, model: Model | FinishedModel, deadline_ns: int | None) -> Host:
        """Return the first device that supports a hosted model; blocks. Raises UnsupportedModel if none does."""
        format = call_of(to_hal_model(model)).format
        for host in (host for host in self.hosts if host.may_run(format)):
            if all(host.supported_operations(model, timeout=remaining_s(deadline_ns))):
                return host
        reason = f"this is a hosted model, of the format {format!r}, and no device runs it"
        raise UnsupportedModel(reason, (), self._absent(format))


def _read(given: GivenModel) -> HostedSource | None:
    """Return the file in sealed memories; None if it is of no format that a runtime may run, which was refused."""
    from nnfmq.importers.file_format import ModelSource, read_source  # most models need no hosted runtime
    from nnfmq.importers.hosted import read_hosted

    file = given.file
    assert file is not None  # it is what was refused
    try:
        return read_hosted(file if isinstance(file, ModelSource) else read_source(file, is_sealed=True))
    except InvalidArgument:
        if given.refusal is None:
            raise
        return None


# ----------------------------------------------------------------------------------------------------------------------
# What the application is told.


_NAMES_MAX = 6
_logged: dict[str, object] = {}


def _log_once(given: GivenModel, device: str) -> None:
    """Log, once in this process, which device executes a file if nnfmq's own engine has refused it."""
    if given.refusal is None:
        return
    reason = f"{given.label} is executed by device {device!r}, {_reason(given.refusal)}"
    line = f"{reason}; client.device({device!r}) chooses it at once"
    mark = object()
    if _logged.setdefault(line, mark) is mark:
        _log.warning("%s", line)


def _reason(refusal: Exception) -> str:
    from nnfmq.importers.loaded_model import UnknownShapes  # imported already, with an importer

    if isinstance(refusal, UnknownShapes):
        open_inputs = [f"input {each.name!r} is {each.text()}" for each in refusal.inputs if not each.is_known]
        return f"because sizes are not known: {'; '.join(open_inputs)}; with `shapes` nnfmq's own engine may execute it"
    problems = refusal.problems if isinstance(refusal, UnsupportedModel) else ()
    operators = list(dict.fromkeys(problem.operator for problem in problems if problem.operator))
    if not operators:
        return f"because nnfmq's own engine does not: {str(refusal).splitlines()[0]}"
    names = listed(operators[:_NAMES_MAX], len(operators))
    return f"because nnfmq's own engine does not support {names} as it is used there"


def _with_advice(given: GivenModel, advice: str) -> InvalidArgument | GeneralFailure:
    """Return the error for a file that nothing runs: another object than its refusal, which refers to its raiser."""
    from nnfmq.importers.loaded_model import UnknownShapes  # imported already, with an importer

    refusal = given.refusal
    if isinstance(refusal, UnknownShapes):
        return UnknownShapes(refusal.inputs, refusal.origin, advice)
    if isinstance(refusal, UnsupportedModel):
        return UnsupportedModel(str(refusal), refusal.problems, advice)
    if refusal is not None:
        return type(refusal)("\n".join([str(refusal), *([advice] if advice else [])]))
    return InvalidArgument(f"{given.label}: {advice or 'no device of the driver runs files of this format'}")
