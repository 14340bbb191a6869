"""LiteRT as the benchmark's baseline, in this process. It needs `ai-edge-litert`, of the extra `bench`.

LiteRT prints its own messages to stderr; nothing else of it is used than the interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nnfmq.mlts.backends import WITHOUT_CACHE, CompilationSteps, ModelRunner
from nnfmq.mlts.datasets import Array

NAME = "LiteRT"


def missing_reason() -> str:
    """Return why LiteRT cannot be measured; "" if it can."""
    try:
        _module()
    except ImportError as error:
        return f"LiteRT is not installed ({error}): pip install 'nnfmq[bench]'"
    return ""


def _module() -> Any:
    return importlib.import_module("ai_edge_litert.interpreter")


class _LiteRtRunner:
    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._input = interpreter.get_input_details()[0]["index"]
        self._output = interpreter.get_output_details()[0]["index"]

    def reset(self) -> None:
        self._interpreter.reset_all_variables()

    def set_input(self, array: Array) -> None:
        self._interpreter.set_tensor(self._input, array)

    def run(self) -> None:
        self._interpreter.invoke()

    def output(self) -> Array:
        found: Array = self._interpreter.get_tensor(self._output)  # a copy
        return found


class LiteRtBackend:
    """LiteRT on the CPU with its default kernels, or with its reference kernels, and a number of threads."""

    def __init__(self, threads: int, *, reference_kernels: bool = False) -> None:
        self._threads = threads
        self._reference_kernels = reference_kernels

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{NAME}, reference kernels" if self._reference_kernels else NAME

    def _interpreter(self, content: bytes) -> Any:
        litert = _module()
        resolvers = litert.OpResolverType
        resolver = resolvers.BUILTIN_REF if self._reference_kernels else resolvers.AUTO
        made = litert.Interpreter(
            model_content=content, num_threads=self._threads, experimental_op_resolver_type=resolver
        )
        made.allocate_tensors()
        return made

    @contextmanager
    def runner(self, path: Path) -> Iterator[ModelRunner]:
        """Load a model. Raises ValueError or RuntimeError, as LiteRT does."""
        yield _LiteRtRunner(self._interpreter(path.read_bytes()))

    @contextmanager
    def compilations(self, path: Path) -> Iterator[CompilationSteps]:
        """Return the only kind: creating an interpreter and allocating its tensors."""
        content = path.read_bytes()
        yield CompilationSteps({WITHOUT_CACHE: (lambda: None, lambda: self._discard(content))})

    def _discard(self, content: bytes) -> None:
        self._interpreter(content)

    def start(self, path: Path, array: Array) -> None:
        """Read a file, create an interpreter and execute it once."""
        runner = _LiteRtRunner(self._interpreter(path.read_bytes()))
        runner.set_input(array)
        runner.run()
        runner.output()
