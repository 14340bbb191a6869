"""SignatureRunner: a model's signature as a function from named arrays to named arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["SignatureRunner"]


class _Runs(Protocol):
    """What a runner needs of an interpreter."""

    def _get_full_signature_list(self) -> dict[str, dict[str, dict[str, int]]]: ...

    def _get_tensor_details(self, tensor_index: int, subgraph_index: int) -> dict[str, Any]: ...

    def _subgraph_of(self, signature_key: str) -> int: ...

    def _run_subgraph(
        self,
        subgraph_index: int,
        shapes: Mapping[int, tuple[int, ...]],
        values: Mapping[int, Any],
        outputs: Sequence[int],
    ) -> list[Any]: ...


class SignatureRunner:
    """Runs one signature; made by `Interpreter.get_signature_runner`. It shares tensors and states with that."""

    def __init__(self, interpreter: _Runs | None = None, signature_key: str | None = None) -> None:
        """Find the signature.

        Raises:
            ValueError: If an argument is missing, or the model has no such signature.
        """
        if not interpreter:
            raise ValueError("None interpreter provided.")
        if not signature_key:
            raise ValueError("None signature_key provided.")
        signatures = interpreter._get_full_signature_list()
        if signature_key not in signatures:
            raise ValueError(f'Invalid signature_key provided: "{signature_key}"; the model has {list(signatures)}.')
        self._interpreter = interpreter
        self._signature_key = signature_key
        self._signature_def = signatures[signature_key]
        self._inputs: dict[str, int] = self._signature_def["inputs"]
        self._outputs = self._signature_def["outputs"].items()
        self._subgraph_index = interpreter._subgraph_of(signature_key)

    def __call__(self, **kwargs: Any) -> dict[str, Any]:
        """Return the outputs by name, as new arrays; blocks. Inputs are resized to the shapes of the arguments.

        Raises:
            ValueError: If an argument is missing, has an unknown name or the wrong type.
            RuntimeError: If the model does not accept the shapes, or as `Interpreter.invoke`.
        """
        if len(kwargs) != len(self._inputs):
            raise ValueError(
                f"the signature has the inputs {list(self._inputs)}, {len(kwargs)} are given: {list(kwargs)}"
            )
        for name in kwargs:
            if name not in self._inputs:
                raise ValueError(f"the signature has no input {name!r}")
        shapes = {self._inputs[name]: value.shape for name, value in kwargs.items()}
        values = {self._inputs[name]: value for name, value in kwargs.items()}
        run = self._interpreter._run_subgraph
        outputs = run(self._subgraph_index, shapes, values, [index for _, index in self._outputs])
        return {name: output for (name, _), output in zip(self._outputs, outputs, strict=True)}

    def get_input_details(self) -> dict[str, dict[str, Any]]:
        """Return the details of each input by its name in the signature."""
        return {name: self._details(index) for name, index in self._inputs.items()}

    def get_output_details(self) -> dict[str, dict[str, Any]]:
        """Return the details of each output by its name in the signature."""
        return {name: self._details(index) for name, index in self._outputs}

    def _details(self, tensor_index: int) -> dict[str, Any]:
        return self._interpreter._get_tensor_details(tensor_index, self._subgraph_index)
