"""Receiving a client's model: its pools are copied, and its bytes decoded, in slices.

A model may have gigabytes of constants and millions of operands. Between slices the driver lets other threads run,
charges the client, and ends the work if nobody waits for the result (`checkpoint`).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import ExitStack

from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.hal.timing import NO_LIMIT
from nnfmq.hal.types import Model
from nnfmq.serialize.messages import GetSupportedOperations, PrepareModel
from nnfmq.serialize.model_codec import decode_model
from nnfmq.serialize.model_size import decoded_model_bytes
from nnfmq.service.checkpoint import Checkpoint
from nnfmq.service.error_translation import errors_to_status
from nnfmq.service.memory_quota import QuotaCharge, adopt_files
from nnfmq.service.private_memory import copy_constant_pools
from nnfmq.service.session_context import SessionContext

__all__ = ["receive_model"]

_FROZEN_SLICES = 64  # each time; 32,768 operands, which few models have


def receive_model(
    context: SessionContext, message: PrepareModel | GetSupportedOperations, fds: list[int]
) -> tuple[Model, QuotaCharge]:
    """Return the model over private copies of its pools, and the charge for it.

    Takes ownership of `fds` also if it raises, so call it before anything else that can raise.

    Raises:
        InvalidArgument: If a memory or the model's encoding is invalid.
        ResourceExhausted: If the quota is exhausted.
        MissedDeadlineTransient: If the deadline passes meanwhile.
        MissedDeadlinePersistent: If it had passed before, and much would have to be copied.
        DeadObject: If the session ends meanwhile.
    """
    check = Checkpoint(context, getattr(message, "deadline_ns", NO_LIMIT))
    with ExitStack() as files, ExitStack() as undo:
        memories = adopt_files(fds, message.pools)
        for memory in memories:
            files.callback(memory.close)
        try:
            decoded_bytes = decoded_model_bytes(message.model)
            charge = context.quota.charge(decoded_bytes + sum(memory.size_bytes for memory in memories))
            undo.callback(charge.close)
            pools = copy_constant_pools(memories, check)
            with errors_to_status("reading the model"):
                model = decode_model(message.model, pools, _frozen_often(check))
        except ProtocolError as error:
            raise InvalidArgument(str(error)) from error
        undo.pop_all()
    return model, charge


def _frozen_often(check: Checkpoint) -> Callable[[], None]:
    """Return a function that calls `check`, and keeps what was decoded until now out of garbage collections.

    They would visit all of these objects again and again, with the GIL held: 0.4 s each time for two million operands.
    The objects have no cycles, so reference counts free them.
    """
    slices = itertools.count(1)

    def check_and_freeze() -> None:
        check()
        if next(slices) % _FROZEN_SLICES == 0:
            gc.freeze()

    return check_and_freeze
