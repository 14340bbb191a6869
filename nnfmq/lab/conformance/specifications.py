"""Extraction of test models from a checkout of Android's NeuralNetworks module, whose specifications are programs.

A specification (`runtime/test/specs/VERSION/NAME.mod.py`) runs with the checkout's own `test_generator`, which makes
the test models and their variations; here each becomes a line of the format that `testmodels` reads. The checkout is
executed, so it must be trusted as any program that one runs. Each specification runs in a process of its own, because
the generator keeps its state in classes.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import sys
import traceback
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from fractions import Fraction
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nnfmq.lab.child_processes import ChildEnded, call_in_child
from nnfmq.lab.conformance.testmodels import DTYPES, FORMAT, FormatError, Line

__all__ = ["Extracted", "extract", "extract_all", "find_specifications"]

_GENERATOR = Path("tools/test_generator")
_SPECIFICATIONS = Path("runtime/test/specs")
_ENDING = ".mod.py"
_UNTESTED_FOLDERS = ("experimental",)
_CONSTANTS = ("CONSTANT_COPY", "CONSTANT_REFERENCE")
_BUFFERS = ("SUBGRAPH_INPUT", "SUBGRAPH_OUTPUT")


def find_specifications(checkout: Path) -> list[Path]:
    """Return the specifications of a checkout, in the order of their names.

    Raises:
        FormatError: If the folder is no checkout of the module, or of one without specifications.
    """
    folder = checkout / _SPECIFICATIONS
    found = [path for path in sorted(folder.glob(f"*/*{_ENDING}")) if path.parent.name not in _UNTESTED_FOLDERS]
    if not found or not (checkout / _GENERATOR / "test_generator.py").is_file():
        raise FormatError(
            f"{checkout}: no checkout of Android's NeuralNetworks module (packages/modules/NeuralNetworks), which has "
            f"{_GENERATOR}/test_generator.py and {_SPECIFICATIONS}/*/*{_ENDING}"
        )
    return found


class Extracted(NamedTuple):
    """The result of a specification: the number of its test models, or why it failed."""

    specification: Path
    models: int
    reason: str = ""


def extract_all(checkout: Path, folder: Path, jobs: int) -> Generator[Extracted, None, None]:
    """Write the test models of all specifications below `folder`, and yield each outcome. Blocks.

    Up to `jobs` processes run at the same time. An iterator that is closed starts no further one.

    Raises:
        FormatError: As `find_specifications`.
    """
    specifications = find_specifications(checkout)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(partial(_extract_in_process, checkout, folder), specifications)
        finally:
            pool.shutdown(cancel_futures=True)


def _extract_in_process(checkout: Path, folder: Path, specification: Path) -> Extracted:
    try:
        outcome: int | str = call_in_child(_models_or_reason, checkout, specification, folder, limit_s=math.inf)
    except ChildEnded as ended:
        outcome = f"its process ended with status {ended.status}"
    return Extracted(specification, 0, outcome) if isinstance(outcome, str) else Extracted(specification, outcome)


def _models_or_reason(checkout: Path, specification: Path, folder: Path) -> int | str:
    """Return the number of models, or the reason why there are none. What the specification prints is dropped."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            return extract(checkout, specification, folder)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the checkout's code raises is the reason
            return traceback.format_exception_only(error)[-1].strip()


def extract(checkout: Path, specification: Path, folder: Path) -> int:
    """Write the test models of one specification to `folder`/VERSION/NAME.jsonl.gz; return their number. Blocks.

    Runs the checkout's code in this process: call it in a process that runs one specification and ends.
    """
    version, name = specification.parent.name, specification.name.removesuffix(_ENDING)
    lines = list(_lines(checkout.resolve(), specification.resolve(), f"{version}/{name}"))
    target = folder / version / f"{name}.jsonl.gz"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    unfinished = target.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(gzip.compress(text.encode("ascii"), mtime=0))
    unfinished.replace(target)
    return len(lines)


def _lines(checkout: Path, specification: Path, spec: str) -> Iterator[Line]:
    """Yield the lines of a specification, in the generator's order."""
    sys.path.insert(0, str(checkout / _GENERATOR))
    import test_generator as generator  # type: ignore[import-not-found]

    generator.FileNames.InitializeFileLists(str(specification), "-")
    generator.FileNames.NextFile()
    lines: list[Line] = []

    def keep(example: Any, _file: Any) -> None:
        lines.append(_line(generator, example, spec))

    exec(compile(specification.read_bytes(), str(specification), "exec"), generator.GetExecScope())
    generator.Example.DumpAllExamples(DumpExample=keep, example_fd=sys.stdout)
    yield from lines


def _line(generator: Any, example: Any, spec: str) -> Line:
    model = example.model
    return {
        "format": FORMAT,
        "name": str(example.testName),
        "spec": spec,
        "minSupportedVersion": model.version or "UNKNOWN",
        "isRelaxed": bool(model.isRelaxed),
        "expectFailure": bool(example.expectFailure),
        "expectedMultinomialDistributionTolerance": float(np.float32(example.expectedMultinomialDistributionTolerance)),
        "hasOemOrExtension": any("OEM" in operand.type.type for operand in model.operands),
        "main": _subgraph(generator, model, is_main=True),
        "referenced": [_subgraph(generator, each, is_main=False) for each in model.GetReferencedModels()],
    }


def _subgraph(generator: Any, model: Any, *, is_main: bool) -> Line:
    return {
        "name": model.name,
        "operands": [_operand(generator, operand, is_main) for operand in model.operands],
        "operations": [
            {
                "type": operation.optype,
                "inputs": [operand.model_index for operand in operation.ins],
                "outputs": [operand.model_index for operand in operation.outs],
            }
            for operation in model.operations
        ],
        "inputIndexes": [operand.model_index for operand in model.GetInputs()],
        "outputIndexes": [operand.model_index for operand in model.GetOutputs()],
    }


def _operand(generator: Any, operand: Any, is_main: bool) -> Line:
    kind = operand.type
    return {
        "name": operand.name,
        "type": kind.type,
        "dimensions": [int(extent) for extent in kind.dimensions],
        "scale": float(np.float32(kind.scale)),
        "zeroPoint": int(kind.zeroPoint),
        "numberOfConsumers": len(operand.outs),
        "lifetime": operand.lifetime,
        "extraParams": _extra_parameters(kind),
        "isIgnored": isinstance(operand, generator.IgnoredOutput),
        "data": _data(operand, is_main),
    }


def _extra_parameters(kind: Any) -> Line | None:
    extra = kind.extraParams
    if kind.type != "TENSOR_QUANT8_SYMM_PER_CHANNEL" or extra is None or extra.hide:
        return None
    scales = [float(np.float32(scale)) for scale in extra.scales]
    return {"channelQuant": {"scales": scales, "channelDim": int(extra.channelDim)}}


def _data(operand: Any, is_main: bool) -> str | None:
    if operand.lifetime == "SUBGRAPH":
        return _encoded(np.array(operand.value, "<u4"))
    if operand.lifetime not in (*_CONSTANTS, *(_BUFFERS if is_main else ())):
        return None
    values, dtype = operand.value or [], DTYPES[operand.type.type]
    if dtype == "<f4":
        return _encoded(np.array([_float32(value) for value in values], "<f4"))
    if dtype == "<f2":
        return _encoded(np.array([_float32(value) for value in values], "<f4").astype("<f2"))
    if operand.type.IsBool():
        return _encoded(np.array([bool(value) for value in values], "u1"))
    return _encoded(np.array([int(value) for value in values], np.int64).astype(dtype))


def _float32(value: Any) -> np.float32:
    """Return the float32 nearest to the shortest decimal text of `value`, ties to even: one rounding, as C++ rounds.

    NumPy rounds the nearest float64, which differs if that is halfway between two floats and the text does not.
    """
    number = float(value)
    rounded = np.float32(number)
    exact, error = Fraction(repr(number)), Fraction(number)
    if exact == error:
        return rounded
    neighbours = [rounded, *(np.nextafter(rounded, np.float32(limit)) for limit in (np.inf, -np.inf))]
    distances = [abs(Fraction(float(each)) - exact) for each in neighbours]
    return np.float32(neighbours[distances.index(min(distances))])


def _encoded(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
