"""The four MobileNets with their golden inputs, through a worker process, over a burst, on each core and device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import app, running_daemon, short_folder

from nnfmq.queue import core

WHOLE_RUN_S = 120.0
FLOAT, QUANTIZED = "mobilenet_float", "mobilenet_quantized"
MODELS = [
    ("mobilenet_v1_0.25_128", FLOAT, "128", "0.25_128"),
    ("mobilenet_v1_0.25_128_quant", QUANTIZED, "128", "0.25_128"),
    ("mobilenet_v1_0.75_192_quant", QUANTIZED, "192", "0.75_192"),
    ("mobilenet_v2_1.0_224_quant", QUANTIZED, "224", "v2_1.0_224"),
]
CASES = {
    f"{model}-{image}": (f"{model}.tflite", f"{folder}/{image}_{size}.input", f"{folder}/{image}_{suffix}.output")
    for model, folder, size, suffix in MODELS
    for image in ("banana", "cup")
}

DEVICES = ("reference", *(["compiled"] if find_spec("llvmlite") is not None else []))
Results = Mapping[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module", params=["compiled", "python"])
def results(request: pytest.FixtureRequest, data_dir: Path) -> Results:
    """Return the results of all cases, with client and worker on the same core."""
    name: str = request.param
    if name not in core.CORES.available() and os.environ.get("NNFMQ_CORE") == "python":
        pytest.skip("the compiled core is not built, and $NNFMQ_CORE says that this is meant")
    environment = {"NNFMQ_CORE": name}
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=environment) as daemon:
        with app("golden", daemon.path, folder / "answers.npz", environment=environment) as client:
            for (key, (model, image, _)), device in product(CASES.items(), DEVICES):
                where = data_dir / "models"
                case = {"key": f"{device} {key}", "model": str(where / model), "input": str(where / image)}
                client.tell(json.dumps({**case, "device": device}))
            client.tell()
            assert client.line(WHOLE_RUN_S) == f"{name} {name}"
            assert (client.wait(), client.errors()) == (0, "")
        with np.load(folder / "answers.npz") as saved:
            return dict(saved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_a_mobilenet_returns_its_golden_output(data_dir: Path, results: Results, case: str, device: str) -> None:
    found = results[f"{device} {case}"]
    expected = np.fromfile(data_dir / "models" / CASES[case][2], found.dtype).reshape(found.shape)
    if case.startswith("mobilenet_v1_0.25_128-"):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    else:
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)
