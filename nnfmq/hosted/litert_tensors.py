"""The tensors of a .tflite file: as its FlatBuffer has them, and as LiteRT has allocated them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import HostedTensor

__all__ = ["Named", "Place", "Sizes", "Tensors"]

Place: TypeAlias = tuple[int, int]
"""The indexes of a tensor and of its subgraph."""
Sizes: TypeAlias = tuple[int | None, ...]
Named: TypeAlias = tuple[str, Place]


class Tensors:
    """Descriptions of tensors.

    Args:
        calls: The interpreter's functions, which take a subgraph.
        file: The file's `Model`.
        schema: The module `ai_edge_litert.schema_py_generated`.
    """

    def __init__(self, calls: Any, file: Any, schema: Any) -> None:
        self._calls, self._file, self._schema = calls, file, schema

    def interface(self, signature: str | None) -> tuple[int, list[Named], list[Named]]:
        """Return the subgraph of a signature, its inputs and its outputs; None: the file's first subgraph."""
        if signature is None:
            main = self._file.Subgraphs(0)
            return 0, self._named(0, _vector(main, "Inputs")), self._named(0, _vector(main, "Outputs"))
        signatures = self._calls.GetSignatureDefs()
        if signature not in signatures:
            known = ", ".join(map(repr, signatures)) or "none"
            raise InvalidArgument(f"there is no signature {signature!r}; those of the file: {known}")
        graph = self._calls.GetSubgraphIndexFromSignature(signature)
        inputs, outputs = (signatures[signature][kind].items() for kind in ("inputs", "outputs"))
        return graph, [(name, (int(i), graph)) for name, i in inputs], [(name, (int(i), graph)) for name, i in outputs]

    def used(self, graph: int, side: str) -> list[Named]:
        """Return the tensors on a side of a subgraph's operators, in their order, as nnfmq's importer does."""
        operators = self._file.Subgraphs(graph)
        sides = (_vector(operators.Operators(number), side) for number in range(operators.OperatorsLength()))
        return self._named(graph, dict.fromkeys(index for indexes in sides for index in indexes if index >= 0))

    def _named(self, graph: int, indexes: Iterable[int]) -> list[Named]:
        return [(self._calls.TensorName(index, graph), (index, graph)) for index in indexes]

    def _stated(self, place: Place) -> Any:
        return self._file.Subgraphs(place[1]).Tensors(place[0])

    def is_variable(self, place: Place) -> bool:
        """Return whether a tensor is a variable tensor."""
        return bool(self._stated(place).IsVariable())

    def stated_shape(self, place: Place) -> list[int]:
        """Return the shape in the file."""
        return _vector(self._stated(place), "Shape")

    def dtype(self, place: Place) -> str:
        """Return the name of an element type; bfloat16, which LiteRT's interface does not have, in capitals."""
        types, number = vars(self._schema.TensorType), self._stated(place).Type()
        kind = next((name for name, value in types.items() if value == number), str(number))
        return kind if kind == "BFLOAT16" else kind.lower()

    def size(self, place: Place) -> tuple[int, ...]:
        """Return the shape for which LiteRT has allocated the tensor."""
        return tuple(self._calls.TensorSize(*place).tolist())

    def sizes(self, place: Place) -> Sizes:
        """Return the shape that the file's signature of the tensor allows; None: any size."""
        return tuple(None if size < 0 else size for size in self._calls.TensorSizeSignature(*place).tolist())

    def quantization(self, place: Place) -> tuple[float, int]:
        """Return scale and zero point; 0 of a tensor that is not quantized, or by channels."""
        scales, zero_points, _, _ = self._calls.TensorQuantizationParameters(*place)
        return (float(scales[0]), int(zero_points[0])) if len(scales) == 1 else (0.0, 0)

    def state(self, name: str, place: Place) -> tuple[HostedTensor, bytes]:
        """Return the declaration of a state, and its value at first."""
        value = self._calls.GetTensor(*place)
        return HostedTensor(name, value.dtype.name, value.shape, *self.quantization(place)), value.tobytes()


def _vector(table: Any, name: str) -> list[int]:
    """Return a vector of integers of a subgraph, an operator or a tensor."""
    return [getattr(table, name)(number) for number in range(getattr(table, f"{name}Length")())]
