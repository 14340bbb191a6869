"""Vendor extensions from plug-ins: entry points of the group `nnfmq.operations`.

An entry point has the extension's name and refers to a `VendorExtension`. The driver loads the extensions that are
installed in its own environment, before it serves a client; clients cannot load any. $NNFMQ_EXTENSIONS lists the
names that may be loaded, separated by commas (unset: all; empty: none); others are not even imported.

An extension that cannot be loaded, is not valid, or that two plug-ins define with different operand types, is skipped
with a log line (EXT-2, EXT-7, DEV-10). A device offers an extension completely or not at all (DEV-5).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nnfmq import settings
from nnfmq.hal.errors import InvalidArgument
from nnfmq.operations.extensions import VendorExtension, install
from nnfmq.operations.signature import Declaration, Plan
from nnfmq.service.error_translation import wrap_plugin_call
from nnfmq.service.installation import OPERATIONS_GROUP
from nnfmq.service.installed_packages import entry_points_of
from nnfmq.validation.values import validate_extension

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["load_extensions"]

_log = logging.getLogger("nnfmq.extensions")


def load_extensions(plugins: Iterable[EntryPoint] | None = None) -> None:
    """Install all extensions that are installed as plug-ins and allowed, before the first client is served.

    `plugins` are entry points, of this and other groups; by default those of all that is installed.
    """
    allowed = settings.EXTENSIONS.value()
    if allowed is not None and not allowed:
        return
    found: dict[str, list[EntryPoint]] = {}
    plugins = (
        entry_points_of(OPERATIONS_GROUP)
        if plugins is None
        else [entry for entry in plugins if entry.group == OPERATIONS_GROUP]
    )
    for entry in plugins:
        if allowed is None or entry.name in allowed:
            found.setdefault(entry.name, []).append(entry)
    for name in sorted(found):
        _install(name, found[name])
    for name in sorted(set(allowed or ()) - found.keys()):
        _log.warning("extension %s is allowed, but no plug-in defines it", name)


def _install(name: str, entries: Sequence[EntryPoint]) -> None:
    """Install the extension of this name, from the first of the plug-ins that define it identically."""
    loaded = [extension for entry in entries if (extension := _load(entry)) is not None]
    if not loaded:
        return
    if any(extension.described != loaded[0].described for extension in loaded):
        _log.warning("extension %s is disabled: %d plug-ins define different operand types", name, len(loaded))
        return
    with _skip_on_error(name):
        install(_wrap(loaded[0]))
        if len(loaded) > 1:
            _log.warning("extension %s is defined by %d plug-ins; the first one is used", name, len(loaded))


def _load(entry: EntryPoint) -> VendorExtension | None:
    """Import a plug-in and validate its extension. If that fails, log it and return None."""
    origin = f"{entry.name} ({entry.value}, of {entry.dist.name if entry.dist else 'an unknown distribution'})"
    with _skip_on_error(origin):
        return _validated(entry.name, entry.load())
    return None


@contextmanager
def _skip_on_error(label: str) -> Iterator[None]:
    """Log any exception in the block: no plug-in may keep the driver from starting."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001
        _log.warning("extension %s is left out: %s: %s", label, type(error).__name__, error)


def _validated(name: str, extension: object) -> VendorExtension:
    if not isinstance(extension, VendorExtension):
        raise InvalidArgument(f"the entry point must refer to a VendorExtension, not a {type(extension).__name__}")
    if extension.name != name:
        raise InvalidArgument(f"the plug-in's extension is {extension.name!r}")
    validate_extension(extension.described)
    for declaration in extension.declarations:
        if not declaration.variants or any(variant.plan is None for variant in declaration.variants):
            raise InvalidArgument(f"{declaration.name} is declared for types without a kernel")
    return extension


def _wrap(extension: VendorExtension) -> VendorExtension:
    """Return `extension` with functions whose exceptions become GeneralFailure."""
    declarations: list[Declaration] = []
    for declaration in extension.declarations:
        name = f"{extension.name}.{declaration.name}"
        variants = tuple(
            variant if variant.plan is None else replace(variant, plan=_wrap_plan(name, variant.plan))
            for variant in declaration.variants
        )
        shape = wrap_plugin_call(name, declaration.shape)
        declarations.append(replace(declaration, shape=shape, variants=variants))
    return replace(extension, declarations=tuple(declarations))


def _wrap_plan(name: str, plan: Plan) -> Plan:
    prepare = wrap_plugin_call(name, plan)
    return lambda *tensors, **attributes: wrap_plugin_call(name, prepare(*tensors, **attributes))
