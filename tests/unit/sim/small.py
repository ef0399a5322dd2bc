"""Small workloads whose times can be worked out by hand: no drift, no spread, equal samples."""

from msgspec import structs

from plexrl.scheduler import Policy
from plexrl.scheduler.costs import ServiceModel, SwitchModel
from plexrl.sim.workload import Cluster, JobPlan, Lengths, Rollout, SamplePlan, TrainPlan, Workload

MS = 1_000
S = 1_000_000
GIB = 1 << 30
SWITCH = SwitchModel(gbps_in=1.0, gbps_out=1.0, overhead_us=0, exchange=False)  # 1,000 bytes per microsecond
# Nothing is kept, nothing is gathered, whole calls: what happens when can be told in one's head.
PLAIN = Policy(
    placement="spread",
    order="fifo",
    anticipation_us=0,
    gradient_anticipation_us=0,
    quantum_us=3600 * S,
    min_turn_factor=0.0,
    gather_share=1.0,
    backfill=False,
    prefetch=False,
    natural_ends=False,
)
EQUAL = Lengths(max_tokens=1000, mean_tokens=1000.0, sigma_prompt=0.0, sigma_sample=0.0, at_cap=1.0, drift=0.0)


def job(name: str, **changed: object) -> JobPlan:
    """One trainer GPU, one sampler GPU; a step: 1 s of rollout, then training of 2 s, then 0.1 s of publishing."""
    plan = JobPlan(
        job=name,
        user=name,
        steps=1,
        reward_us=0,
        train=TrainPlan(
            gpus=1,
            device_bytes=1000,
            host_bytes=1000,
            residual_bytes=0,
            calls=1,
            build_us=0,
            publish_us=100 * MS,
            service=ServiceModel(train_us_per_token=2 * S / 1000),
        ),
        sample=SamplePlan(
            replicas=1,
            gpus=1,
            device_bytes=1000,
            host_bytes=1000,
            residual_bytes=0,
            build_us=0,
            service=ServiceModel(decode_base_us=1000.0),
        ),
        rollout=Rollout(prompts=1, group=1, calls=1, lengths=structs.replace(EQUAL, prompt_tokens=0)),
    )
    return structs.replace(plan, **changed)


def workload(*jobs: JobPlan, train: int = 1, sample: int = 2, any_role: int = 0, **changed: object) -> Workload:
    """One GPU per node: so many for trainers, for samplers, and for both."""
    given = Workload(
        name="small",
        gpus=Cluster(
            nodes=train + sample + any_role,
            per_node=1,
            bytes=100_000,
            host_bytes=0,
            train_nodes=train,
            sample_nodes=sample,
        ),
        jobs=jobs,
        switch=SWITCH,
    )
    return structs.replace(given, **changed)


def train(plan: JobPlan, **changed: object) -> JobPlan:
    """The plan with another trainer."""
    return structs.replace(plan, train=structs.replace(plan.train, **changed))


def sample(plan: JobPlan, **changed: object) -> JobPlan:
    """The plan with another sampler."""
    return structs.replace(plan, sample=structs.replace(plan.sample, **changed))
