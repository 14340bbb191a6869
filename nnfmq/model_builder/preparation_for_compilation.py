"""prepare_for_compilation: what NNAPI does to a model when it is finished (API-4)."""

from __future__ import annotations

from msgspec.structs import replace

from nnfmq.hal.types import Model, Subgraph
from nnfmq.model_builder.dead_parts import without_dead_parts
from nnfmq.model_builder.default_arguments import without_default_arguments
from nnfmq.model_builder.run_order import in_run_order
from nnfmq.operations.extensions import to_local_prefixes
from nnfmq.validation import validate_model
from nnfmq.validation.values import validate_extensions

__all__ = ["prepare_for_compilation"]


def prepare_for_compilation(model: Model) -> Model:
    """Return an equal model as a runtime compiles it: in run order, validated, without superfluous arguments and parts.

    Operations come after those whose outputs they read. Trailing arguments that are constants equal to their default
    are removed (`default_arguments`), then operands, subgraphs and pools without a use (`dead_parts`). A model that
    needs no change is returned itself. The result shares the pools with `model`.

    Raises:
        InvalidArgument: If the model is invalid. IF and WHILE may have boundaries of unknown size, because a runtime
            can execute them itself.
    """
    ordered = _in_run_order(model)
    validate_extensions(ordered.extensions)
    validate_model(to_local_prefixes(ordered), allow_unspecified_boundaries=True)
    return without_dead_parts(_without_default_arguments(ordered))


def _in_run_order(model: Model) -> Model:
    main = in_run_order(model.main)
    referenced = tuple(
        in_run_order(subgraph, f"referenced subgraph {index}, ") for index, subgraph in enumerate(model.referenced)
    )
    return _with_subgraphs(model, (main, *referenced))


def _without_default_arguments(model: Model) -> Model:
    values = model.operand_values
    subgraphs = (model.main, *model.referenced)
    return _with_subgraphs(model, tuple(without_default_arguments(subgraph, values) for subgraph in subgraphs))


def _with_subgraphs(model: Model, subgraphs: tuple[Subgraph, ...]) -> Model:
    """Return the model with other subgraphs; itself if each is the one that it has."""
    if all(new is old for new, old in zip(subgraphs, (model.main, *model.referenced), strict=True)):
        return model
    return replace(model, main=subgraphs[0], referenced=subgraphs[1:])
