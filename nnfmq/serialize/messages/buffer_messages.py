"""Messages about driver-managed buffers (IDevice.allocate and IBuffer)."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from nnfmq.serialize.messages.common import (
    I32,
    MAX_ROLES,
    U32,
    U63,
    Call,
    Data,
    Dimensions,
    MemoryData,
    Name,
    StatusReply,
)

__all__ = ["Allocate", "Allocated", "CopyFrom", "CopyTo", "ReleaseBuffer", "RoleData", "Roles"]


class RoleData(Data, frozen=True):
    """The HAL's BufferRole."""

    model_index: U32
    io_index: U32
    probability: float


Roles: TypeAlias = Annotated[tuple[RoleData, ...], Meta(max_length=MAX_ROLES)]


class Allocate(Call, frozen=True):
    """Allocate a driver-managed buffer; a role's `model_index` is an index of `model_ids`, models of the device."""

    device: Name
    dimensions: Dimensions
    model_ids: Annotated[tuple[U63, ...], Meta(max_length=MAX_ROLES)]
    inputs: Roles
    outputs: Roles


class Allocated(StatusReply, frozen=True):
    """The id of the buffer, and its token for requests; both are 0 after an error."""

    buffer_id: U63
    token: I32


class CopyFrom(Call, frozen=True):
    """Copy the memory that comes with the message into a buffer; `dimensions` () = those of the buffer."""

    buffer_id: U63
    memory: MemoryData
    dimensions: Dimensions


class CopyTo(Call, frozen=True):
    """Copy a buffer into the memory that comes with the message."""

    buffer_id: U63
    memory: MemoryData


class ReleaseBuffer(Call, frozen=True):
    """Release a buffer; its token is invalid from then on."""

    buffer_id: U63
