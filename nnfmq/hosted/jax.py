"""The device `jax`: functions that `jax.export` serialized (StableHLO) on any platform that JAX has.

Options: `platform`, one of those for which the function was exported ("cpu", "cuda", "tpu" ...; by default the first);
`threads`. JAX initializes its platforms and threads once: those of the first file of a client remain.

What is in a file is data: its tree of inputs has no types but Python's and those registered in this process, and it
calls nothing of the host but the functions that JAX keeps stable for exports (`_CUSTOM_CALLS`). Inputs and outputs are
the leaves of the trees, with JAX's own names for them. JAX reads inputs in the client's memory; outputs are copied
there. It compiles a function once for each set of sizes, and cannot stop an execution: at a deadline the worker ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from nnfmq.base.processes import set_default_variables
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import HostedDescription, HostedTensor, Shape, is_known
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice
from nnfmq.hosted.options import require_one_of
from nnfmq.operations.declaration import Array

__all__ = ["JaxDevice"]

_OPERATION_PREFIXES = ("builtin", "func", "stablehlo", "chlo", "sdy")
_CUSTOM_CALLS = re.compile(
    r"lapack_[a-z]+_ffi|(cusolver|hipsolver)_[a-z]+_ffi|cusparse_gtsv2_ffi|(cu|hip)_lu_pivots_to_permutation"
    r"|(cu|hip)_threefry2x32_ffi|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement"
    r"|Eigh|Qr|ProductOfElementaryHouseholderReflectors|LuDecomposition|ApproxTopK|AllocateBuffer|shape_assertion"
    r"|stablehlo\.dynamic_(approx_top_k|reduce_window|rng_bit_generator|top_k)"
)
"""Targets that JAX keeps stable, without those that run a kernel of the file (Pallas, TensorFlow)."""
_COMPILED_MAX = 32  # sets of sizes for which a function stays compiled


class JaxDevice(HostedDevice):
    """A device that runs exported functions on JAX."""

    name = "jax"
    reserved_bytes = 4 << 30  # stacks of 8 MiB of several pools of threads, LLVM

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """See `HostedDevice.open`."""
        options.require_known("platform")
        jax = _imported(options.threads)
        exported = jax.export.deserialize(bytearray(file.model))
        if exported.nr_devices != 1:
            raise InvalidArgument(f"the function was exported for {exported.nr_devices} devices; it needs 1 here")
        platform = options.options.get("platform", exported.platforms[0])
        require_one_of("platform", platform, exported.platforms)
        _require_no_foreign_calls(jax, exported)
        return _Model(jax, exported, jax.devices(platform)[0])


def _imported(threads: int) -> Any:
    """Return the module, which takes memory of a GPU as it needs it, and does not narrow types of 64 bits."""
    set_default_variables({"NPROC": str(threads), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    import jax.export
    import jax.interpreters.mlir

    jax.config.update("jax_enable_x64", True)
    return jax


def _require_no_foreign_calls(jax: Any, exported: Any) -> None:
    """Check what a function calls: a target may be any function that is registered in the process.

    Raises:
        InvalidArgument: If it calls one that JAX does not keep stable; the message names it.
    """
    mlir = jax.interpreters.mlir
    found: list[str] = []

    def visit(operation: Any) -> Any:
        if operation.name.partition(".")[0] not in _OPERATION_PREFIXES:
            found.append(operation.name)
        elif operation.name == "stablehlo.custom_call":
            target = mlir.ir.StringAttr(operation.attributes["call_target_name"]).value
            if not _CUSTOM_CALLS.fullmatch(target):
                found.append(target)
        return mlir.ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        exported.mlir_module(serialized=False).operation.walk(visit)
    if found:
        raise InvalidArgument(f"the function calls {found[0]!r:.80}, which a driver does not run for a client")


class _Model(HostedModel):
    is_thread_safe = True

    def __init__(self, jax: Any, exported: Any, device: Any) -> None:
        self.jax, self.exported = jax, exported
        self.sharding = jax.sharding.SingleDeviceSharding(device)
        inputs = _tensors(jax, exported.in_tree, exported.in_avals, _input_name)
        outputs = _tensors(jax, exported.out_tree, exported.out_avals, "result{}".format)
        self.description = HostedDescription(inputs, outputs)
        self.compiled = lru_cache(_COMPILED_MAX)(self._compiled)
        shapes = tuple(tensor.shape for tensor in inputs)
        if all(map(is_known, shapes)):
            self.compiled(shapes)

    def _call(self, *leaves: Any) -> list[Any]:
        """Call the function with the leaves of its inputs; return those of its result."""
        tree = self.jax.tree_util
        arguments, keywords = tree.tree_unflatten(self.exported.in_tree, leaves)
        return list(tree.tree_leaves(self.exported.call(*arguments, **keywords)))

    def _arguments(self, shapes: Sequence[Any]) -> list[Any]:
        declared = zip(shapes, self.exported.in_avals, strict=True)
        return [self.jax.ShapeDtypeStruct(shape, aval.dtype, sharding=self.sharding) for shape, aval in declared]

    def _compiled(self, shapes: tuple[Any, ...]) -> Any:
        """Return the function compiled for inputs of these shapes. Raises InvalidArgument if they are not its own."""
        try:
            return self.jax.jit(self._call).lower(*self._arguments(shapes)).compile()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"jax: {error}") from error

    def resolve(self, shapes: Sequence[Shape | None]) -> Sequence[Shape | None]:
        if not all(map(is_known, shapes)):
            return [tensor.shape for tensor in self.description.outputs]
        return [tuple(result.shape) for result in self.jax.eval_shape(self._call, *self._arguments(shapes))]

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        dtypes = [aval.dtype for aval in self.exported.in_avals]
        arrays = [array.view(dtype) for array, dtype in zip(inputs, dtypes, strict=True)]  # uint16 of bfloat16
        return _Run(self.compiled(tuple(array.shape for array in arrays)), arrays)


class _Run(HostedRun):
    def __init__(self, compiled: Any, arrays: Sequence[Array]) -> None:
        self._compiled, self._arrays = compiled, arrays

    def __call__(self) -> Sequence[Array]:
        return [np.asarray(result) for result in self._compiled(*self._arrays)]  # waits


def _tensors(jax: Any, tree: Any, avals: Sequence[Any], name: Callable[[str], str]) -> tuple[HostedTensor, ...]:
    """Return the declarations of a tree's leaves; `name` makes a name of the path of one."""
    util = jax.tree_util
    paths, _ = util.tree_flatten_with_path(util.tree_unflatten(tree, range(len(avals))))
    return tuple(
        HostedTensor(
            name(util.keystr(path)), str(aval.dtype),
            tuple(size if isinstance(size, int) else str(size) for size in aval.shape),
        )
        for (path, _), aval in zip(paths, avals, strict=True)
    )  # fmt: skip


def _input_name(path: str) -> str:
    """Return JAX's name of an input: "args[0]['w']", "kwargs['x']"."""
    return path.replace("[0]", "args", 1) if path.startswith("[0]") else path.replace("[1]", "kwargs", 1)
