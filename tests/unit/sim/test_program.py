"""What a job submits, and when."""

from msgspec import structs

from plexrl.sim.program import GAP_US, Loop
from plexrl.sim.run import run
from plexrl.types import CallKind, Role
from tests.unit.sim.small import PLAIN, S, job, sample, train, workload


class Recorder:
    """A cluster that ends every call when it is told to."""

    def __init__(self):
        self.now = 0
        self.calls = []
        self.later = []

    def submit(self, call, task):
        self.calls.append((call, task))

    def at(self, us, what, about):
        self.later.append((us, what, about))

    def end(self):
        """End what is open, then let what was set happen."""
        calls, self.calls = self.calls, []
        for _, task in calls:
            task.done(task)
        later, self.later = sorted(self.later, key=lambda item: item[0]), []
        for us, what, about in later:
            self.now = max(self.now, us)
            what(about)
        return [call for call, _ in calls]


def started(plan):
    made, ended = Recorder(), []
    program = Loop(made, plan, 0, ended.append)
    program.start()
    return made, program, ended


def test_a_step_in_order():
    plan = train(job("a", steps=2, reward_us=3 * S), calls=3)
    made, program, ended = started(plan)
    assert [call.kind for call in made.end()] == [CallKind.SAMPLE]
    assert made.now == 3 * S
    kinds = [call.kind for call in made.end()]
    assert kinds == [CallKind.FORWARD_BACKWARD] * 3 + [CallKind.OPTIM_STEP]
    assert made.now == 3 * S + GAP_US
    (publish,) = made.end()
    assert (publish.kind, publish.seq, program.version) == (CallKind.PUBLISH, 5, 1)
    assert [call.kind for call, _ in made.calls] == [CallKind.SAMPLE]
    for _ in range(3):
        made.end()
    assert ended == [program]
    assert [step.step for step in program.steps] == [0, 1]


def test_the_tokens_of_a_step_are_all_trained_once():
    plan = train(job("a"), calls=3)
    made, program, _ = started(plan)
    made.end()
    passes = [call for call in made.end() if call.kind is CallKind.FORWARD_BACKWARD]
    assert sum(call.units for call in passes) == program.tokens == 1000


def test_calls_tell_what_can_be_known_of_them():
    plan = structs.replace(job("a"), rollout=structs.replace(job("a").rollout, prompts=4, calls=2))
    made, _, _ = started(plan)
    assert [(call.units, call.cost_us) for call, _ in made.calls] == [(2000, 1 * S)] * 2
    made.end()
    first = made.calls[0][0]
    assert (first.kind, first.cost_us, first.units, first.seq) == (CallKind.FORWARD_BACKWARD, 8 * S, 4000, 1)


def test_one_step_ahead_and_no_further():
    made, program, _ = started(job("a", steps=5, lag=1))
    made.end()  # rollout 0; training 0 and rollout 1 are submitted
    assert sorted(call.kind for call, _ in made.calls) == ["forward_backward", "optim_step", "sample"]
    made.calls = [item for item in made.calls if item[0].kind is CallKind.SAMPLE]
    made.end()  # rollout 1 is over, and weights 1 are not there yet
    assert made.calls == []
    assert program.version == 0


def test_a_job_asks_for_both_of_its_groups():
    plan = sample(train(job("a"), gpus=2, residual_bytes=5), replicas=3)
    program = Loop(Recorder(), plan, 0, print)
    trainer, sampler = program.specs((0.25, None))
    assert (trainer.group, trainer.role, trainer.gang_size, trainer.replicas, trainer.duty) == (
        "a.train",
        Role.TRAIN,
        2,
        1,
        0.25,
    )
    assert (sampler.group, sampler.role, sampler.gang_size, sampler.replicas, sampler.duty) == (
        "a.sample",
        Role.SAMPLE,
        1,
        3,
        None,
    )
    assert trainer.residual_bytes == 5
    assert trainer.owner == sampler.owner == "a"


def test_steps_are_reported_from_rollout_to_publication():
    found = run(workload(job("a", steps=2)), PLAIN)
    first, second = found.steps
    assert (first.step, first.start_us) == (0, 0)
    assert second.start_us == first.end_us + GAP_US
    assert found.jobs[0].steps == 2
