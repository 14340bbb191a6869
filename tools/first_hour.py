"""Record what a new user waits for: `tools/first_hour.py MODEL.tflite ... [--json FILE] [--page FILE]`.

In an empty folder, with an empty home and empty caches, this clones the repository (HEAD), and follows the README's
install, demo and snippet. Then it runs two scripts for each model, one written for LiteRT and one for ONNX Runtime (the
model is converted), each with its own runtime and with the import changed to nnfmq's. A script loads the model and
executes it 20 times; nnfmq's runs twice, since the first run compiles the model. Printed are the milliseconds from the
start of the process to the first result and to its end, the time of an execution at the end of the script, the largest
difference from the other runtime's values (in steps of quantized ones, else relative to the largest), and the parts
of the script. `--page` writes the tables into a page, docs/explanation/first-hour.md; without a model those of the
record in the `--json` file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_support import markdown_table, replaced
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("ai-edge-litert>=2", "onnxruntime>=1.20", "onnx>=1.17")
EXECUTIONS = 20
MARK = "first hour: "
BEGIN = "<!-- written by tools/first_hour.py -->"

LITERT = """
from {module} import Interpreter

times["import"] = time.monotonic_ns()
interpreter = Interpreter(sys.argv[1], num_threads=1)
interpreter.allocate_tensors()
times["load"] = time.monotonic_ns()
given, made = interpreter.get_input_details(), interpreter.get_output_details()[0]
data = [example(one["shape"], one["dtype"]) for one in given]
for _ in range(executions):
    for one, array in zip(given, data):
        interpreter.set_tensor(one["index"], array)
    interpreter.invoke()
    result = interpreter.get_tensor(made["index"])
    ends.append(time.monotonic_ns())
"""

ONNX_RUNTIME = """
import {module} as ort

times["import"] = time.monotonic_ns()
session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
times["load"] = time.monotonic_ns()
dtypes = {{"tensor(float)": "float32", "tensor(uint8)": "uint8"}}
data = {{one.name: example(one.shape, dtypes[one.type]) for one in session.get_inputs()}}
for _ in range(executions):
    result, *_ = session.run(None, data)
    ends.append(time.monotonic_ns())
"""

PROLOGUE = """
import json, sys, time
executions, times, ends = int(sys.argv[2]), {}, []
import numpy as np

times["Python and NumPy"] = time.monotonic_ns()

def example(shape, dtype):
    return np.random.default_rng(1).integers(0, 256, [int(n) for n in shape]).astype(dtype)
"""

EPILOGUE = """
print({mark!r} + json.dumps([times, ends, np.asarray(result, float).ravel().tolist()]))
"""

SCRIPTS = {
    "LiteRT": (LITERT, "ai_edge_litert.interpreter", "nnfmq.compat.litert"),
    "ONNX Runtime": (ONNX_RUNTIME, "onnxruntime", "nnfmq.compat.onnxruntime"),
}
"""A script, the module that its runtime is imported from, and nnfmq's module."""


def main(argv: Sequence[str] | None = None) -> int:
    """Record, print and write; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("models", metavar="MODEL", type=Path, nargs="*", help="a .tflite file")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the record as JSON; read it without a MODEL")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the tables between the markers of this page")
    arguments = parser.parse_args(argv)
    if not arguments.models and arguments.json is None:
        parser.error("give a model, or --json with a record")
    record = _recorded(arguments.models) if arguments.models else json.loads(arguments.json.read_text())
    _print(record)
    if arguments.models and arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.page is not None:
        arguments.page.write_text(replaced(arguments.page.read_text(), page_text(record), BEGIN))
    return 0


def _recorded(models: Sequence[Path]) -> dict[str, Any]:
    """Return the record of the README's commands, and of the scripts with these models."""
    with tempfile.TemporaryDirectory() as folder:
        place = _Place(Path(folder))
        record: dict[str, Any] = {"steps": list(_first_steps(place)), "scripts": []}
        for model in models:
            record["scripts"] += _scripts(place, model.resolve())
    return record


class _Place:
    """An empty folder with a home and caches of its own, in which commands run."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "nnfmq"
        self.folder = folder
        (folder / "home").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NNFMQ_", "PYTHON", "XDG_"))}
        self._environment = {**kept, "HOME": str(folder / "home"), "TMPDIR": str(folder)}

    def run(self, command: Sequence[str] | str, cwd: Path | None = None) -> tuple[float, str, str]:
        """Run a command to its end; return the seconds, and what it printed on stdout and stderr.

        Raises:
            RuntimeError: If it fails; the message has its last lines.
        """
        began = time.monotonic()
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else command,
            cwd=cwd or self.clone,
            env=self._environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"{command}: status {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
        return time.monotonic() - began, ended.stdout, ended.stderr


def _first_steps(place: _Place) -> Iterator[dict[str, Any]]:
    """Yield the duration and the output of the README's first commands and its snippet."""
    readme = (ROOT / "README.md").read_text()
    place.run(["git", "clone", "--quiet", str(ROOT), str(place.clone)], cwd=place.folder)
    for title in ("install", "session"):
        block = re.search(rf"<!-- ci: {title} -->\n```\w+\n(.*?)```", readme, re.DOTALL)
        assert block is not None, title
        command: str | list[str] = block[1] if title == "install" else [".venv/bin/python", "-c", block[1]]
        seconds, output, errors = place.run(command)
        yield {"step": "README, " + title, "seconds": seconds, "output": output[-2000:], "stderr": errors[-2000:]}
    place.run([".venv/bin/pip", "install", "--quiet", *PEERS])


def _scripts(place: _Place, model: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of a script."""
    exported = place.folder / f"{model.stem}.onnx"
    place.run([".venv/bin/python", "tools/tflite_to_onnx.py", str(model), str(exported)])
    for runtime, (script, theirs, ours) in SCRIPTS.items():
        path = exported if runtime == "ONNX Runtime" else model
        expected = None
        for title, module in ((runtime, theirs), (runtime, theirs), ("nnfmq", ours), ("nnfmq", ours)):
            row, result = _measured(place, script.format(module=module), path)
            expected = expected or result
            distance = max(abs(a - b) for a, b in zip(result, expected, strict=True))
            unit = max(map(abs, expected)) if any(value != int(value) for value in expected) else 1.0
            yield {"model": model.stem, "script": runtime, "import": title, **row, "difference": distance / unit}


def _measured(place: _Place, script: str, model: Path) -> tuple[dict[str, Any], list[float]]:
    """Return the times of one run of a script, in seconds, and its result."""
    text = PROLOGUE + script + EPILOGUE.format(mark=MARK)
    began_ns = time.monotonic_ns()
    seconds, output, errors = place.run([".venv/bin/python", "-c", text, str(model), str(EXECUTIONS)])
    times, ends, result = json.loads(output.partition(MARK)[2])
    last = [b - a for a, b in zip(ends[-6:], ends[-5:], strict=False)]
    reached = {**times, "first execution": ends[0], f"{EXECUTIONS - 1} executions": ends[-1]}
    return {
        "first_result_s": (ends[0] - began_ns) / 1e9,
        "whole_s": seconds,
        "execution_s": statistics.median(last) / 1e9,
        "parts_s": dict(zip(reached, (x / 1e9 for x in np.diff([began_ns, *reached.values()])), strict=True)),
        "stderr": errors[-2000:],
    }, result


def page_text(record: Mapping[str, Any]) -> str:
    """Return the tables of a record as Markdown: the README's commands, whole scripts, and parts of the second runs."""
    steps = [[step["step"], f"{step['seconds']:.1f}"] for step in record["steps"]]
    whole, parts, names = [], [], [*record["scripts"][0]["parts_s"], "exit"]
    for *theirs, first, second in _groups(record["scripts"]):
        peer_s = statistics.mean(row["whole_s"] for row in theirs)
        numbers = (peer_s, first["whole_s"], second["whole_s"])
        title = [first["model"], first["script"]]
        whole.append([*title, *(f"{s * 1e3:,.0f}" for s in numbers), f"**{second['whole_s'] / peer_s:.2f}**"])
        for row in (theirs[-1], second):
            spent = [*row["parts_s"].values(), row["whole_s"] - sum(row["parts_s"].values())]
            parts.append([row["model"], row["script"], row["import"], *(f"{s * 1e3:,.0f}" for s in spent)])
    return "\n".join([
        markdown_table(("README", ">seconds"), steps),
        markdown_table(("model", "script", ">its runtime, ms", ">nnfmq, first run", ">second run", ">ratio"), whole),
        markdown_table(("model", "script", "import", *(f">{name}, ms" for name in names)), parts),
    ])  # fmt: skip


def _groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the runs of each script with each model: two of its own runtime, then nnfmq's first and second one."""
    for _, found in itertools.groupby(rows, lambda row: (row["model"], row["script"])):
        yield list(found)


def _print(record: Mapping[str, Any]) -> None:
    console = Console(width=120)
    for step in record["steps"]:
        console.print(f"{step['step']}: {step['seconds']:.1f} s", highlight=False)
        print("".join(f"    {line}\n" for line in step["output"].splitlines()[-8:]), end="")
    table = Table("model", "script", "import", "first result, ms", "whole script, ms", "an execution, ms", "difference")
    for row in record["scripts"]:
        numbers = (f"{row[name] * 1e3:,.1f}" for name in ("first_result_s", "whole_s", "execution_s"))
        table.add_row(row["model"], row["script"], row["import"], *numbers, f"{row['difference']:.1e}")
    console.print(table)
    names = list(record["scripts"][0]["parts_s"]) if record["scripts"] else []
    table = Table("model", "import", *(f"{name}, ms" for name in names), "exit, ms")
    for row in record["scripts"]:
        parts = [*row["parts_s"].values(), row["whole_s"] - sum(row["parts_s"].values())]
        table.add_row(row["model"], row["import"], *(f"{part * 1e3:,.0f}" for part in parts))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
