"""A node's real GPUs: how CUDA names those that the pool has, and the environment of a rank on one of them."""

from collections.abc import Mapping

from plexrl.types import BadInput


def names(environ: Mapping[str, str], count: int) -> tuple[str, ...]:
    """CUDA's names of the first `count` GPUs of this Slurm step, in Slurm's order. Outside of Slurm: of the machine.

    CUDA_VISIBLE_DEVICES is Slurm's word for what this step sees, also where it may see no other device; the job's list
    numbers the node's GPUs and stands in only where Slurm sets no other. Raises BadInput when there are too few.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if variable in environ:
            found = tuple(name for name in environ[variable].split(",") if name)
            break
    else:
        variable = "Slurm's environment"
        found = () if "SLURM_JOB_ID" in environ else tuple(map(str, range(count)))
    if len(found) < count:
        raise BadInput(
            f"device.kind is cuda and {variable} names {len(found)} GPUs of {count}",
            "Start the pool with --gpus-per-node, or write device.kind: cpu",
        )
    return found[:count]


def environment(gpu: str) -> dict[str, str]:
    """What a rank sets before it first speaks to the driver. gpu: CUDA's name; it then sees that one, as number 0."""
    return {
        "CUDA_VISIBLE_DEVICES": gpu,
        # As Slurm numbers them; CUDA's own order is by speed.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # NCCL would register a captured graph's buffers by their physical memory, which is another after a switch.
        "NCCL_GRAPH_REGISTER": "0",
        # Its watchers would look for the rendezvous file, which goes when the gang is built.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
