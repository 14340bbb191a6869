"""The keyword arguments of `Device.prepare` as a dict, and what is done with them before a device is chosen."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from nnfmq.deadlines import remaining_s
from nnfmq.hal.types import DEFAULT_PREFERENCE, ExtensionNameAndPrefix, Model, Priority, TokenValuePair
from nnfmq.runtime.compile_notice import ProgressCallback
from nnfmq.runtime.prepare_arguments import (
    FinishedModel,
    ModelArgument,
    Preference,
    PriorityArgument,
    name_for_display,
    to_model,
    to_preference,
    to_priority,
)

__all__ = ["PrepareOptions", "loaded_model", "with_time_left"]


class PrepareOptions(TypedDict, total=False):
    """The keyword arguments of `Device.prepare`."""

    preference: Preference
    priority: PriorityArgument
    hints: Sequence[TokenValuePair]
    extensions: Sequence[ExtensionNameAndPrefix]
    cache_dir: str | os.PathLike[str] | None
    token: bytes | None
    model_cache: Sequence[int]
    data_cache: Sequence[int]
    timeout: float | None
    progress: ProgressCallback | None
    name: str | None
    shapes: Mapping[str | int, Sequence[int]] | None
    signature: str | None


def loaded_model(model: ModelArgument, options: PrepareOptions) -> Model | FinishedModel:
    """Return the model that does not change any more, and make `options` those for it: its name, nothing of its file.

    Raises as `to_model`, or InvalidArgument if the preference or the priority is none.
    """
    options["name"] = name_for_display(model, options.get("name"))
    options["preference"] = to_preference(options.get("preference", DEFAULT_PREFERENCE))
    options["priority"] = to_priority(options.get("priority", Priority.MEDIUM))
    return to_model(model, options.pop("shapes", None), options.pop("signature", None))


def with_time_left(options: PrepareOptions, deadline_ns: int | None) -> PrepareOptions:
    """Return a copy of the options whose timeout is the time that is left until the deadline, if there is one."""
    left = options.copy()
    if deadline_ns is not None:
        left["timeout"] = remaining_s(deadline_ns)
    return left
