"""The check that all validators share."""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument

__all__ = ["require"]


def require(condition: bool, rule: str, message: str) -> None:
    """Raise InvalidArgument with `message` and the rule's id, unless `condition` holds.

    `rule` is an id from docs/contributing/requirements.md, such as N-MOD-2.
    """
    if not condition:
        raise InvalidArgument(f"{message} ({rule})")
