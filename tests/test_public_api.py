"""The public names: which they are, that each is documented and typed, and what importing them costs."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nnfmq
from nnfmq.hal import errors

_AGREED = [
    "BadState",
    "Buffer",
    "Burst",
    "BurstPool",
    "ClassScore",
    "Client",
    "CompiledModel",
    "DeadObject",
    "Device",
    "DeviceInfo",
    "DeviceUnavailable",
    "ErrorStatus",
    "Execution",
    "ExecutionInfo",
    "ExecutionPreference",
    "Fence",
    "FenceState",
    "FencedExecution",
    "FileMemory",
    "GeneralFailure",
    "InvalidArgument",
    "LoadedModel",
    "Memory",
    "MissedDeadline",
    "MissedDeadlinePersistent",
    "MissedDeadlineTransient",
    "ModelBuilder",
    "ModelBurst",
    "ModelMetadata",
    "NnfmqError",
    "OutputInsufficientSize",
    "Outputs",
    "PendingExecution",
    "PreparedModel",
    "ProtocolError",
    "QueueCorrupted",
    "ResourceExhausted",
    "ResourceExhaustedPersistent",
    "ResourceExhaustedTransient",
    "Runtime",
    "RuntimeDevice",
    "ServedModel",
    "StateInfo",
    "TensorInfo",
    "TensorMetadata",
    "__version__",
    "allocate",
    "connect",
    "copy",
    "example_path",
    "load",
    "read_audio",
    "read_labels",
    "read_photo",
    "run",
    "top_classes",
]
NAMES = sorted({*_AGREED, *errors.__all__})  # a new error is public as soon as it is defined
HEAVY = ["rich", "tflite", "PIL", "multiprocess", "dill", "posix_ipc", "socketserver", "asyncio", "http"]
IMPORT_BUDGET_MS = 50


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every public function, and every public method that the package itself defines."""
    for name in NAMES:
        value = getattr(nnfmq, name, None)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            yield from ((f"{name}.{method}", function) for method, function in public_methods(value))


def public_methods(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(owner).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


def in_a_new_python(code: str, cwd: Path) -> Any:
    """Run `code` outside this repository, bytecode cached in `cwd`, and return what it printed, as JSON."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cwd / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_the_public_names_are_as_agreed() -> None:
    assert list(nnfmq.__all__) == NAMES


def test_the_public_names_are_sorted() -> None:
    assert sorted(nnfmq.__all__) == list(nnfmq.__all__)


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in NAMES if not hasattr(nnfmq, name)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name: str) -> None:
    doc = (getattr(nnfmq, name).__doc__ or "").strip()
    assert doc
    assert not doc.startswith(f"{name}("), "this is what dataclasses write themselves"


@pytest.mark.parametrize(("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in public_callables()])
def test_a_public_function_is_documented_and_typed(name: str, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    assert (function.__doc__ or "").strip(), f"{name} has no docstring"
    assert [parameter.name for parameter in parameters if parameter.annotation is parameter.empty] == []
    assert signature.return_annotation is not signature.empty


def test_the_version_is_that_of_the_installed_package() -> None:
    assert nnfmq.__version__ == importlib.metadata.version("nnfmq")


def test_importing_nnfmq_loads_no_heavy_module(tmp_path: Path) -> None:
    loaded = in_a_new_python("import json, sys, nnfmq; print(json.dumps(list(sys.modules)))", tmp_path)
    assert [name for name in HEAVY if name in loaded] == []


def test_importing_nnfmq_loads_neither_numpy_nor_client_modules(tmp_path: Path) -> None:
    loaded = in_a_new_python("import json, sys, nnfmq; print(json.dumps(list(sys.modules)))", tmp_path)
    assert [name for name in ("numpy", "msgspec", "nnfmq.base.channel", "nnfmq.client") if name in loaded] == []


def test_a_client_that_loads_and_executes_a_model_imports_nothing_of_the_driver(tmp_path: Path) -> None:
    """Every application has these modules in its memory."""
    code = (
        "import json, sys, nnfmq; nnfmq.load(nnfmq.example_path('digits.tflite'));"
        "nnfmq.connect, nnfmq.Burst, nnfmq.PreparedModel; print(json.dumps(list(sys.modules)))"
    )
    loaded = in_a_new_python(code, tmp_path)
    unwanted = [f"nnfmq.{part}" for part in ("operations", "engines", "driver")]
    unwanted += ["zipfile", "html", "shutil", "subprocess", "numpy.ma", "nnfmq.observe.executions"]
    assert [name for name in unwanted if name in loaded] == []


def test_a_first_result_imports_neither_queues_nor_what_describes_the_machine(tmp_path: Path) -> None:
    """They take a tenth of a start's imports. `execute` makes a burst of its own later."""
    code = (
        "import json, sys, numpy as np, nnfmq\n"
        "with nnfmq.connect(embedded=True) as client:\n"
        "    model = client.device('reference').prepare(nnfmq.example_path('digits.tflite'))\n"
        "    model.execute(np.zeros((1, 8, 8, 1), np.float32))\n"
        "    print(json.dumps(list(sys.modules)))"
    )
    loaded = in_a_new_python(code, tmp_path)
    assert [name for name in ("nnfmq.queue", "nnfmq.client.burst", "nnfmq.base.conditions") if name in loaded] == []


@pytest.mark.parametrize("module", ["litert", "onnxruntime"])
def test_importing_another_runtime_s_interface_loads_only_what_starts_a_driver(module: str, tmp_path: Path) -> None:
    code = f"import json, sys, nnfmq.compat.{module}; print(json.dumps(list(sys.modules)))"
    loaded = in_a_new_python(code, tmp_path)
    unwanted = ("msgspec", "onnx", "nnfmq.importers", "nnfmq.client.connection.client", "subprocess")
    assert [name for name in unwanted if name in loaded] == []


def test_a_ported_script_starts_the_driver_before_it_imports_the_client_and_the_importer(tmp_path: Path) -> None:
    code = """
import json, subprocess, sys
events = []
class Imports:
    def find_spec(self, name, path=None, target=None):
        events.append(name)
class Starts(subprocess.Popen):
    def __init__(self, *arguments, **options):
        events.append("driver")
        super().__init__(*arguments, **options)
subprocess.Popen = Starts
sys.meta_path.insert(0, Imports())
from pathlib import Path
import nnfmq.compat.litert
Interpreter = nnfmq.compat.litert.Interpreter
interpreter = Interpreter(str(Path(nnfmq.__file__).parent / "data" / "digits.tflite"))
print(json.dumps(events))
"""
    events = in_a_new_python(code, tmp_path)
    for later in ("nnfmq.client.connection.client", "nnfmq.importers", "nnfmq.importers.tflite.model"):
        assert events.index("driver") < events.index(later), later


def test_dir_lists_names_before_their_import_and_unknown_names_raise(tmp_path: Path) -> None:
    code = "import json, nnfmq; print(json.dumps([dir(nnfmq), hasattr(nnfmq, 'nothing')]))"
    listed, has_nothing = in_a_new_python(code, tmp_path)
    assert set(NAMES) <= set(listed)
    assert not has_nothing


def test_a_name_that_is_almost_right_gets_the_right_one_in_the_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import nnfmq; nnfmq.conect"], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert b"has no attribute 'conect'. Did you mean: 'connect'?" in done.stderr


def test_importing_nnfmq_takes_little_longer_than_numpy(tmp_path: Path) -> None:
    code = (
        "import numpy, time; begin = time.thread_time_ns(); import nnfmq;print((time.thread_time_ns() - begin) / 1e6)"
    )
    fastest_ms = min(in_a_new_python(code, tmp_path) for _ in range(4))  # the first one compiles
    assert fastest_ms <= IMPORT_BUDGET_MS
