"""Vendor extensions: declaring one in a plug-in, and installing it in this process.

A plug-in declares its operations like the modules of `operations`, with codes from `define_type` and
`define_operation`. `install` assigns the extension a prefix of this process and adds its types and operations to the
tables of the built-in ones, so that validation, preparation and engines need no special case. A model declares prefixes
itself; `to_local_prefixes` replaces them by this process's before the model is validated.

The service decides which plug-ins a driver installs. Source: HAL 1.2, extensions (EXT, MOD-15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import (
    HIDL_PREFIX_BITS,
    NAME,
    Code,
    Extension,
    ExtensionCodes,
    ExtensionOperandTypeInformation,
    extension_code,
    extension_prefix,
    extension_type,
    is_extension,
    named_code,
)
from nnfmq.hal.hosted import NAME as HOSTED_NAME
from nnfmq.hal.hosted import RUN
from nnfmq.hal.types import EXTENSION_TYPES, ExtensionNameAndPrefix, Model, OperandType, OperationType, Subgraph
from nnfmq.operations.declaration import NUMPY_TYPES, REGISTRY, Declaration, ParameterType

__all__ = [
    "INSTALLED",
    "ExtensionType",
    "VendorExtension",
    "define_operation",
    "define_type",
    "install",
    "install_families",
    "to_local_prefixes",
    "uses_plugins",
]

_OWN_PREFIX = 1  # prefix of an extension's codes in the module that declares it
_PREFIX_MAX = (1 << HIDL_PREFIX_BITS) - 1
_HOSTED_NAMES = {RUN: "RUN"}  # of its operations, which no declaration names
_NUMERIC_KINDS = "biufc"  # dtype.kind of bool, int, unsigned int, float, complex


def define_type(code: int, name: str) -> OperandType:
    """Return operand type `code` of the extension that the calling module declares."""
    return named_code(OperandType, extension_code(_OWN_PREFIX, code), name)


def define_operation(code: int, name: str) -> OperationType:
    """Return operation `code` of the extension that the calling module declares."""
    return named_code(OperationType, extension_code(_OWN_PREFIX, code), name)


class ExtensionType(Struct, frozen=True):
    """An operand type of an extension: its code from `define_type`, and the NumPy dtype of its elements, e.g. "int64".

    Elements that NumPy has no numeric dtype for are declared as tensors of one that it has, such as bytes.
    """

    type: OperandType
    dtype: str
    is_tensor: bool = True

    @property
    def information(self) -> ExtensionOperandTypeInformation:
        """The type as the HAL reports it."""
        return ExtensionOperandTypeInformation(extension_type(self.type), self.is_tensor, np.dtype(self.dtype).itemsize)


class VendorExtension(Struct, frozen=True):
    """A complete extension: the object that a plug-in's entry point refers to.

    `declarations` use codes from `define_type` and `define_operation` for the extension's own types and operations.
    Those of an extension in families, which `install_families` installs, are in `REGISTRY` only.
    """

    name: str
    types: tuple[ExtensionType, ...]
    declarations: tuple[Declaration, ...]

    @property
    def described(self) -> Extension:
        """The extension as a device reports it."""
        return Extension(self.name, tuple(element.information for element in self.types))


INSTALLED: dict[str, VendorExtension] = {}  # by name
_numbers = ExtensionCodes()
_names: dict[tuple[type, int], str] = {}  # of the codes of installed extensions


def install(extension: VendorExtension) -> None:
    """Add an extension's types and operations to the tables of this process.

    Raises:
        InvalidArgument: If a code is not the extension's own or is declared twice, if the name is malformed, or if an
            extension of that name is already installed. The tables are unchanged then.
    """
    if extension.name in INSTALLED:
        raise InvalidArgument(f"extension {extension.name} is already installed")
    _require_own(extension)
    local = _LocalPrefix(extension.name, _numbers.prefix(extension.name))
    types = local.types(extension.types)
    operations = {local.register(declaration.code): declaration for declaration in extension.declarations}
    declarations = {code: local.declaration(declaration) for code, declaration in operations.items()}
    _add(extension, types)  # everything that can raise is above
    REGISTRY.update(declarations)


def install_families(
    name: str,
    types: tuple[ExtensionType, ...],
    families: Iterable[tuple[Callable[[], Iterable[Declaration]], Iterable[OperationType]]],
) -> None:
    """Add the extension of this build; `families` are the functions that import them, with their codes.

    A function is called when one of its declarations is first read. Tests check what `install` checks.
    """
    local = _LocalPrefix(name, _numbers.prefix(name))
    _add(VendorExtension(name, types, ()), local.types(types))
    for load, codes in families:
        REGISTRY.add_family([local.register(code) for code in codes], partial(local.declarations, load))


def _add(extension: VendorExtension, types: Mapping[OperandType, ExtensionType]) -> None:
    """Add an extension and its types, by their codes in this process."""
    EXTENSION_TYPES.update({code: element.information for code, element in types.items()})
    NUMPY_TYPES.update({code: np.dtype(element.dtype) for code, element in types.items()})
    INSTALLED[extension.name] = extension


def _require_own(extension: VendorExtension) -> None:
    types, operations = ([e.type for e in extension.types], [d.code for d in extension.declarations])
    for codes in (types, operations):
        if len(set(codes)) < len(codes):
            raise InvalidArgument(f"{extension.name}: a code is declared twice: {sorted(code.name for code in codes)}")
    foreign = [code for code in (*types, *operations) if extension_prefix(code) != _OWN_PREFIX]
    used = {code for declaration in extension.declarations for code in _types_of(declaration) if is_extension(code)}
    foreign += sorted(used - set(types))
    if foreign:
        raise InvalidArgument(f"{extension.name}: {foreign[0]!r} is not a code of this extension")
    for element in extension.types:
        if np.dtype(element.dtype).kind not in _NUMERIC_KINDS:
            raise InvalidArgument(f"{extension.name}: {element.type.name} has elements of {element.dtype}, not numeric")


def _types_of(declaration: Declaration) -> Iterator[OperandType]:
    types = [p.type for overload in declaration.overloads for p in overload.parameters] + list(declaration.outputs)
    yield from (type for type in types if isinstance(type, OperandType))
    for variant in declaration.variants:
        yield from variant.types.values()


class _LocalPrefix(Struct, frozen=True):
    """An extension's prefix in this process; its codes have other prefixes in models and in its own module."""

    name: str
    prefix: int

    def code(self, code: Code) -> Code:
        """Return an extension code with this process's prefix; a code of the HAL unchanged."""
        if not is_extension(code):
            return code
        here, number = self._here(code), extension_type(code)
        known = _names.get((type(code), here))
        if known is None:
            known = f"{self.name}.{_HOSTED_NAMES.get(number, number) if self.name == HOSTED_NAME else number}"
        return named_code(type(code), here, known)

    def register(self, own: Code) -> Code:
        """Register the name of a code that the extension declares; return the code with this process's prefix."""
        here = self._here(own)
        name = _names[type(own), here] = f"{self.name}.{own.name}"
        return named_code(type(own), here, name)

    def _here(self, code: int) -> int:
        """Return the number of an extension's code with this process's prefix."""
        return extension_code(self.prefix, extension_type(code), prefix_bits=HIDL_PREFIX_BITS)

    def types(self, types: Iterable[ExtensionType]) -> dict[OperandType, ExtensionType]:
        """Register the names of types; return the types by their codes with this process's prefix."""
        return {self.register(element.type): element for element in types}

    def declarations(self, load: Callable[[], Iterable[Declaration]]) -> list[tuple[OperationType, Declaration]]:
        """Return the declarations that `load` returns by their codes, with this process's prefix."""
        found = map(self.declaration, load())
        return [(declaration.code, declaration) for declaration in found]

    def declaration(self, declaration: Declaration) -> Declaration:
        """Return a declaration with this process's prefix in all its codes."""
        return replace(
            declaration,
            code=self.code(declaration.code),
            overloads=tuple(
                replace(overload, parameters=tuple(replace(p, type=self._type(p.type)) for p in overload.parameters))
                for overload in declaration.overloads
            ),
            variants=tuple(
                replace(variant, types={variable: self.code(type) for variable, type in variant.types.items()})
                for variant in declaration.variants
            ),
            outputs=tuple(self._type(type) for type in declaration.outputs),
        )

    def _type(self, type: ParameterType) -> ParameterType:
        return self.code(type) if isinstance(type, OperandType) else type


def to_local_prefixes(model: Model) -> Model:
    """Return `model` with its extension prefixes replaced by this process's; `model` itself if it declares none.

    The extensions must have passed `validation.values.validate_extensions`. Extensions that are not installed get
    prefixes that no installed one has.

    Raises:
        InvalidArgument: If the model declares extensions and uses a code whose prefix is not among them.
    """
    if not model.extensions:
        return model
    local_prefixes = {}
    for index, entry in enumerate(model.extensions):
        prefix = _numbers.prefix(entry.name) if entry.name in INSTALLED else _PREFIX_MAX - index
        local_prefixes[entry.prefix] = _LocalPrefix(entry.name, prefix)
    return replace(
        model,
        main=_subgraph_to_local_prefixes(model.main, local_prefixes),
        referenced=tuple(_subgraph_to_local_prefixes(subgraph, local_prefixes) for subgraph in model.referenced),
        extensions=tuple(ExtensionNameAndPrefix(local.name, local.prefix) for local in local_prefixes.values()),
    )


def uses_plugins(model: Model) -> bool:
    """Return whether a model uses extensions other than those whose code is part of this build."""
    return any(entry.name not in (NAME, HOSTED_NAME) for entry in model.extensions)


def _subgraph_to_local_prefixes(subgraph: Subgraph, local_prefixes: dict[int, _LocalPrefix]) -> Subgraph:
    return replace(
        subgraph,
        operands=tuple(
            replace(operand, type=_to_local_code(operand.type, local_prefixes))
            if is_extension(operand.type)
            else operand
            for operand in subgraph.operands
        ),
        operations=tuple(
            replace(operation, type=_to_local_code(operation.type, local_prefixes))
            if is_extension(operation.type)
            else operation
            for operation in subgraph.operations
        ),
    )


def _to_local_code(code: Code, local_prefixes: dict[int, _LocalPrefix]) -> Code:
    local = local_prefixes.get(extension_prefix(code))
    if local is None:
        raise InvalidArgument(
            f"{code!r} has prefix {extension_prefix(code)}, the model declares {list(local_prefixes)} (N-VAL-11)"
        )
    return local.code(code)
