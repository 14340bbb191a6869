"""Operations that ONNX has in the HAL's meaning, on random shapes and parameters, against ONNX Runtime.

The cases are in `support.onnx_cases`; where the two differ, a case's builder says how it keeps to what they share.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.onnx_cases import CASES
from support.oracles import Builder, Draw, assert_same

SEEDS = range(6)
TYPED = [(name, dtype, build) for name, types, build in CASES for dtype in types]


def label(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "dtype", "build"), TYPED, ids=label)
def test_an_operation_is_onnx_runtime_s(name: str, dtype: str, build: Builder, seed: int) -> None:
    assert_same(build(Draw(name, seed, dtype)))


def test_onnx_runtime_brings_no_thread_and_opens_no_file() -> None:
    """This process has imported it before the fixture that compares looks first, so a separate process imports it."""
    look = "sorted(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd'))"
    code = f"import os, numpy; before = {look}; import onnxruntime; raise SystemExit(before != ({look}))"

    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=dict(os.environ), timeout=60)
