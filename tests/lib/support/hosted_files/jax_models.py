"""Write files of jax.export, with inputs and what JAX computes in this process with one thread."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["NPROC"] = "1"

import numpy as np

jax: Any = import_module("jax")
export: Any = import_module("jax.export")
jnp = jax.numpy
FOLDER = Path(sys.argv[1])
RANDOM = np.random.default_rng(1)


def floats(*shape: int) -> Any:
    return (RANDOM.standard_normal(shape) / 4).astype(np.float32)


def write(name: str, function: Any, *cases: tuple[Any, ...], shapes: Any = None) -> None:
    """Export a function of arrays; `shapes` are those of its inputs, if they are open."""
    jitted = jax.jit(function)
    given = shapes or [np.shape(array) for array in cases[0]]
    types = [jax.ShapeDtypeStruct(shape, np.asarray(array).dtype) for shape, array in zip(given, cases[0], strict=True)]
    (FOLDER / f"{name}.jax").write_bytes(export.export(jitted)(*types).serialize())
    for number, inputs in enumerate(cases):
        found = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(jitted(*inputs))]
        arrays = {f"in{i}": words(array) for i, array in enumerate(inputs)}
        np.savez(FOLDER / f"{name}{number or ''}.npz", **arrays, **{f"out{i}": words(a) for i, a in enumerate(found)})


def words(array: Any) -> Any:
    array = np.asarray(array)
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


def vision() -> None:
    first, second, last = floats(3, 3, 3, 8), floats(3, 3, 8, 8), floats(8, 5)

    def convolve(x: Any, weights: Any, stride: int) -> Any:
        return jax.lax.conv_general_dilated(
            x, weights, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def net(image: Any) -> Any:
        x = jax.nn.relu(convolve(image, first, 2))
        x = jax.nn.relu(x + convolve(x, second, 1))
        return jax.nn.softmax(x.mean((1, 2)) @ last)

    write("vision", net, (floats(1, 16, 16, 3),))


def transformer(name: str) -> None:
    """Attention over embeddings of tokens; batch and length are open."""
    table, q, k, v = floats(50, 16), floats(16, 16), floats(16, 16), floats(16, 16)

    def net(tokens: Any) -> Any:
        x = jnp.asarray(table)[tokens]
        weights = jax.nn.softmax(x @ q @ (x @ k).swapaxes(1, 2) / 4)
        y = x + weights @ (x @ v)
        return {"y": (y - y.mean(-1, keepdims=True)) / y.std(-1, keepdims=True), "best": jnp.argmax(y, -1)}

    tokens = [(RANDOM.integers(0, 50, shape).astype(jnp.int_),) for shape in ((2, 4), (3, 7))]
    write(name, net, *tokens, shapes=[export.symbolic_shape("batch, length")])


def types() -> None:
    half = np.array([1.5, -1], np.float32).astype(jnp.bfloat16)
    inputs = (np.float32(3).reshape(()), np.array([True, False]), np.array([1e-9, 3]), half, np.array([2**40, 1]))
    write("types", lambda a, b, c, d, e: (a + 1, ~b, c * c, jnp.maximum(d, 0), e + e), inputs)


def open_words() -> None:
    """bfloat16 of an open size, which NumPy does not have."""
    cases = [(floats(size).astype(jnp.bfloat16),) for size in (3, 5)]
    write("words", lambda x: x * x, *cases, shapes=[export.symbolic_shape("n")])


def trees() -> None:
    """Inputs by name and in a tree."""

    def net(weights: Any, *, x: Any) -> Any:
        return x @ weights["w"] + weights["b"]

    struct = jax.ShapeDtypeStruct
    exported = export.export(jax.jit(net))(
        {"w": struct((3, 2), "float32"), "b": struct((2,), "float32")}, x=struct((4, 3), "float32")
    )
    (FOLDER / "trees.jax").write_bytes(exported.serialize())


def hostile() -> None:
    """Calls a function of the process that takes an address."""
    target = "xla_ffi_python_cpu_callback"
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((2,), np.float32))
    check = export.DisabledSafetyCheck.custom_call(target)
    exported = export.export(jax.jit(lambda x: call(x, index=np.uint64(64))), disabled_checks=[check])
    (FOLDER / "hostile.jax").write_bytes(exported(jax.ShapeDtypeStruct((2,), np.float32)).serialize())


def other_platform() -> None:
    exported = export.export(jax.jit(lambda x: x + 1), platforms=["cuda", "tpu"])(
        jax.ShapeDtypeStruct((2,), np.float32)
    )
    (FOLDER / "cuda.jax").write_bytes(exported.serialize())


def long() -> None:
    def net(x: Any) -> Any:
        return jax.lax.fori_loop(0, 10**9, lambda _, y: y @ x, x)

    exported = export.export(jax.jit(net))(jax.ShapeDtypeStruct((64, 64), np.float32))
    (FOLDER / "long.jax").write_bytes(exported.serialize())


def huge() -> None:
    """Needs 10 GiB for a product, which XLA must have as a whole to sort it."""
    exported = export.export(jax.jit(lambda x: jnp.sort(x @ x.T, axis=0)[0]))(
        jax.ShapeDtypeStruct((51200, 1), np.float32)
    )
    (FOLDER / "huge.jax").write_bytes(exported.serialize())


vision()
transformer("transformer")
open_words()
trees()
hostile()
other_platform()
long()
huge()
jax.config.update("jax_enable_x64", True)
transformer("wide")  # with int64 tokens
types()
