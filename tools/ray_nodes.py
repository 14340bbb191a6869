"""A Ray cluster on this machine, for the benchmark and the tests: each node has a loopback address of its own.

Ray replaces 127.0.0.1 by an address of the machine, so nodes have addresses like 127.A.B.2, of which A and B come from
the pid: clusters of several processes do not meet. The process that starts nodes must have called
`bench_support.adopt_orphans`, so that `end_descendants` also ends what a killed node leaves behind.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from bench_support import interrupt_on_sigterm

from nnfmq.base.processes import descendants

FAST_DETECTION: Mapping[str, int] = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Ray's settings with which its control store calls a node dead within 3 s. Ray's own: every 3 s, 10 s, 5 failures."""
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray accepts is 75 MiB


class RayNodes:
    """A running cluster, to which this process is connected; `addresses` are those of its nodes, the head's first."""

    def __init__(self, cpus: int, settings: Mapping[str, int]) -> None:
        from ray.cluster_utils import Cluster

        self.addresses: list[str] = []
        self._network = f"127.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"
        self._arguments = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
        head = {
            **self._arguments, "include_dashboard": False, "node_ip_address": self._next_address(),
            "_system_config": dict(settings),
        }  # fmt: skip
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = {self.addresses[0]: self._cluster.head_node}

    def _next_address(self) -> str:
        self.addresses.append(f"{self._network}.{len(self.addresses) + 2}")
        return self.addresses[-1]

    @property
    def gcs_address(self) -> str:
        """The address for `ray.init`."""
        return str(self._cluster.address)

    def add(self) -> str:
        """Start another node; return its address when the cluster knows of it."""
        address = self._next_address()
        self._nodes[address] = self._cluster.add_node(node_ip_address=address, **self._arguments)
        return address

    def pids(self, address: str) -> list[int]:
        """Return the processes of a node, drivers of nnfmq included."""
        roots = [each.process.pid for group in self._nodes[address].all_processes.values() for each in group]
        return [*roots, *(pid for root in roots for pid in descendants(root))]

    def kill(self, address: str) -> None:
        """Kill all processes of a node with SIGKILL."""
        kill_together(self.pids(address))

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def kill_together(pids: Sequence[int]) -> None:
    """Kill processes so that none can act on the death of another one."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            _signal(pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def started_nodes(
    folder: Path, count: int = 1, cpus: int = 4, settings: Mapping[str, int] = FAST_DETECTION
) -> Iterator[RayNodes]:
    """Run a cluster of `count` nodes with all files in `folder`, whose path must be short, and connect to it.

    Environment variables of this process lead Ray and drivers there.
    """
    files = folder / "r"  # Ray lets every user write there, so not the caller's folder itself
    (files / "ray").mkdir(parents=True)
    os.environ |= {
        "RAY_TMPDIR": str(files), "XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder / "c"),
        "XDG_STATE_HOME": str(folder / "s"),
    }  # fmt: skip
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray otherwise reports to its makers
    import ray

    with redirect_stdout(sys.stderr):  # Ray prints messages of nodes
        nodes = RayNodes(cpus, settings)
        try:
            for _ in range(count - 1):
                nodes.add()
            ray.init(address=nodes.gcs_address, _node_ip_address=nodes.addresses[0], log_to_driver=False)
            interrupt_on_sigterm()  # Ray's own handler ends this process without what is to be done at its end
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


@contextmanager
def started_serve(nodes: RayNodes, **options: Any) -> Iterator[int]:
    """Run Ray Serve with one HTTP proxy, on the head node; yield its port. `options` are more HTTP options."""
    from ray import serve

    port = free_port(nodes.addresses[0])
    serve.start(proxy_location="HeadOnly", http_options={"host": nodes.addresses[0], "port": port, **options})
    try:
        yield port
    finally:
        serve.shutdown()


def free_port(address: str) -> int:
    """Return a TCP port that is free at `address` now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
