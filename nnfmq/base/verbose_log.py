"""The verbose log of both sides: lines about what the runtime and the driver do, by tag, as NNAPI's VLOG.

`$NNFMQ_VLOG` names the tags. It is read when a process asks for the first time, or when `init_vlog_mask` is called; a
forked child, such as a driver's worker, has the tags of its parent. The lines go through `logging`, each tag to a
logger of its own, `nnfmq.vlog.TAG`: to the application's handlers, or to stderr if it has none. (OBS-5, OBS-6)
"""

from __future__ import annotations

import logging
import re
from typing import Final, Literal, TypeAlias, get_args

from nnfmq.base import settings
from nnfmq.base.logs import write_unless_handled
from nnfmq.hal.errors import InvalidArgument

__all__ = ["TAGS", "VlogTag", "init_vlog_mask", "vlog", "vlog_is_on"]

VlogTag: TypeAlias = Literal["compilation", "cpuexe", "driver", "execution", "manager", "memory", "model"]
TAGS: Final[tuple[VlogTag, ...]] = get_args(VlogTag)

_EVERYTHING = ("1", "all")
_log = logging.getLogger("nnfmq.vlog")
_logs = {tag: logging.getLogger(f"nnfmq.vlog.{tag}") for tag in TAGS}


class _Mask:
    """The tags that are on in this process; None: nobody has asked yet."""

    tags: frozenset[str] | None = None


def init_vlog_mask() -> frozenset[str]:
    """Read the setting again, and return the tags that are on from now on.

    An unknown tag is logged as an error, and the others apply.
    """
    try:
        text = settings.VLOG.value()
    except InvalidArgument as error:  # another line of a configuration file is wrong: whoever needs that one raises
        _log.error("the verbose log is off: %s", error)
        text = ""
    _Mask.tags = _tags_of(text)
    if _Mask.tags:
        write_unless_handled(_log)
    return _Mask.tags


def _tags_of(text: str) -> frozenset[str]:
    names = [name for name in re.split("[ ,:]", text) if name]
    if any(name in _EVERYTHING for name in names):
        return frozenset(TAGS)
    for name in names:
        if name not in TAGS:
            allowed = f"{', '.join(TAGS)}, or `all`"
            _log.error("%r in $%s is no tag of the verbose log; allowed: %s", name, settings.VLOG.variable, allowed)
    return frozenset(names).intersection(TAGS)


def vlog_is_on(tag: VlogTag) -> bool:
    """Return whether lines of `tag` are written: ask before you make a text that costs something."""
    tags = _Mask.tags
    return tag in (init_vlog_mask() if tags is None else tags)


def vlog(tag: VlogTag, text: str, *values: object) -> None:
    """Write a line, `text % values`, if `tag` is on."""
    if vlog_is_on(tag):
        _logs[tag].info(text, *values)
