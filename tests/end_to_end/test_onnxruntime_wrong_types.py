"""Arguments of wrong types: `nnfmq.compat.onnxruntime` raises ONNX Runtime's errors, and accepts what that does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, wait_for_closers
from support.onnx_runtime import runtime
from support.ort_scripts import FED, Script, X, session, symbolic_model

import nnfmq.compat.onnxruntime as ours


@pytest.fixture(autouse=True)
def _use_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    yield
    wait_for_closers()


def made(*arguments: Any, **options: Any) -> Script:
    return lambda ort: ort.InferenceSession(symbolic_model(), *arguments, **options)


def run(names: Any, **changed: Any) -> Script:
    return lambda ort: session(ort).run(names() if callable(names) else names, {**FED, **changed})


def bound(method: str, *arguments: Any) -> Script:
    return lambda ort: getattr(session(ort).io_binding(), method)(*arguments)


def with_options(method: str, *arguments: Any) -> Script:
    return lambda ort: getattr(ort.SessionOptions(), method)(*arguments)


CPU = "CPUExecutionProvider"
SCRIPTS: dict[str, Script] = {
    "options that are an empty dictionary": made({}),
    "options that are 0": made(0),
    "options that are a number": made(7),
    "options that are a dictionary": made({"intra_op_num_threads": 1}),
    "options of a run": lambda ort: made(ort.RunOptions())(ort),
    "providers that are a number": made(providers=7),
    "providers that are True": made(providers=True),
    "providers that are 0": made(providers=0),
    "providers that are a number, without a fallback": made(providers=7, enable_fallback=0),
    "providers that are a name, without a fallback": made(providers=CPU, enable_fallback=0),
    "providers that are a set, without a fallback": made(providers={CPU}, enable_fallback=0),
    "a provider that is a number, without a fallback": made(providers=[7], enable_fallback=0),
    "options of providers that are a number, without a fallback": made(None, [CPU], 7, enable_fallback=0),
    "a fallback that is None": made(enable_fallback=None),
    "other providers that are a number": lambda ort: session(ort).set_providers(7),
    "a model that is a list": lambda ort: ort.InferenceSession([]),
    "output names that are a number": run(7),
    "output names that are a text": run("z"),
    "output names that are numbers": run([7]),
    "output names that are bytes": run([b"z"]),
    "output names that are a tuple": run(("z",)),
    "output names that are a set": run({"z"}),
    "output names that are a dictionary": run({"z": 1}),
    "output names that are an iterator": run(lambda: iter(["z"])),
    "an input that is None": run(None, x=None),
    "an input that is a number": run(None, x=1.0),
    "an input that is a text": run(None, x="a"),
    "an input of texts": run(None, x=["a"]),
    "an input of lists of several lengths": run(None, x=[[1.0], [2.0, 3.0]]),
    "options of a run that are a dictionary": lambda ort: session(ort).run(None, FED, {}),
    "a callback that is a number": lambda ort: session(ort).run_async(None, FED, 7, None),
    "a bound input without a name": bound("bind_cpu_input", 7, X),
    "a bound input that is a list": bound("bind_cpu_input", "x", [1.0]),
    "a bound input of no device": bound("bind_input", "x", None, 0, np.float32, X.shape, X.ctypes.data),
    "a bound input of a device without a number": bound(
        "bind_input", "x", "cpu", "0", np.float32, X.shape, X.ctypes.data
    ),
    "a bound output without a name": bound("bind_output", None),
    "a bound output of a device that is a number": bound("bind_output", "z", 7),
    "a tensor of a device that is a number": lambda ort: ort.OrtValue.ortvalue_from_numpy(X, 7),
    "a size that is a text": with_options("add_free_dimension_override_by_name", "N", "1"),
    "a size that is None": with_options("add_free_dimension_override_by_name", "N", None),
    "an entry of a number": with_options("add_session_config_entry", 1, 2),
}  # fmt: skip


def outcome_of(script: Script, ort: Any) -> type[BaseException] | None:
    with redirect_stdout(StringIO()):
        try:
            script(ort)
        except Exception as error:  # noqa: BLE001  of any kind: it is compared
            return type(error) if type(error).__module__ == "builtins" else Exception
    return None


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_argument_of_another_type_has_the_outcome_that_it_has_with_onnx_runtime(name: str) -> None:
    assert outcome_of(SCRIPTS[name], ours) is outcome_of(SCRIPTS[name], runtime)


def test_options_that_are_an_empty_dictionary_are_the_defaults() -> None:
    found = ours.InferenceSession(symbolic_model(), {}).get_session_options()
    assert isinstance(found, ours.SessionOptions) and not found.has_providers()
