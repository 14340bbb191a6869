"""Load, prepare and run mutated model files, and compare the results with LiteRT's or ONNX Runtime's.

    python3 tools/mutated_models.py tflite                 # 10,000 mutations of the models in the repository
    python3 tools/mutated_models.py onnx --count 500       # of the node tests of the package onnx
    python3 tools/mutated_models.py tflite --device compiled
    python3 tools/mutated_models.py tflite --folder DIR --json

A mutation changes one to four places of a file: a bit, a byte, a word, bytes copied from elsewhere, or the length. Each
side runs in a process of its own with limits of time and memory. A file is rejected, runs with an equal result, with a
different one, or where the peer fails, or exceeds a limit. If nnfmq's process exits, or raises anything but its own
errors, the exit status is 1. Different results are listed with the difference over the largest element: NaN in weights
has no defined maximum, the peers do not check what a file says of quantization, and rounding errors of layers add up.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peer_models import PeerModel, difference, litert, onnx_runtime

from nnfmq.lab.child_processes import BenchmarkFailed, ChildEnded, started_child

ROOT = Path(__file__).resolve().parent.parent
MODELS = [*ROOT.glob("nnfmq/data/*.tflite"), *ROOT.glob("docs/examples/data/*.tflite")]
LIMIT_S = 20.0
MEMORY_BYTES = 6 << 30
WORDS = (0, 1, 2, 3, 255, 1_000_000, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
TOLERANCE, TOLERANCE_OF_HALF_FLOATS = 1e-5, 1e-3  # of the largest element
Outcome = tuple[str, Any]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a file with one to four changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, kind = rng.randrange(len(changed)), rng.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            word = rng.choice(WORDS).to_bytes(4, "little")
            changed[at & ~3 : (at & ~3) + 4] = word[: len(changed) - (at & ~3)]
        elif kind == 3:
            source, count = rng.randrange(len(changed)), rng.randrange(1, 9)
            changed[at : at + count] = changed[source : source + count]
        elif at and rng.random() < 0.2:
            del changed[at:]
    return bytes(changed)


class Side:
    """A process that runs models: an engine of nnfmq or a peer. It is started again when it exits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        self._stack = ExitStack()
        self.process = self._stack.enter_context(started_child(_serve, self._name, name=self._name))

    def ask(self, *request: Any) -> Outcome:
        """Return what the process answers: "exit" if it exits, "limit" if it takes too long."""
        self.process.send(request)
        try:
            answer: Outcome = self.process.receive(LIMIT_S)
            return answer
        except ChildEnded:
            outcome = "exit"
        except BenchmarkFailed:
            outcome = "limit"
        self.close()
        self._start()
        return outcome, None

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self._stack.close()


def _serve(connection: Any, name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    run = SIDES[name]()
    while True:
        connection.send(run(*connection.recv()))


def nnfmq_side(device: str) -> Callable[[bytes], Outcome]:
    """Return a function whose outcomes are "ran" with inputs, outputs and resident memory, "rejected" and "error"."""
    from nnfmq.client.model.handle import initial_values
    from nnfmq.hal.errors import NnfmqError
    from nnfmq.importers import load
    from nnfmq.lab.conformance.targets import CompilingEngine, Interpreter
    from nnfmq.validation import validate_model

    warnings.simplefilter("error")
    engine = {"reference": Interpreter, "compiled": CompilingEngine}[device]()

    def run(content: bytes) -> Outcome:
        try:
            loaded = load(content)
            validate_model(loaded.model)
            inputs = [_random(info.shape, info.dtype) for info in loaded.inputs]
            states = list(initial_values(loaded.states))
            outputs = [np.zeros(info.shape, info.dtype) for info in loaded.outputs]
            with np.errstate(all="ignore"):
                program = engine.prepare(loaded.model)
                program.execute(
                    *([_stored(a) for a in part] for part in ((*inputs, *states), (*outputs, *map(np.copy, states))))
                )
        except NnfmqError as error:
            return "rejected", str(error)
        except Exception as error:  # noqa: BLE001  any other is what is looked for
            return "error", repr(error)
        return "ran", (inputs, outputs, _resident_bytes())

    return run


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _stored(array: Any) -> Any:
    return array.view(np.uint8) if array.dtype == bool else array


def _random(shape: Sequence[int], dtype: str) -> Any:
    kind, random_ = np.dtype(dtype), np.random.default_rng(1)
    if kind.kind == "f":
        return random_.uniform(-1, 1, shape).astype(kind)
    limits = (np.iinfo(kind).min, np.iinfo(kind).max) if kind.itemsize == 1 and kind.kind in "iu" else (0, 1)
    return random_.integers(*limits, shape, endpoint=True).astype(kind)


def peer_side(opened: Callable[[bytes], PeerModel], *, converts: bool) -> Callable[[bytes, list[Any]], Outcome]:
    """Return a function whose outcomes are "ran" with the peer's outputs, and "rejected" with its reason.

    `converts`: inputs get the shapes and types that the peer reads from the file.
    """

    def run(content: bytes, inputs: list[Any]) -> Outcome:
        try:
            model = opened(content)
            if converts:
                pairs = zip(inputs, model.inputs, strict=True)
                inputs = [array.reshape(shape).astype(dtype) for array, (_, shape, dtype) in pairs]
            return "ran", model.run(inputs)
        except Exception as error:  # noqa: BLE001  the peers raise errors of any type
            return "rejected", str(error)

    return run


def compared(found: Sequence[Any], expected: Sequence[Any]) -> Outcome:
    """Return "equal" or "different", and the difference."""
    size = difference(found, expected)
    limit = max((_tolerance(array.dtype) for array in expected), default=0.0)
    return ("equal" if size <= limit else "different"), f"{size:.1e}"


def _tolerance(kind: np.dtype[Any]) -> float:
    if kind.kind != "f":
        return 0.0
    return TOLERANCE_OF_HALF_FLOATS if kind.itemsize == 2 else TOLERANCE


def onnx_models() -> Iterator[bytes]:
    """Yield the small models of the node tests of the package onnx."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.random.seed(1)  # the package's cases use the global generator
        for case in collect_testcases(None):
            content = case.model.SerializeToString() if case.model is not None else b""
            if 0 < len(content) < 20_000:
                yield content


SIDES: dict[str, Callable[[], Callable[..., Outcome]]] = {
    "compiled": partial(nnfmq_side, "compiled"),
    "reference": partial(nnfmq_side, "reference"),
    "litert": partial(peer_side, partial(litert, is_reference=True), converts=True),
    "onnxruntime": partial(peer_side, partial(onnx_runtime, is_optimized=True), converts=False),
}


def main() -> int:
    """Run the mutations and print the counts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=("tflite", "onnx"))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="mutate the models of a folder")
    parser.add_argument("--device", choices=("compiled", "reference"), default="reference", help="nnfmq's engine")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.rglob(f"*.{arguments.format}")) if arguments.folder else MODELS
    is_onnx = arguments.format == "onnx"
    models = list(onnx_models()) if is_onnx and not arguments.folder else [path.read_bytes() for path in paths]
    if not models:
        parser.error(f"{arguments.folder} has no .{arguments.format} file")
    result = mutate(models, arguments.count, arguments.seed, arguments.device, "onnxruntime" if is_onnx else "litert")
    if arguments.json:
        print(json.dumps(result))
    else:
        print(", ".join(f"{count:,} {name}" for name, count in result["counts"].items()))
        print("resident memory after a tenth and at the end: {} and {} MiB".format(*result["resident_mib"]))
        print("\n".join(f"{name}: {text}" for name, text in result["details"]))
    return 1 if result["counts"].keys() & {"error", "exit"} else 0


def mutate(models: Sequence[bytes], count: int, seed: int, device: str, peer: str) -> dict[str, Any]:
    """Return how often each outcome occurred, nnfmq's memory, and the outcomes that a person should see."""
    rng, counts, details = random.Random(seed), Counter[str](), []
    sizes = [0, 0]
    ours, theirs = Side(device), Side(peer)
    for number in range(count):
        content = mutated(rng.choice(models), rng)
        outcome, value = ours.ask(content)
        if outcome == "ran":
            inputs, outputs, size = value
            sizes = [size if number < count // 10 else sizes[0], size]
            kind, expected = theirs.ask(content, inputs)
            outcome, value = compared(outputs, expected) if kind == "ran" else ("peer fails", "")
        counts[outcome] += 1
        if outcome in ("different", "error", "exit", "limit"):
            details.append((outcome, f"mutation {number} of seed {seed}: {value}"))
        if sys.stderr.isatty() and number % 100 == 0:
            print(f"\r{number:,} of {count:,}", end="", file=sys.stderr, flush=True)
    for side in (ours, theirs):
        side.close()
    return {"counts": dict(counts), "resident_mib": [size >> 20 for size in sizes], "details": details}


if __name__ == "__main__":
    import mutated_models  # by its name, by which child processes import it

    sys.exit(mutated_models.main())
