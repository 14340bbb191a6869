"""The list of models for Triton's model repository extension, of services that can list them."""

from __future__ import annotations

from nnfmq.serving.inference_protocol.request_errors import EndpointMissing
from nnfmq.serving.inference_service import InferenceService, ModelIndex, ModelIndexEntry

__all__ = ["listed_models"]


async def listed_models(service: InferenceService, *, ready: bool) -> list[ModelIndexEntry]:
    """Return the models of the repository, or only those that are READY.

    Raises:
        EndpointMissing: If the service cannot list its models.
    """
    if not isinstance(service, ModelIndex):
        raise EndpointMissing("this server cannot list its models")
    return [entry for entry in await service.model_index() if entry.state == "READY" or not ready]
