"""Virtual workers: what switches take, what they report, what they refuse."""

import pytest

from plexrl.scheduler import Build, Dropped, Placed, Policy, Prefetch, Relocate, Scheduler, Switch
from plexrl.scheduler.costs import ServiceModel, SwitchModel
from plexrl.sim.cluster import VirtualCluster
from plexrl.sim.copies import END_US
from plexrl.sim.engine import SampleEngine, TrainEngine
from plexrl.types import Extent, Gang, Placement, PlexrlError

GPUS = {"n:0": 100, "n:1": 100, "n:2": 100}
SLOW = SwitchModel(gbps_in=1e-3, gbps_out=0.5e-3, overhead_us=7)  # a byte: 1 us in, 2 us out


class Deaf:
    """Takes every event for the record, and wants nothing."""

    def __init__(self):
        self.told = []
        self.wake = None

    def __getattr__(self, name):
        def event(now, *args):
            self.told.append((name, now, *args))
            return []

        return event

    def wake_at(self):
        return self.wake


def cluster(switch=SLOW):
    made = VirtualCluster(Deaf(), switch)
    made.on_built = lambda engine: None
    return made


def engine(made, name, gpus, bytes=40, kind=TrainEngine, changed=False, build_us=0):
    one = kind(made, name, name.rpartition("/")[0], tuple(gpus), ServiceModel(), bytes, bytes, build_us)
    made.install(one)
    if changed:
        one.changed = True
    return one


def after(made, action):
    """When the action was answered, and how."""
    made.do([action])
    while made.step():
        pass
    return made.scheduler.told[-1][:3]


@pytest.mark.parametrize(("exchange", "us"), [(False, 7 + 40 + 80), (True, 7 + 80)])
def test_a_switch_takes_both_ways_or_the_longer_one(exchange, us):
    made = cluster(SwitchModel(gbps_in=1e-3, gbps_out=0.5e-3, overhead_us=7, exchange=exchange))
    engine(made, "a/0", ["n:0"])
    engine(made, "b/0", ["n:0"], changed=True)
    assert after(made, Switch("a/0", ("b/0",))) == ("switched", us, "a/0")
    assert not made.engines["b/0"].changed
    assert made.switches == 1


def test_what_did_not_change_does_not_move_out():
    made = cluster()
    engine(made, "a/0", ["n:0"])
    engine(made, "b/0", ["n:0"])
    engine(made, "s/0", ["n:0"], kind=SampleEngine)
    assert after(made, Switch("a/0", ("b/0", "s/0"))) == ("switched", 47, "a/0")


def test_engines_that_are_ended_end_before_others_come_and_are_built_with_their_state():
    made = cluster()
    for name in ("a/0", "b/0"):
        engine(made, name, ["n:0"], build_us=100).loaded()
    assert after(made, Switch("a/0", (), ("b/0",))) == ("switched", END_US + 47, "a/0")
    assert made.scheduler.told[-2] == ("unbuilt", END_US + 47, "b/0") and made.ends == 1
    now = made.now
    assert after(made, Build("b/0", ("a/0",))) == ("built", now + 47 + 100, "b/0")


def test_gpus_copy_beside_each_other():
    made = cluster()
    engine(made, "a/0", ["n:0", "n:1"])
    engine(made, "b/0", ["n:0"], changed=True)
    engine(made, "c/0", ["n:1", "n:2"], changed=True)
    assert after(made, Switch("a/0", ("b/0", "c/0"))) == ("switched", 7 + 40 + 80, "a/0")


def test_two_that_leave_one_gpu_share_its_link():
    made = cluster()
    engine(made, "a/0", ["n:0"])
    engine(made, "b/0", ["n:0"], changed=True)
    engine(made, "c/0", ["n:0"], bytes=10, changed=True)
    assert after(made, Switch("a/0", ("b/0", "c/0"))) == ("switched", 7 + 40 + 80 + 20, "a/0")


def test_the_slowest_gpu_may_be_one_that_takes_nothing_in():
    made = cluster()
    engine(made, "a/0", ["n:0"], bytes=1)
    engine(made, "b/0", ["n:0", "n:1"], changed=True)
    engine(made, "c/0", ["n:1"], changed=True)
    assert after(made, Switch("a/0", ("b/0", "c/0"))) == ("switched", 7 + 160, "a/0")


def test_a_build_waits_for_those_that_leave():
    made = cluster()
    built = []
    made.on_built = built.append
    one = engine(made, "a/0", ["n:0"], build_us=1000)
    engine(made, "b/0", ["n:0"], changed=True)
    assert after(made, Build("a/0", ("b/0",))) == ("built", 1000 + 7 + 80, "a/0")
    assert built == [one]
    assert after(made, Build("a/0"))[0] == "built"  # anew, at another place: its job has begun long since
    assert built == [one]


def test_a_prefetch_is_hidden_and_counted():
    made = cluster()
    engine(made, "a/0", ["n:0", "n:1"])
    assert after(made, Prefetch("a/0")) == ("prefetched", 47, "a/0")
    assert (made.prefetches, made.switches, made.hidden_us) == (1, 0, 94)


def test_a_prefetch_for_a_job_that_ended_is_not_answered():
    made = cluster()
    one = engine(made, "a/0", ["n:0"])
    made.do([Prefetch("a/0")])
    made.uninstall(one)
    while made.step():
        pass
    assert made.scheduler.told == []


def test_a_group_moves_with_what_it_holds():
    made = cluster()
    one = engine(made, "a/0", ["n:0"], changed=True)
    there = Placement("a", (Gang("a/0", "a", ("n:2",), (Extent(None, 40),)),))
    assert after(made, Relocate("a", there)) == ("relocated", 80, "a")
    assert one.gpus == ("n:2",)
    made.at(100, made.uninstall, one)
    made.step()
    assert made.held_us == made.train_held_us == 100


def test_a_gpu_of_two_is_held_once():
    made = cluster()
    one = engine(made, "a/0", ["n:0"])
    other = engine(made, "s/0", ["n:0", "n:1"], kind=SampleEngine)
    made.at(10, made.uninstall, one)
    made.at(30, made.uninstall, other)
    made.step()
    made.step()
    assert (made.held_us, made.train_held_us) == (60, 10)


def test_dropped_calls_are_a_fault():
    with pytest.raises(PlexrlError, match="dropped c1"):
        cluster().do([Dropped(("c1",))])


def test_a_scheduler_that_does_not_come_to_rest_is_named():
    made = cluster()
    made.scheduler.wake = 5
    with pytest.raises(PlexrlError, match="ticks at 5 us"):
        while made.step():
            pass


def test_what_comes_at_one_time_goes_in_the_order_in_which_it_was_set():
    made, seen = cluster(), []
    for what in "abc":
        made.at(5, seen.append, what)
    made.at(3, seen.append, "first")
    while made.step():
        pass
    assert seen == ["first", "a", "b", "c"]


def test_placements_are_passed_on():
    made, placed = cluster(), []
    made.on_placed = placed.append
    action = Placed("job", ())
    made.do([action])
    assert placed == [action]


def test_it_drives_the_live_class():
    assert VirtualCluster(Scheduler(GPUS, Policy()), SLOW).step() is False
