"""A Ray cluster of several raylets on this machine: `python ray_nodes.py NODES GPUS`.

It prints the address of the head, which runs nothing, and obeys the lines of its standard input:
`remove` kills the raylet of its last node, `add` starts another node.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

STORE_BYTES = 80_000_000


class RayNodes:
    """The cluster, in a process of its own, from start to end."""

    def __init__(self, nodes: int, *, gpus: int = 0) -> None:
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(nodes), str(gpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.address = ""

    def __enter__(self) -> Self:
        self.address = self._next("address")
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def remove(self) -> None:
        self._order("remove")

    def add(self) -> None:
        self._order("add")

    def _order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        self._next("done")

    def _next(self, name: str) -> str:
        """Return the rest of the next line that begins with a name; Ray prints others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f"{name}="):
                return line.partition("=")[2].strip()
        raise AssertionError("the cluster has ended")


def main() -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415  only this process imports Ray

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    count, gpus = map(int, sys.argv[1:])
    options = {"num_cpus": 1, "num_gpus": gpus, "object_store_memory": STORE_BYTES}
    nodes = [cluster.add_node(**options) for _ in range(count)]
    print(f"address={cluster.address}", flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(**options))
        print("done=", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
