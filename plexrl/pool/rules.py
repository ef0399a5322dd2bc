"""What plexrl.yaml says about scheduling, in the scheduler's words."""

from collections.abc import Iterable

from plexrl.config import PoolConfig, Standing
from plexrl.pool.bounds import bounds_of
from plexrl.scheduler import Policy, Scheduler
from plexrl.slurm.adapter import Association
from plexrl.slurm.tree import shares_of
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


def set_shares(
    config: PoolConfig, scheduler: Scheduler, now_us: int, associations: Iterable[Association] | None = None
) -> None:
    """Give accounts and users their shares: the file's, or Slurm's where the file says so and they are known by now.

    Who has been named before and is no more has 1 again.
    """
    if config.shares_from == "slurm":
        if associations is None:
            return
        told = shares_of(associations)
    else:
        told = {account: (part.shares, part.users) for account, part in config.shares.items()}
    for account in scheduler.shares.accounts():
        if account not in told:
            scheduler.set_share(now_us, account, 1.0, {})
    for account, (shares, users) in told.items():
        scheduler.set_share(now_us, account, shares, users)


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
    """Who a job is: account and user are Slurm's; its class what the file says of its user, its QOS or its account."""
    standing = config.tenants.get(attached.account, Standing())
    rules = [bound.rule for bound in bounds_of(config, attached)]

    def first(name: str) -> object:
        told = (getattr(rule, name) for rule in rules)
        return next((value for value in told if value is not None), getattr(standing, name))

    return Tenant(
        job=attached.job,
        account=attached.account,
        user=attached.user,
        kind=JobClass(first("kind")),
        priority=first("priority"),
        deadline_us=first("deadline_us"),
    )
