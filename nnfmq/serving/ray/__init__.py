"""Models on a cluster of Ray: a driver on each node, and deployments of Ray Serve whose replicas are its clients.

`node_driver` has the actor that owns a node's driver; `app` makes an application of the deployment in `deployment`.
Needs the extra `ray`.
"""

from nnfmq.serving.ray.deployment import ModelReplica, app

__all__ = ["ModelReplica", "app"]
