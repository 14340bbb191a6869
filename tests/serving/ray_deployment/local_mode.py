"""A program: a deployment in Ray Serve's local testing mode, without a cluster. Prints a report.

python local_mode.py
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import adopt_orphans, end_descendants, interrupt_on_sigterm
from support.cluster_load import version_model
from support.onnx_files import file_of
from support.onnx_runtime import onnx

from nnfmq.base.processes import descendants
from nnfmq.hal.errors import NnfmqError

VALUES = np.array([7, 2**40, 7, 2**40 + 1])
_UNIQUE = onnx.helper.make_node("Unique", ["values"], ["found"])  # which only a hosted runtime executes


def main() -> None:
    """Run it and print the report."""
    adopt_orphans()
    interrupt_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="nq-", ignore_cleanup_errors=True) as folder:
            os.environ["XDG_RUNTIME_DIR"] = folder
            report = run(Path(folder))
            end_descendants()  # first, because the drivers write into the folder
    finally:
        end_descendants()
    print(json.dumps(report))


def run(folder: Path) -> dict[str, Any]:
    """Return what handles of two applications give."""
    from ray import serve

    from nnfmq.serving.ray import app

    version = folder / "models" / "adder" / "3"
    version.mkdir(parents=True)
    (version / "model.tflite").write_bytes(version_model(3))
    directory = serve.run(app(folder / "models"), name="directory", route_prefix="/d", _local_testing_mode=True)
    models = {"adder/7": version_model(7), "unique/1": file_of([_UNIQUE], {"values": VALUES}, ["found"])}
    objects = serve.run(app(models), name="objects", route_prefix="/o", _local_testing_mode=True)
    (info,) = directory.model_metadata.remote("adder").result().inputs
    given = np.zeros(info.shape, info.dtype)

    def answer(handle: Any, *arguments: Any) -> Any:
        try:
            response = handle.infer.remote(*arguments).result()
        except NnfmqError as error:
            return type(error).__name__, str(error)
        (output,) = response.outputs.values()
        return response.version, output.ravel()[:1].tolist()

    async def twenty() -> list[str]:
        pending = [directory.infer.remote("adder", given) for _ in range(20)]
        return [(await response).version for response in pending]

    return {
        "mapping": answer(directory, "adder", {info.name: given}),
        "array": answer(directory, "adder", given),
        "objects": answer(objects, "adder", given),
        "hosted": objects.infer.remote("unique", VALUES).result().outputs["found"].tolist(),
        "concurrent": asyncio.run(twenty()),
        "unknown": answer(directory, "other", given),
        "count": answer(directory, "adder", given, given),
        "nameless": answer(directory, "", given),
        "shape": answer(directory, "adder", given[..., :1]),
        "drivers": len([pid for pid in descendants(os.getpid()) if is_supervisor(pid)]),
    }


def is_supervisor(pid: int) -> bool:
    """Return whether a process is `nnfmq serve`, and no worker of one."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return b"serve" in command and parent == os.getpid()


if __name__ == "__main__":
    main()
