"""Operations of vendors: how a plug-in declares an extension, and the extensions that this process computes.

A plug-in declares its operations as `operations` itself does; only the codes are its own: `define_type` and
`define_operation` make them. `install` gives the extension a prefix of this process and puts its types and operations
into the tables of the built-in ones, so that validation, planning and engines treat them alike. Models have prefixes of
their own: `translated` puts this process's numbers in their place, at the door, before a model is looked at.

Which plug-ins a driver installs is the service's affair. Spec: HAL 1.2, extensions; EXT, MOD-15.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extension_codes import (
    HIDL_PREFIX_BITS,
    Code,
    Extension,
    ExtensionCodes,
    ExtensionOperandTypeInformation,
    extension_code,
    extension_prefix,
    extension_type,
    is_extension,
    with_name,
)
from nnfmq.hal.types import EXTENSION_TYPES, ExtensionNameAndPrefix, Model, OperandType, OperationType, Subgraph
from nnfmq.operations import REGISTRY
from nnfmq.operations.signature import NUMPY_TYPES, Declaration, Overload, ParameterType

__all__ = ["INSTALLED", "ExtensionType", "VendorExtension", "define_operation", "define_type", "install", "translated"]

_OWN_PREFIX = 1  # of an extension's codes in its own file
_PREFIX_MAX = (1 << HIDL_PREFIX_BITS) - 1
_NUMBERS = "biufc"  # numpy's kinds of elements that are a number


def define_type(number: int, name: str) -> OperandType:
    """Return operand type `number` of the extension that the calling file declares."""
    return with_name(OperandType(extension_code(_OWN_PREFIX, number)), name)


def define_operation(number: int, name: str) -> OperationType:
    """Return operation `number` of the extension that the calling file declares."""
    return with_name(OperationType(extension_code(_OWN_PREFIX, number)), name)


@dataclass(frozen=True, slots=True)
class ExtensionType:
    """An operand type of an extension: its code from `define_type`, and numpy's name of its elements, e.g. "int64".

    Elements that are no numbers of numpy's are made of such: a tensor of bytes, say.
    """

    type: OperandType
    dtype: str
    is_tensor: bool = True

    @property
    def information(self) -> ExtensionOperandTypeInformation:
        """What the HAL says of it."""
        return ExtensionOperandTypeInformation(extension_type(self.type), self.is_tensor, np.dtype(self.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class VendorExtension:
    """An extension, whole: what a plug-in's entry point names.

    Declarations are those of `signature`; where they speak of the extension's own types and operations, the codes are
    from `define_type` and `define_operation`.
    """

    name: str
    types: tuple[ExtensionType, ...]
    declarations: tuple[Declaration, ...]

    @property
    def described(self) -> Extension:
        """What a device says of it."""
        return Extension(self.name, tuple(element.information for element in self.types))


INSTALLED: dict[str, VendorExtension] = {}  # what this process computes, by name
_numbers = ExtensionCodes()
_names: dict[tuple[type, int], str] = {}  # of the codes of INSTALLED


def install(extension: VendorExtension) -> None:
    """Let this process compute `extension` from now on.

    Raises InvalidArgument for a code that is not the extension's own, or declared twice, for a malformed name, and for
    one that is installed already.
    """
    if extension.name in INSTALLED:
        raise InvalidArgument(f"extension {extension.name} is installed already")
    _require_own(extension)
    place = _Place(extension.name, _numbers.prefix(extension.name))
    types = {place.learn(element.type): element for element in extension.types}
    operations = {place.learn(declaration.code): declaration for declaration in extension.declarations}
    elements = {code: element.information for code, element in types.items()}
    dtypes = {code: np.dtype(element.dtype) for code, element in types.items()}
    declarations = {code: place.declaration(declaration) for code, declaration in operations.items()}
    EXTENSION_TYPES.update(elements)  # all of it, or nothing where something above raised
    NUMPY_TYPES.update(dtypes)
    REGISTRY.update(declarations)
    INSTALLED[extension.name] = extension


def _require_own(extension: VendorExtension) -> None:
    types, operations = ([e.type for e in extension.types], [d.code for d in extension.declarations])
    for codes in (types, operations):
        if len(set(codes)) < len(codes):
            raise InvalidArgument(f"{extension.name}: declared twice: {sorted(code.name for code in codes)}")
    foreign = [code for code in (*types, *operations) if extension_prefix(code) != _OWN_PREFIX]
    used = {code for declaration in extension.declarations for code in _types_of(declaration) if is_extension(code)}
    foreign += sorted(used - set(types))
    if foreign:
        raise InvalidArgument(f"{extension.name}: {foreign[0]!r} is no code of its own")
    for element in extension.types:
        if np.dtype(element.dtype).kind not in _NUMBERS:
            raise InvalidArgument(f"{extension.name}: {element.type.name} has elements that are no numbers")


def _types_of(declaration: Declaration) -> Iterator[OperandType]:
    columns = [p.type for overload in declaration.overloads for p in overload.parameters] + list(declaration.outputs)
    yield from (column for column in columns if isinstance(column, OperandType))
    for variant in declaration.variants:
        yield from variant.types.values()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an extension is in this process, whatever prefix its codes have elsewhere."""

    name: str
    prefix: int

    def code(self, code: Code) -> Code:
        """Return the code that stands here for the extension's `code`; one of the HAL's as it is."""
        if not is_extension(code):
            return code
        number = extension_type(code)
        here = extension_code(self.prefix, number, prefix_bits=HIDL_PREFIX_BITS)
        return with_name(type(code)(here), _names.get((type(code), here), f"{self.name}.{number}"))

    def learn(self, own: Code) -> Code:
        """Note the name of a code that the extension declares, and return the code that stands here for it."""
        _names[type(own), int(self.code(own))] = f"{self.name}.{own.name}"
        return self.code(own)

    def declaration(self, declaration: Declaration) -> Declaration:
        """Return a declaration with all its codes in their places."""
        return replace(
            declaration,
            code=self.code(declaration.code),
            overloads=tuple(self._overload(overload) for overload in declaration.overloads),
            variants=tuple(
                replace(variant, types={column: self.code(type) for column, type in variant.types.items()})
                for variant in declaration.variants
            ),
            outputs=tuple(self._column(column) for column in declaration.outputs),
        )

    def _overload(self, overload: Overload) -> Overload:
        return replace(overload, parameters=tuple(replace(p, type=self._column(p.type)) for p in overload.parameters))

    def _column(self, column: ParameterType) -> ParameterType:
        return self.code(column) if isinstance(column, OperandType) else column


def translated(model: Model) -> Model:
    """Return `model` with this process's numbers of extensions instead of its own; itself where it names none.

    The names must be valid (`validation.values.validate_extensions`). Those that are not installed get prefixes that no
    installed one has. Raises InvalidArgument for a code whose prefix the model does not name.
    """
    if not model.extensions:
        return model
    places = {}
    for number, entry in enumerate(model.extensions):
        prefix = _numbers.prefix(entry.name) if entry.name in INSTALLED else _PREFIX_MAX - number
        places[entry.prefix] = _Place(entry.name, prefix)
    return replace(
        model,
        main=_translated_subgraph(model.main, places),
        referenced=tuple(_translated_subgraph(subgraph, places) for subgraph in model.referenced),
        extensions=tuple(ExtensionNameAndPrefix(place.name, place.prefix) for place in places.values()),
    )


def _translated_subgraph(subgraph: Subgraph, places: dict[int, _Place]) -> Subgraph:
    return replace(
        subgraph,
        operands=tuple(
            replace(operand, type=_translated(operand.type, places)) if is_extension(operand.type) else operand
            for operand in subgraph.operands
        ),
        operations=tuple(
            replace(operation, type=_translated(operation.type, places)) if is_extension(operation.type) else operation
            for operation in subgraph.operations
        ),
    )


def _translated(code: Code, places: dict[int, _Place]) -> Code:
    place = places.get(extension_prefix(code))
    if place is None:
        raise InvalidArgument(
            f"{code!r} has prefix {extension_prefix(code)}, the model declares {list(places)} (N-VAL-11)"
        )
    return place.code(code)
