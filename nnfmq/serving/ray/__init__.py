"""Models on a cluster of Ray: a driver on each node, and deployments of Ray Serve whose replicas are its clients.

`ray.driver` has the actor that owns a node's driver; `app` makes an application of the deployment in `deployment`.
Needs the extra `ray`. Names are imported when they are first used: an actor that owns a driver starts without Serve.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnfmq.serving.ray.autoscaling import load_policy
    from nnfmq.serving.ray.deployment import ModelReplica, app
    from nnfmq.serving.server import ServerOptions

__all__ = ["ModelReplica", "ServerOptions", "app", "load_policy"]

_MODULES = {
    "ModelReplica": "nnfmq.serving.ray.deployment",
    "ServerOptions": "nnfmq.serving.server",
    "app": "nnfmq.serving.ray.deployment",
    "load_policy": "nnfmq.serving.ray.autoscaling",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
