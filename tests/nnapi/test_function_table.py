"""The table of NNAPI's functions: complete, and the same as in the documents."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter

from support.places import ROOT

import nnfmq
from nnfmq import nnapi, telemetry
from nnfmq.client.partitioned.devices import RuntimeDevice
from nnfmq.nnapi import device_queries
from nnfmq.nnapi.support_library import FUNCTIONS, NOT_ON_LINUX, free

PAGE = ROOT / "docs" / "reference" / "nnapi.md"
TABLE = re.compile(r"^### `(?P<prefix>\w+_)…`\n(?P<rows>.*?)(?=^###|\Z)", re.M | re.S)
ROW = re.compile(r"^\| (?P<name>\w+) \| (?:`(?P<python>[\w.]+)`(?:: .*)?|none: (?P<reason>.*)) \|$", re.M)

# The functions of NeuralNetworks.h and NeuralNetworksExtensions.h up to feature level 8, by object.
API = {
    "": "getDefaultLoopTimeout getMaximumLoopTimeout getRuntimeFeatureLevel getDeviceCount getDevice",
    "Device": "getName getType getVersion getFeatureLevel getExtensionSupport wait",
    "Model": "create free finish addOperand setOperandValue setOperandValueFromMemory setOperandValueFromModel "
    "setOperandSymmPerChannelQuantParams setOperandExtensionData addOperation identifyInputsAndOutputs "
    "relaxComputationFloat32toFloat16 getExtensionOperandType getExtensionOperationType "
    "getSupportedOperationsForDevices",
    "Compilation": "create createForDevices free finish setPreference setPriority setTimeout setCaching "
    "addExtensionAttribute getPreferredMemoryAlignmentForInput getPreferredMemoryPaddingForInput "
    "getPreferredMemoryAlignmentForOutput getPreferredMemoryPaddingForOutput",
    "Execution": "create free setInput setInputFromMemory setOutput setOutputFromMemory "
    "enableInputAndOutputPadding setTimeout setLoopTimeout setMeasureTiming setReusable addExtensionAttribute "
    "compute burstCompute startCompute startComputeWithDependencies getOutputOperandRank "
    "getOutputOperandDimensions getDuration",
    "Event": "wait free createFromSyncFenceFd getSyncFenceFd",
    "Burst": "create free",
    "MemoryDesc": "create free finish addInputRole addOutputRole setDimensions",
    "Memory": "createFromFd createFromAHardwareBuffer createFromDesc copy free",
}
SUPPORT_LIBRARY = {
    "Compilation": "setCachingFromFds",
    "Device": "getNumberOfCacheFilesNeeded getPerformanceInfo forEachOperandPerformanceInfo getVendorExtensionCount "
    "getVendorExtensionName forEachVendorExtensionOperandTypeInformation",
    "Diagnostic": "registerCallbacks",
    "DiagnosticCompilationInfo": "getSessionId getNnApiVersion getModelArchHash getDeviceIds getErrorCode "
    "getInputDataClass getOutputDataClass getCompilationTimeNanos isCachingEnabled isControlFlowUsed "
    "areDynamicTensorsUsed",
    "DiagnosticExecutionInfo": "getSessionId getNnApiVersion getModelArchHash getDeviceIds getExecutionMode "
    "getInputDataClass getOutputDataClass getErrorCode getRuntimeExecutionTimeNanos getDriverExecutionTimeNanos "
    "getHardwareExecutionTimeNanos isCachingEnabled isControlFlowUsed areDynamicTensorsUsed",
}
NAMESPACES = (nnfmq, nnapi, device_queries, telemetry)


def names(table: dict[str, str], prefix: str) -> set[str]:
    return {f"{prefix}{owner}_{name}" for owner, listed in table.items() for name in listed.split()}


def test_API_17_each_function_of_nnapi_is_in_the_table_or_has_a_reason() -> None:
    expected = names(API, "ANeuralNetworks") | names(SUPPORT_LIBRARY, "SL_ANeuralNetworks")
    assert not set(FUNCTIONS) & set(NOT_ON_LINUX)
    assert set(FUNCTIONS) | set(NOT_ON_LINUX) == expected


def found_by_name(python: str) -> object:
    """Return what a name of the page stands for; of an attribute of objects, an attrgetter."""
    first, _, rest = python.partition(".")
    if first == "RuntimeDevice":
        owner: object = RuntimeDevice
    elif first == "free":
        owner = free
    else:
        owner = next(getattr(space, first) for space in NAMESPACES if hasattr(space, first))
    if not rest:
        return owner
    value = getattr(owner, rest, None)
    return value if inspect.isroutine(value) and not inspect.ismethoddescriptor(value) else rest


def test_API_17_the_page_has_the_table() -> None:
    tables = TABLE.finditer(PAGE.read_text())
    rows = {table["prefix"] + row["name"]: row for table in tables for row in ROW.finditer(table["rows"])}
    assert set(rows) == set(FUNCTIONS) | set(NOT_ON_LINUX)
    for name, reason in NOT_ON_LINUX.items():
        assert rows[name]["reason"] == reason
    for name, function in FUNCTIONS.items():
        found = found_by_name(rows[name]["python"])
        assert repr(attrgetter(found)) == repr(function) if isinstance(found, str) else found == function, name
