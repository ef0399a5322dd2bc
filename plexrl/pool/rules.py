"""What plexrl.yaml says about scheduling, in the scheduler's words."""

from collections.abc import Iterable

from plexrl.config import PoolConfig, Standing
from plexrl.scheduler import Policy, Scheduler
from plexrl.types import BadInput, GpuRole, JobClass, Tenant, records


def policy_of(config: PoolConfig) -> Policy:
    """The policy. Groups are not placed anew in a live pool (docs/not-yet-run.md)."""
    told = config.scheduler
    return Policy(
        placement=told.placement,
        order=told.order,
        anticipation_us=told.anticipation_us,
        gradient_anticipation_us=told.gradient_anticipation_us,
        quantum_us=told.quantum_us,
        sample_quantum_us=told.sample_quantum_us,
        min_turn_factor=told.min_turn_factor,
        starvation_us=told.starvation_us,
        admission_patience_us=told.admission_patience_us,
        half_life_us=told.half_life_us,
        max_stretch={kind: getattr(told.max_stretch, kind) for kind in JobClass},
        interactive_switches_per_hour=told.interactive_switches_per_hour,
        gather_share=told.gather_share,
        backfill=told.backfill,
        prefetch=told.prefetch,
        paranoid=told.paranoid,
    )


def scheduler_of(config: PoolConfig, gpus: Iterable[str]) -> Scheduler:
    """A scheduler for these GPUs. Raises BadInput when roles are given to GPUs that are not there."""
    sizes = dict.fromkeys(gpus, config.device.bytes)
    nodes = dict.fromkeys(gpu.rpartition(":")[0] for gpu in sizes)
    # What host memory has no room for goes to NVMe.
    room = config.host.bytes + (config.nvme.bytes if config.nvme else 0)
    return Scheduler(
        sizes,
        policy_of(config),
        roles=roles_of(config, sizes),
        hosts=dict.fromkeys(nodes, room),
    )


def set_shares(config: PoolConfig, scheduler: Scheduler, now_us: int) -> None:
    """Give the accounts and users that the file names their shares."""
    for account, part in config.shares.items():
        scheduler.set_share(now_us, account, part.shares, part.users)


def roles_of(config: PoolConfig, gpus: Iterable[str]) -> dict[str, GpuRole]:
    """The roles of the GPUs that are there. Raises BadInput when a node has fewer than the file names for it."""
    there = set(gpus)
    nodes = {gpu.rpartition(":")[0] for gpu in there}
    roles = {
        f"{node}:{index}": GpuRole(role)
        for node, listed in config.device.roles.items()
        if node in nodes
        for index, role in enumerate(listed)
    }
    if missing := sorted(roles.keys() - there):
        raise BadInput(
            f"device.roles of plexrl.yaml names {', '.join(missing)}, which this pool has not",
            "Name as many roles as the node has GPUs in the pool, or start it with more",
        )
    return roles


def tenant_of(config: PoolConfig, attached: records.JobAttached) -> Tenant:
    """Who a job is: its account and user are Slurm's, its class what the file says of the account."""
    standing = config.tenants.get(attached.account, Standing())
    return Tenant(
        job=attached.job,
        account=attached.account,
        user=attached.user,
        kind=JobClass(standing.kind),
        priority=standing.priority,
        deadline_us=standing.deadline_us,
    )
