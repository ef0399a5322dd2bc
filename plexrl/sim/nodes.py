"""The GPUs of a workload's cluster, by name."""

from plexrl.sim.workload import Cluster
from plexrl.types import BadInput, GpuRole


def gpus_of(cluster: Cluster) -> tuple[dict[str, int], dict[str, GpuRole], dict[str, int]]:
    """GPU -> bytes, GPU -> role, node -> host bytes, as the Scheduler takes them. Raises BadInput: too many roles."""
    if cluster.train_nodes + cluster.sample_nodes > cluster.nodes:
        raise BadInput(
            f"{cluster.train_nodes} nodes for training and {cluster.sample_nodes} for sampling, of {cluster.nodes}",
            "Give no more than there are",
        )
    gpus, roles, hosts = {}, {}, {}
    for node in range(cluster.nodes):
        name = f"n{node:04d}"
        if cluster.host_bytes:
            hosts[name] = cluster.host_bytes
        for index in range(cluster.per_node):
            gpu = f"{name}:{index}"
            gpus[gpu] = cluster.bytes
            if node < cluster.train_nodes:
                roles[gpu] = GpuRole.TRAIN
            elif node < cluster.train_nodes + cluster.sample_nodes:
                roles[gpu] = GpuRole.SAMPLE
    return gpus, roles, hosts
