"""Hand-made histories for the accounting tests."""

from plexrl.types import Call, CallKind, Epoch, Extent, Gang, GroupSpec, Moved, Placement, Role, Span, SpanClass
from plexrl.types import records as r

S = 1_000_000
T0 = 1_700_000_000 * S - (1_700_000_000 * S) % (60 * S)


class Scene:
    """Writes records; times in seconds after T0."""

    def __init__(self, gpus=("n1:0", "n2:0"), slurm_job=7, allocated=0.0, start=2.0):
        self.gpus, self.slurm_job = gpus, slurm_job
        self.records = []
        self.epoch(allocated, start)

    def us(self, seconds):
        return T0 + round(seconds * S)

    def epoch(self, allocated, start):
        self.add(
            r.EpochStarted,
            start,
            epoch=Epoch(int(start), self.slurm_job, 0),
            pool="lab",
            instance=f"i{start}",
            gpus=self.gpus,
            slurm_job=self.slurm_job,
            allocated_us=self.us(allocated),
        )

    def add(self, record, at, /, **fields):
        self.records.append(record(now_us=self.us(at), **fields))

    def attach(self, at, job, uid=1001, user="ada", account="ml", **more):
        slurm_job = int(job.split(".")[0])
        self.add(r.JobAttached, at, job=job, slurm_job=slurm_job, uid=uid, user=user, account=account, **more)

    def place(self, at, group, role, gang_size=1, replicas=1, owner="", device_bytes=100):
        gangs = []
        for replica in range(replicas):
            gpus = self.gpus[:gang_size] if role is Role.TRAIN else (self.gpus[replica % len(self.gpus)],)
            gangs.append(Gang(f"{group}/{replica}", group, gpus, tuple(Extent(0, device_bytes) for _ in gpus)))
        spec = GroupSpec(
            group=group, role=role, owner=owner, gang_size=gang_size, replicas=replicas, device_bytes=device_bytes
        )
        self.add(
            r.GroupPlaced, at, spec=spec, placement=Placement(group, tuple(gangs)), base="m", kind="lora", model=""
        )

    def model(self, at, job, model, group, uid=1001):
        self.add(
            r.ModelCreated,
            at,
            model=model,
            session="s",
            job=job,
            uid=uid,
            account="ml",
            base="m",
            lora_rank=8,
            seed=0,
            attn=True,
            mlp=True,
            unembed=True,
            group=group,
        )

    def call(self, at, job, id, group, kind=CallKind.SAMPLE, after="", uid=1001, **fields):
        call = Call(id=id, kind=kind, group=group, deployment="d", job=job, units=10, **fields)
        self.add(r.CallAccepted, at, call=call, uid=uid, digest="x", work={"path": "secret"}, body=b"", after=after)

    def end(self, at, job, id, cpu, gang, delivered=None, units=10, wall=None):
        wall_us = round((cpu if wall is None else wall) * S)
        self.add(r.CallEnded, at, id=id, ok=True, cpu_us=round(cpu * S), wall_us=wall_us, units=units, gang=gang)
        if delivered is not False:
            self.add(r.Delivered, at if delivered is None else delivered, id=id, job=job)

    def span(self, gpu, start, end, kind, gang="", **shares):
        weights = tuple((job.replace("j", "").replace("_", "."), weight) for job, weight in shares.items())
        span = Span(gpu, self.us(start), self.us(end), SpanClass(kind), gang, weights)
        self.add(r.SpanClosed, end, span=span)

    def switched(self, at, gang, gpu, incoming=True, bytes_in=0, bytes_out=0, seconds=0.0):
        moved = Moved(bytes_in=bytes_in, bytes_out=bytes_out, seconds=seconds)
        self.add(r.Switched, at, gang=gang, gpu=gpu, incoming=incoming, moved=moved)

    def job_ended(self, at, job):
        self.add(r.JobEnded, at, job=job, reason="it ended")

    def stop(self, at):
        self.add(r.EpochEnded, at, reason="stopped")

    def intervals(self, end, start=0.0):
        return [
            r.AgentInterval(
                now_us=self.us(end),
                node=gpu.split(":")[0],
                gpu=gpu,
                slurm_job=self.slurm_job,
                start_us=self.us(start),
                end_us=self.us(end),
                final=True,
            )
            for gpu in self.gpus
        ]
