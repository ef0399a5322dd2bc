"""Workloads of the preset `paper`: its jobs, and the clusters that they run on."""

from collections.abc import Sequence
from math import ceil

from msgspec import structs

from plexrl.scheduler.costs import ServiceModel, SwitchModel
from plexrl.sim.draws import draw
from plexrl.sim.generate import rollout_us, train_us
from plexrl.sim.presets import paper_parameters as fixed
from plexrl.sim.presets.paper_parameters import Setting
from plexrl.sim.workload import Cluster, JobPlan, Lengths, Rollout, SamplePlan, TrainPlan, Workload

NODE = 8
CALLS = 4  # ours: sample calls per replica and step


def job(
    setting: Setting, name: str, seed: int, *, duty: float | None = None, variation: float | None = None
) -> JobPlan:
    """A job alone on R + T GPUs. duty: training's share of a step, else the published one's.

    variation: of the lengths of steps (sd/mean); all samples of a step are equally long then. Else as in the facts.
    """
    lengths = Lengths(
        max_tokens=setting.max_tokens,
        mean_tokens=setting.mean_tokens,
        sigma_prompt=fixed.SIGMA_PROMPT,
        sigma_sample=fixed.SIGMA_SAMPLE,
        drift=fixed.DRIFT,
    )
    if variation is not None:
        lengths = structs.replace(
            lengths, max_tokens=1_000_000, sigma_prompt=0.0, sigma_sample=0.0, at_cap=0.0, drift=variation, memory=0.0
        )
    plan = JobPlan(
        job=name,
        user=name,
        account=name,
        model=setting.model,
        lag=fixed.LAG,
        steps=fixed.STEPS,
        train=_trainer(setting, setting.train_gpus, 0.0),
        sample=SamplePlan(
            replicas=setting.sample_gpus // setting.replica_gpus,
            gpus=setting.replica_gpus,
            device_bytes=setting.weight_bytes // setting.replica_gpus,
            host_bytes=setting.weight_bytes // setting.replica_gpus,
            residual_bytes=fixed.RESIDUAL_BYTES,
            build_us=fixed.BUILD_US,
            service=ServiceModel(
                prefill_us_per_token=setting.prefill_us_per_token,
                decode_base_us=setting.decode_base_us,
                decode_us_per_sequence=setting.decode_sequence_us,
            ),
        ),
        rollout=Rollout(prompts=setting.prompts, group=setting.group, lengths=lengths, calls=CALLS),
    )
    works = [draw(plan, step, seed) for step in range(fixed.STEPS)]
    wanted = (setting.train_share if duty is None else duty) * sum(rollout_us(plan, work) for work in works)
    each = (wanted - sum(train_us(plan, work) for work in works)) / sum(work.train_tokens for work in works)
    return structs.replace(plan, train=_trainer(setting, setting.train_gpus, max(0.0, each)))


def _trainer(setting: Setting, gpus: int, us_per_token: float) -> TrainPlan:
    """us_per_token: of the gang of so many GPUs."""
    state = setting.state_bytes // gpus
    return TrainPlan(
        gpus=gpus,
        device_bytes=state,
        host_bytes=state,
        residual_bytes=fixed.RESIDUAL_BYTES,
        service=ServiceModel(train_us_per_token=us_per_token),
        publish_us=round(setting.publish_us),
        build_us=fixed.BUILD_US,
    )


def resized(setting: Setting, plan: JobPlan, gpus: int) -> JobPlan:
    """The same job with a trainer of another size, as fast per GPU as before."""
    each = plan.train.service.train_us_per_token * plan.train.gpus / gpus
    return structs.replace(plan, train=_trainer(setting, gpus, each))


def colocated(setting: Setting, plan: JobPlan) -> JobPlan:
    """The same job with samplers on all of its trainer's GPUs: the phases alternate, so its samples are never old."""
    replicas = setting.train_gpus // setting.replica_gpus
    return structs.replace(plan, lag=0, sample=structs.replace(plan.sample, replicas=replicas))


def right_size(setting: Setting) -> int:
    """Training GPUs of a right-sized split: the fewest that hold the state and are busy at most RIGHT_SIZED_DUTY.

    Whole nodes, or 1, 2 or 4 GPUs of one.
    """
    room = fixed.GPU_BYTES - fixed.RESIDUAL_BYTES
    need = max(setting.state_bytes / room, setting.train_gpus * setting.train_share / fixed.RIGHT_SIZED_DUTY)
    sizes = [1, 2, 4, *range(NODE, setting.train_gpus, NODE)]
    return next((size for size in sizes if size >= need), setting.train_gpus)


def staggered(plans: Sequence[JobPlan], step_us: float) -> tuple[JobPlan, ...]:
    """Jobs that arrive a k-th of a step apart."""
    apart = step_us / len(plans) if fixed.STAGGER else 0.0
    return tuple(structs.replace(plan, arrival_us=round(number * apart)) for number, plan in enumerate(plans))


def workload(name: str, plans: Sequence[JobPlan], seed: int, *, train: int, sample: int, both: int = 0) -> Workload:
    """GPUs for trainers, for samplers and for both; each a whole number of nodes."""
    per_node = min(NODE, *(gpus for gpus in (train, sample, both) if gpus))
    cluster = Cluster(
        nodes=(train + sample + both) // per_node,
        per_node=per_node,
        bytes=fixed.GPU_BYTES,
        host_bytes=fixed.HOST_BYTES * per_node // NODE,
        train_nodes=train // per_node,
        sample_nodes=sample // per_node,
    )
    switch = SwitchModel(
        gbps_in=fixed.SWITCH_GBPS,
        gbps_out=fixed.SWITCH_GBPS,
        overhead_us=round(fixed.SWITCH_OVERHEAD_US),
        exchange=fixed.SWITCH_EXCHANGE,
    )
    return Workload(name=name, gpus=cluster, jobs=tuple(plans), switch=switch, seed=seed)


def whole_gangs(setting: Setting, gpus: int, k: int, private: int) -> float:
    """The mean stretch of k jobs to be expected (ours) when nothing is lost but that gangs are whole and stay in place.

    gpus: of the pool; private: rollout GPUs of each job beside it. Two trainers of more than half of the GPUs that they
    may use never run at once, so k of them take k shares of a step. And where the pool has too few GPUs for k samplers
    apart from the trainers, a trainer is also on samplers' GPUs; a rollout, which is as long as its last replica, is
    held up there for as long as training takes: with a share of a step for every layer of trainers over one sampler.
    """
    share, trainer, sampler = setting.train_share, setting.train_gpus, setting.sample_gpus
    apart = gpus if private else gpus - k * sampler
    layers = ceil(max(0, k * trainer - k * max(0, apart)) / sampler)
    serial = k * share if 2 * trainer > (gpus if layers else apart) else 1.0
    return max(1.0, serial, 1.0 + layers * share / k)


def pool_of_all(setting: Setting, k: int, busy: float) -> int:
    """GPUs of layout shared_all, in whole nodes: for SHARED_ALL_DUTY, and the trainer must fit.

    busy: GPUs that a job keeps busy on average when it is alone.
    """
    nodes = ceil(k * busy / fixed.SHARED_ALL_DUTY / NODE)
    return max(nodes * NODE, setting.train_gpus)
