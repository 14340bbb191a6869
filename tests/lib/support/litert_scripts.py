"""Pieces of scripts for LiteRT, which get its module, or nnfmq's, as `lite`; and how their outcomes are compared."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import nnfmq
from support.oracles import Array
from support.tflite_files import Tensor, single

Script = Callable[[Any], Any]
RNG = np.random.default_rng(11)
IMAGES = RNG.integers(-128, 128, (2, 8, 8, 1), np.int8)
INPUT, OUTPUT, WEIGHTS = 0, 6, 7
"""Tensors of the quantized digits."""


def made(lite: Any, model: Any = None, **options: Any) -> Any:
    """Return an interpreter, with tensors allocated; LiteRT's uses its reference kernels."""
    source = {"model_content": model} if isinstance(model, bytes) else {"model_path": model or digits()}
    found = lite.Interpreter(**source, experimental_op_resolver_type=lite.OpResolverType.BUILTIN_REF, **options)
    found.allocate_tensors()
    return found


def digits() -> str:
    """Return the path of the quantized digits."""
    return str(nnfmq.example_path("digits_quant.tflite"))


def classify(interpreter: Any, image: Array) -> Array:
    """Return the scores of one image."""
    interpreter.set_tensor(INPUT, image)
    interpreter.invoke()
    scores: Array = interpreter.get_tensor(OUTPUT)
    return scores


def adding() -> bytes:
    """Return a model that adds 1 and 2 to two INT64."""
    constant = Tensor("y", (2,), "INT64", data=np.array([1, 2], np.int64).tobytes())
    return single("ADD", [Tensor("x", (2,), "INT64"), constant, Tensor("z", (2,), "INT64")], "AddOptions", {})


def changed(script: str) -> str:
    """Return a script with its import of LiteRT changed."""
    imports = r"^(import|from) (?:(?:tflite_runtime|ai_edge_litert)\.interpreter|(tensorflow))\b"
    new, count = re.subn(
        imports, lambda found: f"{found[1]} nnfmq.compat.{found[2] or 'litert'}", script, flags=re.MULTILINE
    )
    assert count == 1
    return new


def printed(script: str, names: dict[str, Any] | None = None) -> str:
    """Return what a script prints; `names` gets its global variables."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(script, "script", "exec"), {} if names is None else names)
    return stdout.getvalue()


def add_other_names(monkeypatch: pytest.MonkeyPatch, litert: Any) -> None:
    """Have LiteRT under the names that it had in tflite_runtime and in TensorFlow."""
    for package, member in (("tflite_runtime", "interpreter"), ("tensorflow", "lite")):
        module = ModuleType(package)
        setattr(module, member, litert)
        monkeypatch.setitem(sys.modules, package, module)
        monkeypatch.setitem(sys.modules, f"{package}.{member}", litert)


def outcome(script: Script, lite: Any) -> Any:
    """Return what a script returns, or the class of what it raises."""
    try:
        return script(lite)
    except Exception as error:  # noqa: BLE001  any of them is compared
        return type(error)


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """Require equal values of equal types; floats within 1e-5 of the largest; an error of the wanted class."""
    if isinstance(wanted, type) and issubclass(wanted, Exception):
        assert isinstance(found, type) and issubclass(found, wanted), (where, found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), where
        scale = float(np.abs(wanted).max(initial=0)) if wanted.dtype.kind == "f" else 0
        np.testing.assert_allclose(found, wanted, 0, 1e-5 * scale, err_msg=where)
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted), (where, found, wanted)
        for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert_same(ours, theirs, f"{where}/{place}")
    else:
        assert type(found) is type(wanted) and found == wanted, (where, found, wanted)
