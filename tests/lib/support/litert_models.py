"""Models run by LiteRT's reference kernels; the caller skips its tests if LiteRT is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def reference(litert: Any, content: bytes) -> Callable[[Array], list[Array]]:
    """Return a function that executes the .tflite file `content`, of one input, by `ai_edge_litert.interpreter`."""
    runner = litert.Interpreter(
        model_content=content, experimental_op_resolver_type=litert.OpResolverType.BUILTIN_REF, num_threads=1
    )
    runner.allocate_tensors()
    (source,) = runner.get_input_details()

    def run(values: Array) -> list[Array]:
        runner.set_tensor(source["index"], values)
        runner.invoke()
        return [np.array(runner.get_tensor(detail["index"])) for detail in runner.get_output_details()]

    return run
