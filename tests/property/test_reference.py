"""The class's granting decisions against a slow and obvious reference, over random lives."""

from random import Random

import pytest

from plexrl.scheduler import Policy
from plexrl.types import CallKind, DoesNotFit, JobClass, Residency, Role
from tests.property.reference import Checked
from tests.property.test_scheduler import TRAINING
from tests.unit.scheduler.executor import MS, Executor, S


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("order", ["fifo", "round_robin", "hrrs", "fair"])
def test_every_grant_is_the_references(order, virtual):
    Checked.decisions = Checked.blocked = Checked.starved = 0
    for seed in range(12):
        live(Random(seed), order, virtual)
    assert Checked.decisions > 500 and Checked.blocked > 100 and Checked.starved > 20


def live(random: Random, order: str, virtual: bool) -> None:
    """Some gangs, a few hundred events."""
    gpus = {f"n{n}:{i}": 1024 for n in range(random.randint(1, 2)) for i in range(random.randint(2, 4))}
    policy = Policy(
        order=order,
        backfill=False,
        anticipation_us=random.choice([0, 50 * MS]),
        quantum_us=random.choice([300 * MS, 5 * S]),
        sample_quantum_us=random.choice([300 * MS, 5 * S]),
        starvation_us=random.choice([3 * S, 300 * S]),
    )
    ex = Executor(gpus, policy, virtual=virtual, kind=Checked)
    for job in range(4):
        kind = random.choice([JobClass.NORMAL, JobClass.NORMAL, *JobClass])
        ex.enroll(f"j{job}", kind, account=f"a{job % 2}", user=f"u{job}", priority=random.choice([0, 0, 1]))
    groups = []
    for i in range(8):
        role, size, wide = (
            random.choice(list(Role)),
            random.choice([256, 512, 896]),
            random.randint(1, min(3, len(gpus))),
        )
        rows = [random.sample(sorted(gpus), wide) for _ in range(1 if role is Role.TRAIN else random.randint(1, 2))]
        offset = random.randrange(0, 1024 - size + 1, 128)
        try:
            ex.put(f"g{i}", role, f"j{i % 4}", rows, size, offset, residual_bytes=8 if virtual else 0)
        except DoesNotFit:
            continue
        groups.append((f"g{i}", role))
    for seq in range(200):
        group, role = random.choice(groups)
        kind = random.choice(TRAINING) if role is Role.TRAIN else CallKind.SAMPLE
        ex.submit(group, f"{group}-{random.randrange(2)}", kind, seq, f"j{random.randrange(4)}", random.randrange(20))
        for _ in range(random.randrange(6)):
            ex.wait(random.choice([0, 5 * MS, 60 * MS, 700 * MS]))
            ex.step(random)
        for name, state in ex.scheduler.gangs.items():
            if state.residency is Residency.LOST and random.random() < 0.5:
                ex.do(ex.scheduler.rebuild(ex.now, name))
                break
