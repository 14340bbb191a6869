"""Tests of the registry: its lists of operations are those of the modules, which are imported when they are used."""

import importlib
import pkgutil
import subprocess
import sys

import pytest
from support.plugins import tables_as_they_were

from nnfmq import operations
from nnfmq.hal.extensions import DTYPES, TfliteOperation, extended_operations, operation_code
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import HAL_DECLARATIONS, REGISTRY, tflite_extension
from nnfmq.operations.extensions import ExtensionType, VendorExtension, install

IMPORTED = """
import sys
from nnfmq.operations import REGISTRY, OperationType
assert OperationType.ADD in REGISTRY and OperationType.LSTM in REGISTRY
families = {"nnfmq.operations.binary_arithmetic", "nnfmq.operations.lstm", "nnfmq.operations.tflite_extension.volumes"}
print(sorted(families & sys.modules.keys()), REGISTRY[OperationType.ADD].name, sorted(families & sys.modules.keys()))
"""


@pytest.mark.parametrize("name", operations.FAMILIES)
def test_family_has_the_operations_of_its_module(name: str) -> None:
    declared = operations.family(name)
    assert operations.FAMILIES[name].split() == [declaration.name for declaration in declared]
    assert [REGISTRY[declaration.code] for declaration in declared] == list(declared)


@pytest.mark.parametrize("name", tflite_extension.EXTENSION_FAMILIES)
def test_family_of_the_extension_has_the_operations_of_its_module(name: str) -> None:
    names = tflite_extension.EXTENSION_FAMILIES[name].split()
    assert names == [declaration.name for declaration in tflite_extension.family(name)]
    codes = [operation_code(TfliteOperation[operation]) for operation in names]
    assert [REGISTRY[code].code for code in codes] == codes
    assert [REGISTRY[code].name for code in codes] == [code.name for code in codes]


@pytest.mark.parametrize("name", operations.FAMILIES)
def test_what_the_extension_adds_to_a_family_is_what_its_codes_name(name: str) -> None:
    declared = tflite_extension.extended_family(f"{operations.__name__}.{name}")
    added = {(base.code, extended.scheme) for base in operations.family(name) for extended in base.extended}
    named = {key for key in extended_operations() if key[0].name in operations.FAMILIES[name].split()}
    assert added == named
    assert len(declared) == len(added)
    codes = [operation_code(TfliteOperation[declaration.name]) for declaration in declared]
    assert [(REGISTRY[code].code, REGISTRY[code].name) for code in codes] == [(code, code.name) for code in codes]


def test_the_hal_s_operation_does_not_accept_what_the_extension_adds() -> None:
    maximum = HAL_DECLARATIONS[OperationType.MAXIMUM]
    sixteen_bits = REGISTRY[operation_code(TfliteOperation.Q16_MAXIMUM)]
    assert {variant.types["T"] for variant in sixteen_bits.variants} == {OperandType.TENSOR_QUANT16_SYMM}
    assert OperandType.TENSOR_QUANT16_SYMM not in {variant.types["T"] for variant in maximum.variants}


def test_all_modules_with_declarations_are_listed() -> None:
    packages = {operations: operations.FAMILIES, tflite_extension: tflite_extension.EXTENSION_FAMILIES}
    for package, listed in packages.items():
        names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg]
        modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
        assert {name for name, module in modules.items() if hasattr(module, "DECLARATIONS")} == set(listed)


def test_operations_without_a_declaration() -> None:
    assert set(OperationType) - set(HAL_DECLARATIONS) == {OperationType.OEM_OPERATION}


def test_extension_fulfils_what_is_required_of_plug_ins() -> None:
    """`install` checks that all codes are the extension's own and declared once."""
    types = tuple(ExtensionType(operand_type, dtype) for operand_type, dtype in DTYPES.items())
    own = [d for name in tflite_extension.EXTENSION_FAMILIES for d in tflite_extension.family(name)]
    added = [
        d for name in operations.FAMILIES for d in tflite_extension.extended_family(f"{operations.__name__}.{name}")
    ]
    assert {d.name for d in (*own, *added)} == set(TfliteOperation.__members__) - {"EMBEDDING_LOOKUP_SPARSE"}
    with tables_as_they_were():
        install(VendorExtension("com.example.copy", types, (*own, *added)))


def test_module_of_a_family_is_imported_when_an_operation_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout == "[] ADD ['nnfmq.operations.binary_arithmetic']\n"
