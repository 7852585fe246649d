"""A Ray cluster of several nodes on this machine, in a process of its own.

Reads orders from stdin, one a line, and answers each with one line: `add CPUS [GPUS]` or
`pool CPUS RESOURCE` -> `added`, `kill` (the node added first) -> `killed`. The first line that it
writes is the cluster's address. The end of stdin ends the cluster.
"""

import os
import sys

# Nodes on loopback, as in `launcher.ray_pool`.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20


def main() -> None:
    settings = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": float(sys.argv[1]), "node_ip_address": "127.0.0.1", **settings},
    )
    nodes = []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["add", cpus, *gpus]:
                # Ray counts what it is told; nobody looks for the devices.
                resources = {"num_cpus": float(cpus), "num_gpus": float(gpus[0]) if gpus else 0.0}
                nodes.append(cluster.add_node(node_ip_address="127.0.0.1", **resources, **settings))
                print("added", flush=True)
            case ["pool", cpus, name]:
                custom = {"num_cpus": float(cpus), "resources": {name: 1.0}}
                nodes.append(cluster.add_node(node_ip_address="127.0.0.1", **custom, **settings))
                print("added", flush=True)
            case ["kill"]:
                cluster.remove_node(nodes.pop(0), allow_graceful=False)
                print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
