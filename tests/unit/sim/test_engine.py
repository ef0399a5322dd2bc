"""Virtual engines by hand: rates, joins, pauses, caches, what a switch moves."""

from heapq import heappop, heappush

import pytest

from plexrl.scheduler.costs import ServiceModel
from plexrl.sim.engine import GRADIENTS, MICRO_US, SampleEngine, TrainEngine
from plexrl.sim.tasks import SampleTask, TrainTask
from plexrl.types import CallKind
from tests.unit.sim.small import SWITCH

SERVICE = ServiceModel(prefill_us_per_token=10.0, decode_base_us=100.0, decode_us_per_sequence=10.0)


class Clock:
    """The part of a cluster that engines use."""

    def __init__(self):
        self.now = 0
        self.switch = SWITCH
        self.ended: list[tuple[str, int]] = []
        self._heap = []
        self._number = 0

    def next(self):
        self._number += 1
        return self._number

    def at(self, us, what, about):
        heappush(self._heap, (max(us, self.now), self.next(), what, about))

    def until(self, us):
        while self._heap and self._heap[0][0] <= us:
            self.now, _, what, about = heappop(self._heap)
            what(about)
        self.now = us

    def finished(self, task):
        self.ended.append((task.call, self.now))


@pytest.fixture
def clock():
    return Clock()


def sampler(clock, service=SERVICE, bytes=1000):
    return SampleEngine(clock, "g/0", "g", ("n:0",), service, bytes, bytes, 0)


def trainer(clock):
    return TrainEngine(clock, "t/0", "t", ("n:0",), ServiceModel(), 1000, 800, 0)


def draw(name, tokens=100, batch=1, prompt=0, version=0, units=0, cache=None, published_us=0):
    return SampleTask(
        name,
        lambda task: None,
        deployment="d",
        prompt=prompt,
        tokens=tokens,
        batch=batch,
        units=units,
        version=version,
        published_us=published_us,
        about=None,
        cache=cache,
    )


def work(name, us=1000, kind=CallKind.FORWARD_BACKWARD):
    return TrainTask(name, lambda task: None, kind=kind, work_us=us, units=1, about=0)


def test_calls_decode_together_and_who_joins_slows_all(clock):
    engine = sampler(clock)
    engine.run([draw("a", 100)])
    clock.until(5500)  # 50 steps of 110 us
    engine.run([draw("b", 100)])
    clock.until(100_000)
    # a: 50 more steps of 120 us. b: these 50, then 50 of 110.
    assert clock.ended == [("a", 11_500), ("b", 17_000)]


def test_a_batch_counts_its_sequences(clock):
    engine = sampler(clock)
    engine.run([draw("a", 100, batch=5)])
    clock.until(100_000)
    assert clock.ended == [("a", 100 * 150)]


def test_calls_that_end_at_once_are_told_one_after_the_other(clock):
    engine = sampler(clock)
    engine.run([draw("a"), draw("b")])
    clock.until(100_000)
    assert clock.ended == [("a", 12_000), ("b", 12_000)]
    assert not engine.live


def test_prefill_holds_up_everybody(clock):
    engine = sampler(clock)
    engine.run([draw("a", 100)])
    clock.until(1100)  # 10 steps
    engine.run([draw("b", 10, prompt=50)])  # 500 us of prefill
    clock.until(100_000)
    assert clock.ended == [("b", 1100 + 500 + 10 * 120), ("a", 1100 + 500 + 10 * 120 + 80 * 110)]


def test_a_paused_call_goes_on_where_it_was(clock):
    engine = sampler(clock)
    task = draw("a", 100, prompt=20, units=100)
    engine.run([task])
    clock.until(200 + 50 * 110)
    assert engine.pause_us() == 110
    assert engine.pause() == ("a",)
    clock.until(50_000)
    assert clock.ended == []
    engine.run([task])  # its cache is still there
    clock.until(100_000)
    assert clock.ended == [("a", 50_000 + 50 * 110)]


def test_after_an_offload_the_prefix_is_computed_again(clock):
    engine = sampler(clock)
    task = draw("a", 100, prompt=20, units=100)
    engine.run([task])
    clock.until(200 + 50 * 110)
    engine.pause()
    engine.offloaded()
    engine.loaded()
    clock.until(50_000)
    engine.run([task])
    clock.until(100_000)
    assert clock.ended == [("a", 50_000 + (20 + 50) * 10 + 50 * 110)]


def test_a_gathered_call_is_computed_again_where_it_goes(clock):
    engine, other = sampler(clock), sampler(clock)
    task = draw("a", 100, units=100)
    engine.run([task])
    clock.until(50 * 110)
    engine.pause()
    other.run([task])
    clock.until(100_000)
    assert clock.ended == [("a", 50 * 110 + 50 * 10 + 50 * 110)]


def test_new_weights_are_taken_in_once_and_a_load_brings_them(clock):
    engine = sampler(clock, bytes=3_000_000)  # 3 ms
    engine.run([draw("a", 10, version=0)])
    clock.until(5000)
    engine.run([draw("b", 10, version=1)])
    clock.until(20_000)
    engine.run([draw("c", 10, version=1)])
    clock.until(30_000)
    engine.loaded()
    engine.run([draw("d", 10, version=2, published_us=29_000)])
    clock.until(100_000)
    assert clock.ended == [("a", 1100), ("b", 5000 + 3000 + 1100), ("c", 21_100), ("d", 31_100)]


def test_weights_that_are_newer_than_the_load_are_taken_in(clock):
    engine = sampler(clock, bytes=3_000_000)
    clock.until(1000)
    engine.loaded()
    engine.run([draw("a", 10, version=5, published_us=2000)])
    clock.until(100_000)
    assert clock.ended == [("a", 1000 + 3000 + 1100)]


def test_a_sampler_has_nothing_to_copy_out(clock):
    engine = sampler(clock)
    engine.run([draw("a", 10)])
    clock.until(100_000)
    assert (engine.bytes_in(), engine.bytes_out()) == (1000, 0)


def test_a_forward_backward_stops_at_its_next_micro_batch(clock):
    engine = trainer(clock)
    task = work("f", 4 * MICRO_US)
    engine.run([task])
    assert engine.pause_us() == MICRO_US  # one at least, or it would never end
    clock.until(MICRO_US + 100)
    assert engine.pause_us() == MICRO_US - 100
    clock.until(2 * MICRO_US)
    assert engine.pause() == ("f",)
    clock.until(10 * MICRO_US)
    assert clock.ended == []
    engine.run([task])
    clock.until(20 * MICRO_US)
    assert clock.ended == [("f", 12 * MICRO_US)]


@pytest.mark.parametrize("kind", [CallKind.OPTIM_STEP, CallKind.PUBLISH])
def test_other_training_calls_are_not_broken_off(clock, kind):
    engine = trainer(clock)
    engine.run([work("o", 4 * MICRO_US, kind)])
    clock.until(MICRO_US)
    assert engine.pause_us() == 3 * MICRO_US
    clock.until(4 * MICRO_US)
    assert clock.ended == [("o", 4 * MICRO_US)]
    assert engine.pause() == ()


def test_what_a_trainer_moves_depends_on_where_it_is_in_its_step(clock):
    engine = trainer(clock)
    gradients = 800 // GRADIENTS
    assert (engine.bytes_in(), engine.bytes_out()) == (1000, 0)
    engine.run([work("f")])
    clock.until(2000)
    assert (engine.bytes_in(), engine.bytes_out()) == (1000 + gradients, gradients)
    engine.run([work("o", kind=CallKind.OPTIM_STEP)])
    clock.until(4000)
    assert (engine.bytes_in(), engine.bytes_out()) == (1000, 800)
    engine.offloaded()
    assert (engine.bytes_in(), engine.bytes_out()) == (1000, 0)
