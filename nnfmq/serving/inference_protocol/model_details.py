"""Triton's extensions about one model: its configuration and its statistics, in the form of JSON and of protobuf's.

Source: Triton Inference Server's documents of its extensions model_configuration and statistics. Its clients read all
counts of `inference_stats`, so those that a server without a cache of responses has not are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfmq.serving.inference_protocol.errors import EndpointMissing
from nnfmq.serving.inference_protocol.tensors import datatype_of
from nnfmq.serving.inference_service import (
    CountedTime,
    InferenceModelMetadata,
    InferenceService,
    InferenceStatistics,
    InferenceTensorMetadata,
    StatisticsSource,
)

__all__ = ["listed_statistics", "model_configuration"]


def model_configuration(model: InferenceModelMetadata) -> dict[str, Any]:
    """Return a model's configuration (ModelConfig). Shapes are without the rows of a batch, as Triton has them."""
    found: dict[str, Any] = {
        "name": model.name,
        "platform": model.platform,
        "backend": model.platform,
        "max_batch_size": model.max_batch,
        "input": [_tensor(tensor, model.max_batch) for tensor in model.inputs],
        "output": [_tensor(tensor, model.max_batch) for tensor in model.outputs],
    }
    if model.max_batch:
        found["dynamic_batching"] = {"max_queue_delay_microseconds": round(model.max_batch_wait_s * 1e6)}
    return found


def _tensor(tensor: InferenceTensorMetadata, max_batch: int) -> dict[str, Any]:
    dims = tensor.shape[1:] if max_batch else tensor.shape
    return {"name": tensor.name, "data_type": f"TYPE_{datatype_of(tensor.dtype)}", "dims": list(dims)}


async def listed_statistics(service: InferenceService, model: str = "", version: str = "") -> dict[str, Any]:
    """Return the statistics of the versions of a model, or of all models (ModelStatisticsResponse).

    Raises:
        EndpointMissing: If the service does not count its requests.
        ModelNotFound: If there is no such model or version.
    """
    if not isinstance(service, StatisticsSource):
        raise EndpointMissing("this server has no statistics of its models")
    return {"model_stats": _entries(await service.model_statistics(model, version))}


def _entries(statistics: Sequence[InferenceStatistics]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "version": each.version,
            "last_inference": each.last_request_ms,
            "inference_count": each.rows,
            "execution_count": each.executions,
            "inference_stats": {
                "success": _duration(each.success),
                "fail": _duration(each.fail),
                "queue": _duration(each.queue),
                "compute_input": _duration(each.compute_input),
                "compute_infer": _duration(each.compute_infer),
                "compute_output": _duration(each.compute_output),
                "cache_hit": _duration(CountedTime()),
                "cache_miss": _duration(CountedTime()),
            },
        }
        for each in statistics
    ]


def _duration(time: CountedTime) -> dict[str, int]:
    return {"count": time.count, "ns": time.ns}
