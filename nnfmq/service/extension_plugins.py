"""Which extensions a driver offers: plug-ins that are installed beside it, and allowed.

A plug-in is an entry point of the group `nnfmq.operations`; its name is the extension's, what it names a
`VendorExtension`. Clients have no say: the driver loads what is installed in its own environment, once, before it has a
client. `$NNFMQ_EXTENSIONS` lists the names that it may load, separated by commas (unset: all, empty: none); what is not
allowed is not even imported. A plug-in that cannot be loaded, or says something impossible, is left out with a log
line, and so is an extension that two plug-ins give different operand types (EXT-2, EXT-7, DEV-10). An extension is
offered whole or not at all (DEV-5).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from nnfmq.hal.errors import InvalidArgument
from nnfmq.operations.extensions import VendorExtension, install
from nnfmq.operations.signature import Declaration, Plan
from nnfmq.service.error_translation import wrap_plugin_call
from nnfmq.validation.values import validate_extension

GROUP = "nnfmq.operations"
ALLOWED = "NNFMQ_EXTENSIONS"
_log = logging.getLogger("nnfmq.extensions")


def load_extensions() -> None:
    """Install every extension that is there and allowed. For the start of a process, before it has threads."""
    allowed = allowed_extensions()
    if allowed is not None and not allowed:
        return
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        if allowed is None or entry.name in allowed:
            found.setdefault(entry.name, []).append(entry)
    for name in sorted(found):
        _install_one(name, found[name])
    for name in sorted(set(allowed or ()) - found.keys()):
        _log.warning("extension %s is allowed, but no plug-in gives it", name)


def allowed_extensions() -> list[str] | None:
    """Return the names in $NNFMQ_EXTENSIONS; None = all."""
    listed = os.environ.get(ALLOWED)
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]


def _install_one(name: str, entries: Sequence[EntryPoint]) -> None:
    loaded = [extension for entry in entries if (extension := _loaded(entry)) is not None]
    if any(extension.described != loaded[0].described for extension in loaded):
        _log.warning("extension %s is disabled: %d plug-ins give it different operand types", name, len(loaded))
    elif loaded:
        _install(name, loaded[0], len(loaded))


def _install(name: str, extension: VendorExtension, count: int) -> None:
    with _left_out_on_failure(name):
        install(_guarded(extension))
        if count > 1:
            _log.warning("extension %s is given by %d plug-ins; the first one is used", name, count)


def _loaded(entry: EntryPoint) -> VendorExtension | None:
    """Return what a plug-in gives, or None and a log line."""
    threads = _thread_count()
    with _left_out_on_failure(_origin(entry)):
        extension = _validated(entry.name, entry.load())
        if _thread_count() > threads:  # a process that forks must have one, and there is no way to end another's
            _log.error("extension %s started threads when it was imported: this driver cannot go on", _origin(entry))
        return extension
    return None


@contextmanager
def _left_out_on_failure(what: str) -> Iterator[None]:
    """Log whatever the block raises: nothing that a vendor's code does must stop the driver."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001
        _log.warning("extension %s is left out: %s: %s", what, type(error).__name__, error)


def _origin(entry: EntryPoint) -> str:
    return f"{entry.name} ({entry.value}, of {entry.dist.name if entry.dist else 'nobody'})"


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def _validated(name: str, extension: object) -> VendorExtension:
    if not isinstance(extension, VendorExtension):
        raise InvalidArgument(f"a plug-in names a VendorExtension, not a {type(extension).__name__}")
    if extension.name != name:
        raise InvalidArgument(f"the plug-in's extension is {extension.name!r}")
    validate_extension(extension.described)
    for declaration in extension.declarations:
        if not declaration.variants or any(variant.plan is None for variant in declaration.variants):
            raise InvalidArgument(f"{declaration.name} is declared in types that are not computed")
    return extension


def _guarded(extension: VendorExtension) -> VendorExtension:
    """Return `extension` with functions that fail in the HAL's way, whatever they raise."""
    declarations = (_guarded_declaration(f"{extension.name}.{d.name}", d) for d in extension.declarations)
    return replace(extension, declarations=tuple(declarations))


def _guarded_declaration(name: str, declaration: Declaration) -> Declaration:
    variants = tuple(
        variant if variant.plan is None else replace(variant, plan=_guarded_plan(name, variant.plan))
        for variant in declaration.variants
    )
    return replace(declaration, shape=wrap_plugin_call(name, declaration.shape), variants=variants)


def _guarded_plan(name: str, plan: Plan) -> Plan:
    planned = wrap_plugin_call(name, plan)
    return lambda *tensors, **controls: wrap_plugin_call(name, planned(*tensors, **controls))
