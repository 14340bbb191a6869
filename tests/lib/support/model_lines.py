"""Files of test models made by hand: c = a + b of three floats, and ways to make it wrong."""

from __future__ import annotations

import base64
import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def floats(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def operand(name: str, lifetime: str, data: str | None, type: str = "TENSOR_FLOAT32", **more: Any) -> Line:
    return {
        "name": name, "type": type, "dimensions": [3], "scale": 0.0, "zeroPoint": 0, "numberOfConsumers": 1,
        "lifetime": lifetime, "extraParams": None, "isIgnored": False, "data": data, **more,
    }  # fmt: skip


def add(name: str = "add", expected: tuple[float, float, float] = (11.0, 22.0, 33.0)) -> Line:
    """Return the test model [1, 2, 3] + [10, 20, 30], which gives [11, 22, 33]."""
    operands = [
        operand("a", "SUBGRAPH_INPUT", floats(1, 2, 3)),
        operand("b", "CONSTANT_REFERENCE", floats(10, 20, 30)),
        operand("activation", "CONSTANT_COPY", base64.b64encode(bytes(4)).decode(), "INT32", dimensions=[]),
        operand("c", "SUBGRAPH_OUTPUT", floats(*expected)),
    ]
    main = {
        "name": None, "operands": operands, "operations": [{"type": "ADD", "inputs": [0, 1, 2], "outputs": [3]}],
        "inputIndexes": [0], "outputIndexes": [3],
    }  # fmt: skip
    return {
        "format": 1, "name": name, "spec": "made/add", "minSupportedVersion": "V1_0", "isRelaxed": False,
        "expectFailure": False, "expectedMultinomialDistributionTolerance": 0, "hasOemOrExtension": False,
        "main": main, "referenced": [],
    }  # fmt: skip


def changed(change: Callable[[Line], object]) -> Line:
    """Return `add` after a change of it."""
    line = copy.deepcopy(add())
    change(line)
    return line


def write(path: Path, *lines: Line | str) -> Path:
    """Write a file of test models; a text is written as it is."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
