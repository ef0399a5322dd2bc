"""What the leader of a gang holds, runs, gives up: with the engine that computes nothing."""

import multiprocessing

import pytest
from msgspec import structs
from tinker.proto import tinker_public_pb2 as pb

from plexrl.engines import noop
from plexrl.engines.protocol import EngineSpec, Undone
from plexrl.pool.lockstep import Lockstep
from plexrl.pool.messages import Outcome, Work
from plexrl.pool.samplehost import SampleHost
from plexrl.pool.trainhost import TrainHost, TrainRank, follow
from plexrl.types import CallKind, Moved, PlexrlError, Role


def trainer() -> TrainHost:
    engine = noop.build(EngineSpec(engine="noop", role=Role.TRAIN, kind="lora", model_dir=""))
    return TrainHost(TrainRank(engine, 0, "n", True), Lockstep(0, 1, "", ""))


def work(number: int, kind: CallKind = CallKind.FORWARD_BACKWARD, deployment: str = "d") -> Work:
    body = pb.ForwardBackwardRequest().SerializeToString() if kind is CallKind.FORWARD_BACKWARD else b"{}"
    return Work(id=f"c{number}", kind=kind, deployment=deployment, seq=number, args={"version": ""}, body=body)


def next_end(host: TrainHost) -> Outcome:
    """Step until a call ends."""
    while True:
        for outcome in host.step():
            return outcome


def test_a_call_runs_to_its_end_and_is_kept_until_acknowledged():
    host = trainer()
    assert not host.busy
    assert host.run((work(1), work(2, CallKind.OPTIM_STEP))) == []
    assert host.held() == ("c1", "c2") and host.busy
    assert host.step() == []
    first, second = next_end(host), next_end(host)
    assert (first.id, first.ok, second.id, second.ok) == ("c1", True, "c2", True)
    assert not host.busy and list(host.outcomes) == ["c1", "c2"]
    # A new head that had not heard asks again; nothing is applied twice.
    assert host.run((work(1), work(2))) == [first, second]
    assert not host.held()


def test_a_pause_in_the_middle_of_a_call_and_on():
    host = trainer()
    host.run((work(1), work(2)))
    host.step()
    assert host.pause() == ("c1", "c2")
    assert not host.busy
    host.run((work(1),))
    assert host.held() == ("c1", "c2")
    assert next_end(host).id == "c1"


def test_a_cancelled_call_ends_begun_or_not():
    host = trainer()
    host.run((work(1), work(2)))
    host.step()
    for call in ("c2", "c1"):
        (outcome,) = host.cancel(call)
        assert (outcome.id, outcome.ok) == (call, False)
    assert not host.held() and not host.busy
    assert host.cancel("c1") == []
    host.run((work(3),))
    assert next_end(host).ok


def test_dropping_a_deployment_gives_up_its_call_that_is_half_done():
    host = trainer()
    for name in ("d", "e"):
        slab = {"name": "s", "offset": 0, "size": 64, "owner": 1}
        args = {"deployment": name, "slabs": [slab], "lora_rank": 8, "seed": 1, "attn": True, "mlp": True}
        host.order("create", args | {"unembed": True, "folder": "", "optimizer": False})
    host.run((work(1), work(2), work(3, deployment="e")))
    host.step()
    host.order("drop", {"deployment": "d"})
    assert host.held() == ("c3",)
    assert not host.outcomes["c1"].ok
    assert next_end(host).id == "c3"
    assert host.deployments == {"e"}


def test_bad_input_ends_the_call_alone():
    host = trainer()
    bad = Work(id="c1", kind=CallKind.FORWARD, deployment="d", seq=1, args={}, body=b"\xff\xff")
    host.run((bad, work(2, CallKind.OPTIM_STEP)))
    outcome = next_end(host)
    assert (outcome.id, outcome.ok, outcome.category) == ("c1", False, "user")


def sample(number: int) -> Work:
    args = {"version": ""}
    return Work(id=f"c{number}", kind=CallKind.SAMPLE, deployment="base:b", seq=None, args=args, body=b"{}")


def test_samples_join_leave_and_are_given_again():
    host = SampleHost(noop.NoopSampler(), "n")
    host.run((sample(1), sample(2), sample(3)))
    host.cancel("c2")
    assert host.pause() == ("c1", "c3") and not host.busy
    host.run((sample(4),))
    ended = host.step()
    assert sorted(outcome.id for outcome in ended) == ["c1", "c3", "c4"]
    assert all(outcome.ok for outcome in ended)
    assert [outcome.id for outcome in host.run((sample(1),))] == ["c1"]
    assert not host.busy


def test_a_sample_is_taken_and_goes_on_elsewhere_as_if_it_had_begun_there():
    old, new = SampleHost(noop.NoopSampler(), "n"), SampleHost(noop.NoopSampler(), "n")
    old.run((sample(1), sample(2)))
    assert old.pause() == ("c1", "c2")
    drawn = old.order("take", {"calls": ["c1", "gone"]})["drawn"]
    assert old.held() == ("c2",) and drawn.keys() == {"c1"}
    drawn["c1"] |= {"cpu_us": 5_000_000.0, "wall_us": 70_000_000.0}
    moved = structs.replace(sample(1), args={"version": "", "drawn": drawn["c1"]})
    new.run((moved,))
    new.run((moved,))  # said again: it is there already
    (outcome,) = new.step()
    assert (outcome.id, outcome.ok) == ("c1", True)
    assert outcome.cpu_us >= 5_000_000 and outcome.wall_us >= 70_000_000


class Breaking(noop.NoopTrainer):
    """Fails at a verb on one rank, as a device or its neighbour may; notes what it was told."""

    def __init__(self, spec: EngineSpec, verbs: tuple[str, ...]) -> None:
        super().__init__(spec)
        self.verbs = verbs
        self.told: list[str] = []

    def _meet(self, verb: str) -> Moved:
        self.told.append(verb)
        if verb in self.verbs and self.rank == 1:
            raise RuntimeError(f"no {verb} today")
        return Moved()

    def offload(self) -> Moved:
        return self._meet("offload")

    def load_device(self) -> Moved:
        return self._meet("load")

    def undo(self) -> Moved:
        return self._meet("undo")


def follower(store: str, verbs: tuple[str, ...], queue) -> None:
    spec = EngineSpec(engine="noop", role=Role.TRAIN, kind="lora", model_dir="", rank=1, world=2)
    engine = Breaking(spec, verbs)
    follow(TrainRank(engine, 1, "n", False), Lockstep(1, 2, store, "127.0.0.1"))
    queue.put(engine.told)


@pytest.fixture
def gang_of_two(tmp_path):
    """verbs that fail on rank 1 -> the leader's host, its engine, what rank 1 was told when all is over."""
    context = multiprocessing.get_context("fork")
    queue, processes = context.Queue(), []

    def make(*verbs: str):
        processes.append(context.Process(target=follower, args=(str(tmp_path / "s"), verbs, queue), daemon=True))
        processes[0].start()
        engine = Breaking(EngineSpec(engine="noop", role=Role.TRAIN, kind="lora", model_dir="", world=2), verbs)
        host = TrainHost(TrainRank(engine, 0, "n", True), Lockstep(0, 2, str(tmp_path / "s"), "127.0.0.1"))

        def end() -> list[str]:
            host.exit()
            return queue.get(timeout=20)

        return host, engine, end

    yield make
    for process in processes:
        process.join(20)
        assert process.exitcode == 0


@pytest.mark.parametrize("verb", ["offload", "load"])
def test_a_switch_that_fails_on_one_rank_is_undone_on_all(gang_of_two, verb):
    """And a call that is half done goes on afterwards."""
    host, engine, end = gang_of_two(verb)
    host.run((work(1),))
    host.step()
    host.pause()
    with pytest.raises(Undone, match=f"no {verb} today"):
        host.order(verb, {})
    host.run(())
    assert next_end(host).ok
    assert engine.told == end() == [verb, "undo"]


def test_a_switch_that_cannot_be_undone_is_no_undone_one(gang_of_two):
    host, _, end = gang_of_two("offload", "undo")
    with pytest.raises(PlexrlError, match="no offload today.*could not be undone.*no undo today") as caught:
        host.order("offload", {})
    assert not isinstance(caught.value, Undone)
    end()


def test_a_sampler_takes_a_failed_switch_back():
    class Broken(noop.NoopSampler):
        undone = 0

        def offload(self) -> Moved:
            raise RuntimeError("no offload today")

        def undo(self) -> Moved:
            self.undone += 1
            return Moved()

    engine = Broken()
    host = SampleHost(engine, "n")
    host.run((sample(1),))
    with pytest.raises(Undone, match="no offload today"):
        host.order("offload", {})
    assert engine.undone == 1
    assert host.step()[0].ok


def test_the_cpu_time_of_a_call_includes_what_it_took_before_a_switch():
    """An order between two micro-batches is no part of the call and ends nothing of it."""
    host = trainer()
    host.run((work(1),))
    host.step()
    host._rank._cpu_us = 5_000_000
    host.order("offload", {})
    host.order("load", {})
    assert next_end(host).cpu_us >= 5_000_000
