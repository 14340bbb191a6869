"""Every public name of ONNX Runtime is in `nnfmq.compat.onnxruntime`, with the same signature, or raises why not."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.onnx_runtime import runtime

import nnfmq.compat.onnxruntime as ours
from nnfmq.compat.onnxruntime.environment import UNAVAILABLE_CLASSES, UNAVAILABLE_MODULES

NOT_PUBLIC = {"contextlib", "import_capi_exception", "onnxruntime_validation", "annotations"}
"""What ONNX Runtime's module has for itself."""
ENUMS = ["ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "ModelPackageWriteMode", "OrtAllocatorType",
         "OrtCompileApiFlags", "OrtDeviceMemoryType", "OrtExecutionProviderDevicePolicy", "OrtHardwareDeviceType",
         "OrtMemType", "OrtMemoryInfoDeviceType", "OrtSparseFormat"]  # fmt: skip


def names() -> list[str]:
    """Return the public names, without the submodules that other tests may have imported."""
    left_out = {*NOT_PUBLIC, *UNAVAILABLE_MODULES}
    return [name for name in dir(runtime) if not name.startswith("_") and name not in left_out]


def classes() -> list[str]:
    return [name for name in names() if inspect.isclass(getattr(runtime, name)) and name not in UNAVAILABLE_CLASSES]


def members(name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the public members of a class: name, ours, theirs."""
    theirs, mine = getattr(runtime, name), getattr(ours, name)
    made = {"SessionOptions": mine, "RunOptions": mine, "OrtMemoryInfo": mine}.get(name)
    for member in dir(theirs):
        if not member.startswith("_") and not (name in ENUMS and member in ("name", "value")):
            yield member, getattr(made() if made else mine, member), getattr(theirs, member)


def test_every_name_exists() -> None:
    assert [name for name in names() if not hasattr(ours, name)] == []
    assert set(names()) <= set(ours.__all__)


@pytest.mark.parametrize("name", classes())
def test_every_member_of_a_class_exists(name: str) -> None:
    if name in ("NodeArg", "ModelMetadata"):
        assert {member for member in dir(getattr(runtime, name)) if member[0] != "_"} <= set(dir(getattr(ours, name)))
    else:
        assert list(members(name)) or name == "IOBinding"


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return names, kinds and defaults of the parameters."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize("name", ["InferenceSession", "IOBinding", "OrtValue", "OrtDevice"])
def test_methods_have_the_peer_s_parameters(name: str) -> None:
    checked = 0
    for member, mine, theirs in [("__init__", getattr(ours, name), getattr(runtime, name)), *members(name)]:
        if (inspect.isfunction(theirs) or inspect.ismethod(theirs)) and member != "__init__":
            assert parameters(mine) == parameters(theirs), member
            checked += 1
    assert checked > 3
    if name == "InferenceSession":
        assert parameters(ours.InferenceSession) == parameters(runtime.InferenceSession)


@pytest.mark.parametrize("name", ["copy_tensors", "print_debug_info", "preload_dlls"])
def test_functions_have_the_peer_s_parameters(name: str) -> None:
    assert parameters(getattr(ours, name)) == parameters(getattr(runtime, name))


@pytest.mark.parametrize("name", ENUMS)
def test_enumerations_have_the_peer_s_values(name: str) -> None:
    theirs = getattr(runtime, name).__members__
    mine = getattr(ours, name).__members__
    assert {key: int(value) for key, value in mine.items()} == {key: int(value) for key, value in theirs.items()}
    assert sorted(map(str, mine.values())) == sorted(map(str, theirs.values()))


@pytest.mark.parametrize("name", ["SessionOptions", "RunOptions"])
def test_options_have_the_peer_s_attributes_and_defaults(name: str) -> None:
    mine, theirs = getattr(ours, name)(), getattr(runtime, name)()
    for member in dir(theirs):
        wanted = getattr(theirs, member)
        if not member.startswith("_") and not callable(wanted):
            assert str(getattr(mine, member)) == str(wanted), member
            setattr(mine, member, getattr(mine, member))
    with pytest.raises(AttributeError, match="no attribute 'threads'"):
        mine.threads = 3
    with pytest.raises(TypeError):
        mine.log_severity_level = "high"


def test_exceptions_have_the_peer_s_names_and_bases() -> None:
    theirs = runtime.capi.onnxruntime_pybind11_state
    found = {name for name in dir(theirs) if inspect.isclass(getattr(theirs, name))}
    exceptions = {name for name in found if issubclass(getattr(theirs, name), BaseException)}
    assert len(exceptions) > 10
    for name in exceptions:
        mine = getattr(ours.capi.onnxruntime_pybind11_state, name)
        bases = [[kind.__name__ for kind in found.__mro__] for found in (mine, getattr(theirs, name))]
        assert bases[0] == bases[1]


@pytest.mark.parametrize("name", UNAVAILABLE_CLASSES)
def test_what_is_not_available_says_why(name: str) -> None:
    refused = ours.onnxruntime_pybind11_state.NotImplemented
    with pytest.raises(refused, match=f"nnfmq has no {name}: .{{10}}"):
        getattr(ours, name)()
    for member in dir(getattr(runtime, name)):
        if not member.startswith("_"):
            with pytest.raises(refused, match=f"nnfmq has no {name}.{member}: "):
                getattr(getattr(ours, name), member)


def test_modules_that_are_not_available_say_why() -> None:
    for name in UNAVAILABLE_MODULES:
        with pytest.raises(NotImplementedError, match=name):
            getattr(ours, name)
    assert not hasattr(ours, "something_else")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ours.SessionOptions().set_ep_context_data_read_func(print, 1),
        lambda: ours.RunOptions().add_active_adapter(None),
        lambda: ours.register_execution_provider_library("x", "y"),
        lambda: ours.unregister_execution_provider_library("x"),
        lambda: ours.OrtValue.ort_value_from_sparse_tensor(None),
    ],
)
def test_calls_that_are_not_available_say_why(call: Any) -> None:
    with pytest.raises(ours.onnxruntime_pybind11_state.NotImplemented, match=r"nnfmq has no \w+"):
        call()


def test_the_functions_of_the_process_can_be_called() -> None:
    ours.set_default_logger_severity(3)
    ours.set_default_logger_verbosity(0)
    ours.set_seed(1)
    ours.disable_telemetry_events()
    assert ours.get_version_string() == ours.__version__ == runtime.__version__ or runtime.__version__ != "1.32.0"
    with pytest.raises(RuntimeError, match="severity"):
        ours.set_default_logger_severity(9)


def test_the_module_imports_neither_onnx_nor_onnx_runtime() -> None:
    code = "import sys, nnfmq.compat.onnxruntime; print([m for m in ('onnx', 'onnxruntime') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


WITHOUT_THE_PEER = """
import sys
sys.modules["onnxruntime"] = None
from nnfmq.compat.onnxruntime import InferenceSession
from nnfmq.compat.onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf, NoSuchFile
for model, kind in (("none.onnx", NoSuchFile), (b"no model", InvalidProtobuf)):
    try:
        InferenceSession(model)
    except kind as error:
        print(type(error).__module__, [base.__name__ for base in type(error).__mro__])
"""


def test_exceptions_have_the_peer_s_types_where_it_is_not_installed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_PEER], capture_output=True, text=True, check=True)
    module = "nnfmq.compat.onnxruntime.capi.onnxruntime_pybind11_state"
    theirs = runtime.capi.onnxruntime_pybind11_state
    bases = [[base.__name__ for base in kind.__mro__] for kind in (theirs.NoSuchFile, theirs.InvalidProtobuf)]
    assert done.stdout.splitlines() == [f"{module} {found}" for found in bases]
