"""What is learned of the nodes' links, and what is expected by it."""

import pytest
from msgspec import structs

from plexrl.scheduler.bandwidth import LEAST_BYTES, Bandwidth, Link, Rate, SwitchCost
from plexrl.types import Moved

GB = 10**9


def test_the_prior_until_something_was_seen():
    links = Bandwidth(bytes_per_us=1000)
    assert links.switch_us(["n"], GB) == 1_000_000 and links.links == {} and links.bands() == {}
    links.moved("n", Moved(bytes_in=GB, seconds=0.25))
    # The other way is expected as before, and the longer direction decides.
    assert links.switch_us(["n"], GB) == 1_000_000
    links.moved("n", Moved(bytes_out=GB, seconds=0.5))
    assert links.switch_us(["n"], GB) == 500_000
    assert links.switch_us(["n", "unseen"], GB) == 1_000_000  # a gang waits for its slowest node


def test_waiting_for_another_is_not_the_links_doing():
    links = Bandwidth(1000)
    links.moved("n", Moved(bytes_in=GB, seconds=1.5, waited_s=1.4))
    assert links.links["n"].gbps_in == pytest.approx(10)


def test_small_moves_tell_nothing_of_the_link():
    rate = Rate(0.0)
    rate.observe(LEAST_BYTES - 1, 10**6)
    assert rate.gbps == 0
    rate.observe(GB, 10**5)
    assert rate.gbps == pytest.approx(10)


def test_the_newest_weigh_most():
    rate = Rate(0.0)
    for _ in range(20):
        rate.observe(GB, 10**6)
    for _ in range(20):
        rate.observe(GB, 10**5)
    assert rate.gbps == pytest.approx(10, rel=0.01)


def test_overhead_is_what_the_copies_leave_of_a_switch():
    links = Bandwidth(1000)
    for _ in range(9):
        links.moved("n", Moved(bytes_in=GB, seconds=0.1))
        links.moved("n", Moved(bytes_out=GB, seconds=0.1))
        links.took("n", 130_000, 100_000)
    links.took("n", 90_000, 100_000)  # clocks of two processes: never below nothing
    assert 20_000 < links.links["n"].overhead_us < 30_000
    assert links.switch_us(["n"], GB) == pytest.approx(100_000 + links.links["n"].overhead_us, abs=2)


def test_nvme_one_after_the_other_on_a_node_and_nodes_at_once():
    links = Bandwidth(1000, gbps_nvme=2.0)
    assert links.refill_us([]) == 0
    assert links.refill_us([("n", GB), ("n", GB), ("m", GB)]) == 1_000_000
    links.refilled("n", 4 * GB, 1.0)
    links.spilled("n", GB, 1.0)
    assert links.refill_us([("n", GB), ("n", GB), ("m", GB)]) == 500_000
    assert links.links["n"].gbps_spill == pytest.approx(1)


def test_what_an_earlier_pool_learned_is_where_the_next_begins():
    links = Bandwidth(1000)
    links.moved("n", Moved(bytes_in=GB, seconds=0.1))
    links.moved("n", Moved(bytes_out=GB, seconds=0.2))
    links.took("n", 230_000, 200_000)
    again = Bandwidth(1000)
    again.restore(links.links)
    assert structs.astuple(again.links["n"]) == pytest.approx(structs.astuple(links.links["n"]))
    assert again.switch_us(["n"], GB) == links.switch_us(["n"], GB) == 230_000
    again.moved("n", Moved(bytes_in=GB, seconds=1.0))
    assert 1 <= again.links["n"].gbps_in < 2  # what is new outweighs what is old


def test_nodes_are_told_apart_by_tenths():
    links = Bandwidth(1000)
    links.restore({name: Link(gbps_in=g, gbps_out=g, moves=1) for name, g in (("a", 20.0), ("b", 19.0), ("c", 10.0))})
    links.restore({"half": Link(gbps_in=20.0, moves=1)})
    assert links.bands() == {"a": 0, "b": 0, "c": 10}


def test_a_refill_comes_on_top_and_is_not_learned_as_a_switch():
    cost = SwitchCost(100)
    cost.refill_us = 50
    assert cost.mean == 150 and cost.upper == 250
    cost.refill_us, cost.spent_us = 0, 60
    cost.observe(100)
    assert cost.mean == 40
    cost.observe(40)
    assert cost.mean == 40
