"""Where gangs live."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from plexrl.scheduler.placement import PLACEMENTS, Floor
from plexrl.types import BadInput, DoesNotFit, Extent, Gang, GpuRole, GroupSpec, JobClass, Placement, Role, Tenant

GPUS = {f"n{n}:{i}": 1024 for n in (1, 2) for i in range(2)}


class Rules(Struct):
    """The part of a policy that placement reads."""

    placement: str
    interactive: float = 2.0
    normal: float = 4.0

    @property
    def max_stretch(self) -> dict[JobClass, float]:
        return {JobClass.INTERACTIVE: self.interactive, JobClass.NORMAL: self.normal, JobClass.SCAVENGER: inf}


def spec(
    group: str, owner: str, gang_size: int = 1, replicas: int = 1, size: int = 512, role=Role.TRAIN, **more
) -> GroupSpec:
    return GroupSpec(
        group=group, role=role, owner=owner, gang_size=gang_size, replicas=replicas, device_bytes=size, **more
    )


def choose(floor: Floor, spec: GroupSpec, placement: str, kind: JobClass = JobClass.NORMAL, **rules) -> Placement:
    return floor.choose(spec, Rules(placement, **rules), Tenant(job=spec.owner, kind=kind))


def put(floor: Floor, spec: GroupSpec, *gpus: str) -> None:
    """A gang on just these GPUs."""
    gang = Gang(f"{spec.group}/0", spec.group, gpus, (Extent(None, spec.device_bytes),) * len(gpus))
    floor.occupy(Placement(spec.group, (gang,)), spec, Tenant(job=spec.owner))


def pool(nodes: int, per_node: int, **more) -> Floor:
    return Floor({f"n{n}:{i}": 1024 for n in range(nodes) for i in range(per_node)}, virtual=True, **more)


def gpus(placement) -> list[tuple[str, ...]]:
    return [gang.gpus for gang in placement.gangs]


def test_isolated_gives_each_job_gpus_of_its_own_and_refuses_when_none_are_left():
    floor = Floor(GPUS)
    first = choose(floor, spec("a", "1", 2), "isolated")
    assert gpus(first) == [("n1:0", "n1:1")]
    assert gpus(choose(floor, spec("b", "2", 2), "isolated")) == [("n2:0", "n2:1")]
    with pytest.raises(DoesNotFit, match=r"0 are left for job 3.*pack"):
        choose(floor, spec("c", "3"), "isolated")
    assert gpus(choose(floor, spec("d", "2"), "isolated")) == [("n2:0",)]
    floor.vacate("a")
    assert gpus(choose(floor, spec("c", "3"), "isolated")) == [("n1:0",)]


def test_pack_uses_the_fewest_gpus():
    floor = Floor(GPUS)
    for i in range(4):
        assert gpus(choose(floor, spec(f"g{i}", f"{i}"), "pack")) == [("n1:0",)]


def test_trainer_and_sampler_of_one_job_share_gpus():
    floor = Floor(GPUS)
    choose(floor, spec("x", "0"), "pack")
    choose(floor, spec("t", "1", 2), "pack")
    assert gpus(choose(floor, spec("s", "1", 1, 2, role=Role.SAMPLE), "pack")) == [("n1:1",), ("n1:0",)]


def test_replicas_go_on_different_gpus_where_possible():
    floor = Floor(GPUS)
    placed = [gang[0] for gang in gpus(choose(floor, spec("s", "1", 1, 5, 64, Role.SAMPLE), "pack"))]
    assert sorted(placed[:4]) == sorted(GPUS) and placed[4] == "n1:0"


def test_a_gang_stays_on_one_node_where_possible():
    floor = Floor(GPUS)
    choose(floor, spec("a", "1"), "isolated")
    assert gpus(choose(floor, spec("b", "2", 2), "isolated")) == [("n2:0", "n2:1")]
    assert gpus(choose(floor, spec("c", "1", 2), "isolated")) == [("n1:0", "n1:1")]
    floor = Floor({"n1:0": 1024, "n2:0": 1024})
    assert gpus(choose(floor, spec("a", "1", 2), "pack")) == [("n1:0", "n2:0")]


def test_a_free_gap_is_taken_and_else_the_smallest_overlap():
    floor = Floor({"n1:0": 1024})
    assert offsets(choose(floor, spec("a", "1", size=384), "pack")) == [0]
    assert offsets(choose(floor, spec("b", "2", size=512), "pack")) == [384]
    assert offsets(choose(floor, spec("c", "3", size=100), "pack")) == [896]
    assert offsets(choose(floor, spec("d", "4", size=256), "pack")) == [0]


def test_an_overlap_with_the_own_job_comes_last():
    floor = Floor({"n1:0": 1024})
    choose(floor, spec("t", "1", size=512), "pack")
    choose(floor, spec("other", "2", size=512), "pack")
    assert offsets(choose(floor, spec("s", "1", size=512), "pack")) == [512]


def offsets(placement) -> list[int]:
    return [extent.offset for gang in placement.gangs for extent in gang.extents]


def test_extents_are_aligned_and_inside():
    floor = Floor({"n1:0": 1000})
    extents = [choose(floor, spec(f"g{i}", "1", size=300), "pack").gangs[0].extents[0] for i in range(4)]
    assert extents[:3] == [Extent(0, 320), Extent(320, 320), Extent(640, 320)]
    assert extents[3].offset % 64 == 0 and extents[3].offset + extents[3].size <= 1000


@pytest.mark.parametrize(("gang_size", "size", "says"), [(1, 1025, "1088 bytes each.*1024"), (5, 64, "needs 5 GPUs")])
def test_what_can_never_fit_is_refused_with_figures(gang_size, size, says):
    floor = Floor(GPUS)
    with pytest.raises(DoesNotFit, match=says):
        choose(floor, spec("a", "1", gang_size, size=size), "pack")
    assert not any(floor.on(gpu) for gpu in GPUS)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_at_virtual_addresses_gangs_have_no_offsets_and_only_residuals_add_up():
    floor = pool(1, 1)
    for i in range(3):
        placement = choose(floor, spec(f"g{i}", "1", size=900, residual_bytes=40), "pack")
        assert placement.gangs[0].extents == (Extent(None, 900),)
    assert floor.residual("n0:0") == 120
    # Beside three sleepers with 40 bytes each there is room for 904, but those three have room for 4 more.
    with pytest.raises(DoesNotFit, match="of 1 GPUs 1 are full"):
        choose(floor, spec("wide", "1", size=905), "pack")
    with pytest.raises(DoesNotFit, match="of 1 GPUs 1 are full"):
        choose(floor, spec("keeps", "1", size=10, residual_bytes=45), "pack")
    choose(floor, spec("last", "1", size=904, residual_bytes=44), "pack")
    floor.vacate("g1")
    assert floor.residual("n0:0") == 124
    for group in ("g0", "g2", "last"):
        floor.vacate(group)
    choose(floor, spec("small", "1", size=64), "pack")
    choose(floor, spec("keeps", "1", size=960, residual_bytes=960), "pack")


def test_host_memory_is_a_budget_of_the_node():
    floor = pool(2, 4, hosts={"n0": 100})
    gangs = [gpus(choose(floor, spec(f"g{i}", "1", 2, host_bytes=30), "pack"))[0][0][:2] for i in range(2)]
    assert gangs == ["n0", "n1"] and floor.host_used("n0") == 60
    with pytest.raises(DoesNotFit, match="1 nodes are short of host memory"):
        choose(floor, spec("wide", "1", 8, host_bytes=30), "pack")
    floor.vacate("g0")
    assert floor.host_used("n0") == 0
    with pytest.raises(DoesNotFit, match="short"):  # three of n0 and four of n1 are one too few
        choose(floor, spec("wide", "1", 8, host_bytes=30), "pack")
    assert len(gpus(choose(floor, spec("seven", "1", 7, host_bytes=30), "pack"))[0]) == 7


def test_a_node_that_is_over_its_budget_since_a_restart_takes_nothing_more():
    floor = pool(2, 4, hosts={"n0": 10})
    before = choose(pool(1, 4), spec("old", "1", 3, host_bytes=10), "pack")
    floor.occupy(before, spec("old", "1", 3, host_bytes=10), Tenant(job="1"))
    assert floor.host_used("n0") == 30
    assert gpus(choose(floor, spec("new", "1", 2, host_bytes=10), "pack"))[0][0] == "n1:0"
    assert len(gpus(choose(floor, spec("four", "2", 4, host_bytes=10), "pack"))[0]) == 4
    with pytest.raises(DoesNotFit, match="1 nodes are short"):
        choose(floor, spec("five", "2", 5, host_bytes=10), "pack")
    choose(floor, spec("no state", "2", 8), "pack")
    floor = pool(3, 4, hosts={"n0": 10, "n1": 30, "n2": 30})
    floor.occupy(before, spec("old", "1", 3, host_bytes=10), Tenant(job="1"))
    six = gpus(choose(floor, spec("six", "2", 6, host_bytes=10), "pack"))[0]
    assert [gpu[:2] for gpu in six] == ["n1"] * 3 + ["n2"] * 3


@pytest.mark.parametrize(("virtual", "offset"), [(True, 0), (False, None)])
def test_a_place_with_other_kinds_of_addresses_is_refused(virtual, offset):
    floor = Floor(GPUS, virtual=virtual)
    old = choose(Floor(GPUS, virtual=not virtual), spec("a", "1"), "pack")
    assert old.gangs[0].extents[0].offset == offset
    with pytest.raises(BadInput, match="was placed on n1:0"):
        floor.occupy(old, spec("a", "1"), Tenant(job="1"))
    assert not floor.on("n1:0") and not floor.has("1")


# --- roles and nodes --------------------------------------------------------------------------------------------------


def test_a_group_goes_on_gpus_of_its_role():
    roles = {"n0:0": GpuRole.TRAIN, "n0:1": GpuRole.SAMPLE}
    floor = pool(1, 3, roles=roles)
    assert gpus(choose(floor, spec("t", "1", 2), "spread")) == [("n0:0", "n0:2")]
    assert gpus(choose(floor, spec("s", "1", 2, role=Role.SAMPLE), "spread")) == [("n0:1", "n0:2")]
    assert floor.usable(spec("x", "1", role=Role.SAMPLE)) == ["n0:1", "n0:2"]
    with pytest.raises(DoesNotFit, match="needs 3 GPUs for role train.*has 2 such"):
        choose(floor, spec("u", "1", 3), "spread")


@pytest.mark.parametrize("placement", ["isolated", "pack", "spread"])
def test_a_wide_gang_takes_whole_nodes_and_as_few_as_possible(placement):
    floor = pool(4, 4)
    choose(floor, spec("x", "other"), placement)
    wide = gpus(choose(floor, spec("w", "1", 6), placement))[0]
    nodes = [gpu[:2] for gpu in wide]
    assert len(set(nodes)) == 2 and max(map(nodes.count, nodes)) == 4 and list(wide) == sorted(wide)


def test_where_no_node_is_whole_a_gang_takes_the_fullest():
    floor = Floor({"a:0": 1024, **{f"b{i}:{k}": 1024 for i in range(2) for k in range(3)}}, virtual=True)
    choose(floor, spec("x", "other"), "isolated")
    choose(floor, spec("y", "other2"), "isolated")
    assert gpus(choose(floor, spec("w", "1", 5), "isolated")) == [("b0:1", "b0:2", "b1:0", "b1:1", "b1:2")]


def test_the_rest_of_a_wide_gang_goes_where_its_rank_is_best():
    busy = {f"n{n}:{i}": GpuRole.SAMPLE for n, i in ((1, 3), (2, 1), (2, 2), (2, 3))}
    floor = pool(3, 4, roles=busy)
    for i in range(3):
        put(floor, spec(f"x{i}", f"{i}", size=64, duty=0.9), f"n1:{i}")
    assert gpus(choose(floor, spec("w", "w", 5), "spread"))[0][4] == "n2:0"  # n1 has more GPUs, and they are busy


def test_more_replicas_than_a_search_looks_at_still_get_gpus_of_their_own():
    placed = gpus(choose(pool(12, 1), spec("s", "1", 1, 12, role=Role.SAMPLE), "pack"))
    assert len(set(placed)) == 12


@pytest.mark.parametrize("placement", ["pack", "spread", "fit"])
def test_replicas_lie_on_each_other_only_within_the_bound(placement):
    """They take turns there: a rollout takes so many times as long, which nothing in the load of a GPU says."""
    floor = pool(1, 2)
    sampler = spec("s", "a", 1, 4, role=Role.SAMPLE, size=64, duty=0.8)
    assert sorted(gpus(choose(floor, sampler, placement, normal=2.0))) == [("n0:0",), ("n0:0",), ("n0:1",), ("n0:1",)]
    floor.vacate("s")
    with pytest.raises(DoesNotFit):  # two at a time would be 1.6
        choose(floor, sampler, placement, normal=1.5)


def test_replicas_prefer_a_whole_node_to_fresh_gpus():
    floor = pool(2, 2)
    choose(floor, spec("x", "other", duty=1.0), "spread")
    placed = gpus(choose(floor, spec("s", "1", 2, 2, role=Role.SAMPLE), "isolated"))
    assert placed == [("n1:0", "n1:1")] * 2


# --- stretch ----------------------------------------------------------------------------------------------------------


def test_a_jobs_trainer_and_sampler_alternate_and_others_add_up():
    floor = pool(1, 1)
    choose(floor, spec("t", "1", duty=0.25), "pack")
    choose(floor, spec("s", "1", role=Role.SAMPLE, duty=0.9), "pack")
    assert floor.predicted_stretch("n0:0") == 1.0
    choose(floor, spec("t2", "2", duty=0.5), "pack")
    assert floor.predicted_stretch("n0:0") == floor.stretch_of("1") == floor.stretch_of("2") == 1.5
    floor.set_duty("s", 0.05)  # 0.3 and 0.5 have room; each arrives while the other is busy now and then
    assert floor.stretch_of("1") == 1 + 0.5**2 / 2
    assert floor.stretch_of("2") == pytest.approx(1 + 0.3**2 / 2)
    assert floor.predicted_stretch("n0:0") == 1.125
    assert floor.stretch_of("unknown") == 1.0


def test_what_is_not_known_is_taken_from_published_shares():
    floor = pool(1, 1)
    choose(floor, spec("s1", "1", role=Role.SAMPLE), "pack")
    choose(floor, spec("s2", "2", role=Role.SAMPLE), "pack")
    assert floor.predicted_stretch("n0:0") == 1.6
    choose(floor, spec("t", "3"), "pack")
    assert floor.predicted_stretch("n0:0") == 1.85


def test_nobody_is_placed_beside_a_job_beyond_the_bound_of_its_class():
    floor = pool(1, 1)
    choose(floor, spec("i", "1", duty=0.8), "pack", JobClass.INTERACTIVE)
    choose(floor, spec("n", "2", duty=0.8), "pack")
    with pytest.raises(DoesNotFit, match="on 1 a job would be slowed down"):
        choose(floor, spec("m", "3", duty=0.8), "pack", JobClass.SCAVENGER)  # 2.4: it would not mind, job 1 would
    floor.vacate("i")
    choose(floor, spec("m", "3", duty=0.8), "pack", JobClass.SCAVENGER)
    choose(floor, spec("o", "4", duty=0.8), "pack")
    choose(floor, spec("o2", "4b", duty=0.8), "pack")
    choose(floor, spec("p", "5", duty=0.8), "pack")  # 4.0
    with pytest.raises(DoesNotFit, match="slowed down"):
        choose(floor, spec("q", "6", duty=0.1), "pack", JobClass.SCAVENGER)


def test_a_tight_bound_counts_arrivals_at_a_busy_gpu():
    floor = pool(1, 1)
    choose(floor, spec("i", "1", duty=0.4), "pack", JobClass.INTERACTIVE, interactive=1.1)
    with pytest.raises(DoesNotFit, match="slowed down"):  # the sum is 0.9, but it waits 1/8 of its step on average
        choose(floor, spec("n", "2", duty=0.5), "pack", interactive=1.1)
    choose(floor, spec("n", "2", duty=0.4), "pack", interactive=1.1)
    with pytest.raises(DoesNotFit, match="slowed down"):
        choose(floor, spec("m", "3", duty=0.4), "pack", JobClass.INTERACTIVE, interactive=1.1)


def test_a_job_is_not_placed_where_itself_would_wait_too_long():
    floor = pool(1, 1)
    choose(floor, spec("s", "1", duty=0.5), "pack", JobClass.SCAVENGER, interactive=1.1)
    with pytest.raises(DoesNotFit, match="slowed down"):  # 1/8 of its step, though the other does not mind
        choose(floor, spec("i", "2", duty=0.4), "pack", JobClass.INTERACTIVE, interactive=1.1)
    choose(floor, spec("i", "2", duty=0.4), "pack", JobClass.INTERACTIVE, interactive=1.13)


def test_the_own_gpus_stay_open_to_a_job_when_they_are_full_for_others():
    floor = pool(1, 1)
    choose(floor, spec("s1", "1", role=Role.SAMPLE, duty=1.0), "spread")
    choose(floor, spec("s2", "2", role=Role.SAMPLE, duty=1.0), "spread", normal=2.0)
    with pytest.raises(DoesNotFit):
        choose(floor, spec("t3", "3", duty=0.1), "spread", normal=2.0)
    choose(floor, spec("t1", "1", duty=0.5), "spread", normal=2.0)
    assert floor.predicted_stretch("n0:0") == 2.0


@pytest.mark.parametrize(
    ("hard", "kind"),
    [
        ({"gang_size": 3}, JobClass.SCAVENGER),
        ({"size": 1025}, JobClass.SCAVENGER),
        ({"residual_bytes": 33}, JobClass.SCAVENGER),
        ({"host_bytes": 8}, JobClass.SCAVENGER),
        ({"duty": 0.8}, JobClass.SCAVENGER),
        ({}, JobClass.INTERACTIVE),
    ],
)
def test_that_one_fits_nowhere_does_not_keep_out_another_that_asks_less(hard, kind):
    floor = pool(1, 2, hosts={"n0": 20})
    choose(floor, spec("there", "0", 2, size=992, duty=0.9, host_bytes=3), "pack", normal=1.6)
    easy = {"size": 64, "duty": 0.7, "gang_size": 2, "host_bytes": 7, "residual_bytes": 32}
    with pytest.raises(DoesNotFit):
        choose(floor, spec("a", "1", **easy | hard), "pack", kind, normal=1.6, interactive=1.5)
    with pytest.raises(DoesNotFit):
        choose(floor, spec("b", "2", **easy | hard), "pack", kind, normal=1.6, interactive=1.5)
    choose(floor, spec("c", "3", **easy), "pack", JobClass.SCAVENGER, normal=1.6, interactive=1.5)


def test_that_one_fits_nowhere_is_forgotten_under_other_bounds_and_without_gpus_to_avoid():
    floor = pool(1, 1)
    assert floor.choose_all([spec("x", "0")], Rules("pack"), Tenant(job="0"), avoid={"n0:0"}) is None
    choose(floor, spec("x", "0", duty=0.8), "pack", JobClass.INTERACTIVE, interactive=1.2)
    with pytest.raises(DoesNotFit):
        choose(floor, spec("y", "1", duty=0.8), "pack", interactive=1.2)
    choose(floor, spec("y", "1", duty=0.8), "pack", interactive=2.0)


# --- preferences ------------------------------------------------------------------------------------------------------


def test_pack_fills_the_most_loaded_gpu_that_bears_it_and_spread_the_least_loaded():
    def floor() -> Floor:
        made = pool(2, 2)
        for i, duty in enumerate((0.9, 0.3, 0.6)):
            choose(made, spec(f"g{i}", f"{i}", duty=duty), "spread")
        return made

    assert [round(floor().predicted_stretch(gpu), 3) for gpu in ("n0:0", "n0:1", "n1:0", "n1:1")] == [1.0] * 4
    assert gpus(choose(floor(), spec("x", "x", duty=0.2), "spread")) == [("n1:1",)]
    assert gpus(choose(floor(), spec("x", "x", duty=0.2), "pack")) == [("n0:0",)]
    assert gpus(choose(floor(), spec("x", "x", duty=0.5), "pack", normal=1.3)) == [("n1:0",)]
    assert gpus(choose(floor(), spec("x", "1", duty=0.2), "pack")) == [("n0:1",)]
    assert gpus(choose(floor(), spec("x", "x", 2, duty=0.2), "spread")) == [("n1:0", "n1:1")]
    assert gpus(choose(floor(), spec("x", "x", 2, duty=0.2), "pack")) == [("n0:0", "n0:1")]


def test_spread_prefers_partners_that_the_job_has_already():
    floor = pool(1, 4, roles={"n0:0": GpuRole.TRAIN, "n0:1": GpuRole.TRAIN})
    for job in "ab":
        choose(floor, spec(f"t{job}", job, duty=0.5), "spread")
    for job in "ab":
        choose(floor, spec(f"s{job}", job, role=Role.SAMPLE, duty=0.5), "spread")
    assert gpus(choose(floor, spec("tc", "c", duty=0.5), "spread")) == [("n0:0",)]  # with a
    floor.set_duty("sa", 0.55)
    # a's is the busier one, but within the band; with b it would have two partners.
    assert gpus(choose(floor, spec("sc", "c", role=Role.SAMPLE, duty=0.42), "spread")) == [("n0:2",)]


def test_spread_looks_at_the_partners_gpus_wherever_they_are():
    floor = pool(12, 1)
    for i in range(10):
        put(floor, spec(f"s{i}", f"{i}", duty=0.5), f"n{i}:0")
    put(floor, spec("ta", "a", duty=0.5), "n11:0")
    put(floor, spec("tc", "c", duty=0.5), "n11:0")
    put(floor, spec("sa", "a", role=Role.SAMPLE, duty=0.5), "n10:0")
    assert gpus(choose(floor, spec("sc", "c", role=Role.SAMPLE, duty=0.2), "spread")) == [("n10:0",)]


def test_spread_prefers_even_duties_to_one_large_one():
    floor = pool(1, 2)
    for i, (group, duty) in enumerate({"large": 0.7, "even": 0.4, "even2": 0.4, "small": 0.1}.items()):
        choose(floor, spec(group, f"{i}", duty=duty), "spread")
    assert [p.group for p in floor.on("n0:0")] == ["large", "small"]
    assert gpus(choose(floor, spec("x", "x", duty=0.1), "spread")) == [("n0:1",)]


def test_fit_leaves_empty_gpus_to_those_who_need_most_of_one():
    """Trainers of a quarter share two GPUs while these have time for them; samplers find GPUs of their own."""
    floor = pool(4, 1)
    for i in range(2):
        tenant, specs = Tenant(job=f"{i}"), [spec(f"t{i}", f"{i}", 2), spec(f"s{i}", f"{i}", role=Role.SAMPLE)]
        assert floor.choose_all(specs, Rules("fit", normal=9.0), tenant)
    assert [sorted(p.group for p in floor.on(f"n{n}:0")) for n in range(4)] == [
        ["s0"],
        ["t0", "t1"],
        ["t0", "t1"],
        ["s1"],
    ]


def test_fit_takes_the_least_loaded_where_no_gpu_has_time_for_it():
    floor = pool(1, 3)
    for i, duty in enumerate((0.9, 0.7, 0.8)):
        put(floor, spec(f"g{i}", f"{i}", duty=duty), f"n0:{i}")
    assert gpus(choose(floor, spec("x", "x", duty=0.25), "fit")) == [("n0:1",)]  # the only one with time
    assert gpus(choose(floor, spec("y", "y", duty=0.5), "fit")) == [("n0:2",)]


def test_fit_does_not_put_a_trainer_on_the_gpus_of_its_sampler_while_others_have_time():
    """They work at the same time when the one is a step ahead."""
    floor = pool(1, 2)
    put(floor, spec("s", "a", role=Role.SAMPLE, duty=0.5), "n0:0")
    put(floor, spec("t", "b", duty=0.3), "n0:1")
    assert gpus(choose(floor, spec("ta", "a", duty=0.25), "fit")) == [("n0:1",)]


def test_fit_puts_gangs_where_others_as_wide_are():
    """Two gangs on the same GPUs wait for each other alone; a wide one on those of two narrow ones waits for both."""
    floor = pool(1, 6, roles={f"n0:{i}": GpuRole.TRAIN for i in range(6)})
    places = [gpus(choose(floor, spec(f"{i}", f"{i}", width, duty=0.4), "fit")) for i, width in enumerate((3, 2, 3, 2))]
    wide, narrow = [("n0:0", "n0:1", "n0:2")], [("n0:3", "n0:4")]
    assert places == [wide, narrow, wide, narrow]
    # Full; the next takes GPUs that nobody uses first, and where there are none, those with the least load.
    assert gpus(choose(floor, spec("x", "x", duty=0.4), "fit")) == [("n0:5",)]
    assert gpus(choose(floor, spec("y", "y", 3, duty=0.4), "fit")) == wide
    floor.vacate("0")
    assert gpus(choose(floor, spec("z", "z", 3, duty=0.2), "fit")) == wide  # time again


def test_fit_leaves_gpus_of_gangs_as_wide_for_others_that_are_clearly_less_loaded():
    """Four samplers on the GPUs of one, while as many GPUs have only trainers, would take turns four at a time."""
    floor = pool(1, 4)
    for i in range(4):
        tenant = Tenant(job=f"{i}")
        specs = [spec(f"t{i}", f"{i}", 4), spec(f"s{i}", f"{i}", 2, role=Role.SAMPLE)]
        assert floor.choose_all(specs, Rules("fit", normal=9.0), tenant)
    samplers = [[p.group for p in floor.on(f"n0:{gpu}") if p.group.startswith("s")] for gpu in range(4)]
    assert [len(groups) for groups in samplers] == [2, 2, 2, 2]


def test_fit_counts_the_host_memory_of_the_gpus_of_a_gang_as_wide():
    floor = pool(2, 2, hosts={"n0": 1024})
    assert gpus(choose(floor, spec("a", "a", 2, duty=0.2, host_bytes=512), "fit")) == [("n0:0", "n0:1")]
    assert gpus(choose(floor, spec("b", "b", 2, duty=0.2, host_bytes=512), "fit")) == [("n1:0", "n1:1")]


def test_a_wide_gang_is_compared_on_its_partners_nodes_and_on_the_least_loaded():
    """Node 1 is the job's own, node 0 a partner's; the empty node 2 is better than either."""
    floor = pool(3, 2)
    put(floor, spec("sa", "a", 2, role=Role.SAMPLE, duty=0.8), "n0:0", "n0:1")
    put(floor, spec("ta", "a", 2, duty=0.2), "n1:0", "n1:1")
    put(floor, spec("sb", "b", 2, role=Role.SAMPLE, duty=0.8), "n1:0", "n1:1")
    (wide,) = gpus(choose(floor, spec("tb", "b", 4, duty=0.2), "spread"))
    assert {"n2:0", "n2:1"} <= set(wide)


# --- later ------------------------------------------------------------------------------------------------------------


def test_a_clearly_better_place_is_found_and_taken_only_by_move():
    floor = pool(1, 3, roles={"n0:2": GpuRole.SAMPLE})
    choose(floor, spec("a", "1", duty=0.1), "spread")
    choose(floor, spec("b", "2", duty=0.2), "spread")
    choose(floor, spec("c", "3", duty=0.1), "spread")  # beside a
    tenant = Tenant(job="3")
    floor.set_duty("c", 0.5)
    assert floor.better("c", Rules("spread"), tenant) is None  # 1.125 is not clearly worse than what it would find
    floor.set_duty("a", 1.0)
    better = floor.better("c", Rules("spread"), tenant)
    assert gpus(better) == [("n0:1",)] and floor.stretch_of("3") == 1.5
    assert [p.group for p in floor.on("n0:0")] == ["a", "c"] and not [p for p in floor.on("n0:1") if p.group == "c"]
    floor.move("c", better)
    assert floor.where("c") == better and floor.stretch_of("1") == 1.0
    assert floor.stretch_of("3") == pytest.approx(1 + 0.2**2 / 2)  # it keeps its measured duty
    assert floor.stretch_of("2") == 1.125


def test_a_better_place_is_wholly_elsewhere():
    floor = pool(1, 4)
    put(floor, spec("a", "1", 2, duty=0.9), "n0:0", "n0:1")
    put(floor, spec("b", "2", duty=0.9), "n0:0")
    put(floor, spec("c", "3", duty=0.9), "n0:3")
    assert floor.better("a", Rules("spread"), Tenant(job="1")) is None  # the second and the third would be


def test_no_better_place_for_a_gang_that_has_the_whole_pool():
    floor = pool(1, 2)
    choose(floor, spec("a", "1", 2, duty=0.9), "spread")
    choose(floor, spec("b", "2", 2, duty=0.9), "spread")
    assert floor.better("a", Rules("spread"), Tenant(job="1")) is None
    assert floor.stretch_of("1") == 1.8


def test_a_move_to_where_there_is_no_such_gpu_changes_nothing():
    floor = pool(1, 1)
    placement = choose(floor, spec("a", "1"), "pack")
    elsewhere = replace(placement, gangs=(replace(placement.gangs[0], gpus=("n9:0",)),))
    with pytest.raises(BadInput, match="n9:0"):
        floor.move("a", elsewhere)
    assert floor.where("a") == placement and [p.group for p in floor.on("n0:0")] == ["a"]


# --- a job's groups together ------------------------------------------------------------------------------------------


def test_all_groups_of_a_job_are_placed_or_none():
    floor = pool(1, 4)
    rules, tenant = Rules("isolated"), Tenant(job="1")
    assert floor.choose_all([spec("x", "0", 2)], rules, Tenant(job="0"))
    specs = [spec("s", "1", 1, 2, role=Role.SAMPLE), spec("t", "1", 2)]
    first, second = floor.choose_all(specs, rules, tenant)
    assert (first.group, second.group) == ("s", "t") and gpus(second) == [("n0:2", "n0:3")]
    floor.vacate("s"), floor.vacate("t")
    assert floor.choose_all([*specs, spec("u", "1", 3)], rules, tenant) is None
    assert not floor.has("1") and not floor.on("n0:2") and floor.where("t") is None


def test_large_gangs_are_placed_before_small_ones_break_their_node():
    floor = pool(2, 2, hosts={"n0": 20, "n1": 20})
    small = spec("small", "1", 1, 2, host_bytes=10)
    large = spec("large", "1", 2, host_bytes=10)
    assert gpus(floor.choose_all([small, large], Rules("spread"), Tenant(job="1"))[1]) == [("n0:0", "n0:1")]


def test_what_would_not_fit_the_empty_pool_is_refused_at_once_and_what_would_is_not():
    floor = pool(1, 2, hosts={"n0": 100})
    tenant = Tenant(job="1")
    choose(floor, spec("x", "0", 2, duty=1.0), "isolated")
    rules = Rules("isolated")
    floor.possible([spec("t", "1", 2), spec("s", "1", 1, 2, role=Role.SAMPLE)], rules, tenant)
    floor.possible([spec("t", "1", 2)], rules, tenant)
    with pytest.raises(DoesNotFit, match="needs 3 GPUs with"):
        floor.possible([spec("t", "1", 3)], rules, tenant)
    wide = [spec("t", "1", 2, host_bytes=30), spec("s", "1", 2, host_bytes=30)]
    with pytest.raises(DoesNotFit, match="2 worker groups of job 1 do not fit the empty pool together"):
        floor.possible(wide, rules, tenant)
    floor.possible(wide[:1], rules, tenant)
    assert not floor.has("1")


def test_a_group_is_placed_once():
    floor = pool(1, 2)
    choose(floor, spec("a", "1"), "pack")
    with pytest.raises(BadInput, match="placed already"):
        choose(floor, spec("a", "1"), "pack")


def test_room_rises_only_when_something_may_fit_that_did_not():
    floor = pool(1, 2)
    seen = [floor.room]
    choose(floor, spec("a", "1", duty=0.5), "pack")
    floor.set_duty("a", 0.6)
    floor.better("a", Rules("pack"), Tenant(job="1"))
    with pytest.raises(DoesNotFit):
        choose(floor, spec("b", "1", 3), "pack")
    assert floor.room == seen[0]
    for change in (lambda: floor.set_duty("a", 0.1), lambda: floor.vacate("a")):
        change()
        assert floor.room > seen[-1]
        seen.append(floor.room)


# --- whatever happens -------------------------------------------------------------------------------------------------


class Model:
    """A floor under test, and the rules of placement said again without its books."""

    def __init__(self, gpus, roles, hosts, virtual, rules) -> None:
        self.floor = Floor(gpus, roles=roles, hosts=hosts, virtual=virtual)
        self.gpus, self.roles, self.hosts, self.virtual, self.rules = gpus, roles, hosts, virtual, rules
        self.groups: dict[str, tuple[GroupSpec, Tenant, Placement]] = {}  # the spec with the duty known by now

    def seats(self, gpu: str) -> list[tuple[GroupSpec, Tenant]]:
        """Every gang on a GPU."""
        return [
            (spec, tenant)
            for spec, tenant, placement in self.groups.values()
            for gang in placement.gangs
            if gpu in gang.gpus
        ]

    def stretches(self, seats: list[tuple[GroupSpec, Tenant]]) -> dict[str, tuple[float, JobClass]]:
        """Job -> its predicted stretch where these gangs share a GPU, and its class."""
        duties: dict[str, float] = {}
        for spec, tenant in seats:
            duties[tenant.job] = min(1.0, duties.get(tenant.job, 0) + spec.duty)
        kinds = {tenant.job: tenant.kind for _, tenant in seats}
        waits = {job: 1 + sum(d * d / 2 for other, d in duties.items() if other != job) for job in duties}
        return {job: (max(1, sum(duties.values()), waits[job]), kinds[job]) for job in duties}

    def may_take(self, gpu: str, spec: GroupSpec, tenant: Tenant, slip: float) -> bool:
        """Whether a GPU may take one gang more, host memory aside. slip: added to the bounds."""
        seats = [*self.seats(gpu), (spec, tenant)]
        residual = sum(s.residual_bytes for s, _ in seats)
        jobs = {t.job for _, t in seats}
        return (
            self.roles.get(gpu, GpuRole.ANY) in (GpuRole.ANY, GpuRole(spec.role))
            and all(s.device_bytes + residual - s.residual_bytes <= self.gpus[gpu] for s, _ in seats)
            and (self.rules.placement != "isolated" or len(jobs) == 1)
            and (
                len(jobs) == 1
                or all(x <= self.rules.max_stretch[kind] + slip for x, kind in self.stretches(seats).values())
            )
        )

    def free(self, spec: GroupSpec, tenant: Tenant, slip: float) -> dict[str, int]:
        """Node -> how many of its GPUs could take one gang's rank."""
        count: dict[str, int] = {}
        for gpu in self.gpus:
            node = gpu.partition(":")[0]
            count[node] = count.get(node, 0) + self.may_take(gpu, spec, tenant, slip)
        for node, budget in self.hosts.items():
            if spec.host_bytes:
                count[node] = min(count[node], max(0, budget - self.host(node)) // spec.host_bytes)
        return count

    def host(self, node: str) -> int:
        return sum(s.host_bytes for gpu in self.gpus if gpu.startswith(f"{node}:") for s, _ in self.seats(gpu))

    def check(self, touched=()) -> None:
        """touched: GPUs on which something was placed just now, so that every member must be within its bound."""
        for gpu, size in self.gpus.items():
            seats, placed = self.seats(gpu), self.floor.on(gpu)
            assert sorted(p.group for p in placed) == sorted(s.group for s, _ in seats)
            residual = sum(s.residual_bytes for s, _ in seats)
            assert self.floor.residual(gpu) == residual
            for s, _ in seats:
                assert s.device_bytes + residual - s.residual_bytes <= size
                assert self.roles.get(gpu, GpuRole.ANY) in (GpuRole.ANY, GpuRole(s.role))
            for p in placed:
                assert self.virtual or (p.start % 64 == 0 and 0 <= p.start < p.end <= size)
            if self.rules.placement == "isolated":
                assert len({t.job for _, t in seats}) <= 1
            stretches = self.stretches(seats)
            assert abs(self.floor.predicted_stretch(gpu) - max((x for x, _ in stretches.values()), default=1)) < 1e-5
            if gpu in touched and len(stretches) > 1:
                assert all(x <= self.rules.max_stretch[kind] + 1e-5 for x, kind in stretches.values())
        for node, budget in self.hosts.items():
            assert self.floor.host_used(node) == self.host(node) <= budget
        for job in {tenant.job for _, tenant, _ in self.groups.values()}:
            worst = max(x[job][0] for gpu in self.gpus if job in (x := self.stretches(self.seats(gpu))))
            assert abs(self.floor.stretch_of(job) - worst) < 1e-5

    def dump(self):
        return [(gpu, list(self.floor.on(gpu)), self.floor.predicted_stretch(gpu)) for gpu in self.gpus]


DUTIES = st.integers(1, 20).map(lambda n: n / 20)
SPECS = st.builds(
    GroupSpec,
    group=st.just(""),
    role=st.sampled_from(Role),
    owner=st.just(""),
    gang_size=st.integers(1, 6),
    replicas=st.sampled_from([1, 1, 2, 3]),
    device_bytes=st.integers(1, 16).map(lambda n: 64 * n),
    host_bytes=st.integers(0, 3),
    residual_bytes=st.sampled_from([0, 0, 32, 64]),
    duty=DUTIES,
)
TENANTS = [Tenant(job=f"j{i}", kind=kind) for i, kind in enumerate([*JobClass, JobClass.NORMAL, JobClass.INTERACTIVE])]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), SPECS, st.sampled_from(TENANTS)),
        st.tuples(st.just("choose"), SPECS, st.sampled_from(TENANTS)),
        st.tuples(st.just("all"), st.lists(SPECS, min_size=2, max_size=3), st.sampled_from(TENANTS)),
        st.tuples(st.just("vacate"), st.integers(0, 99)),
        st.tuples(st.just("duty"), st.integers(0, 99), DUTIES),
        st.tuples(st.just("better"), st.integers(0, 99)),
    ),
    max_size=25,
)


@st.composite
def models(draw):
    """A way to make the same model again."""
    gpus = {
        f"n{n}:{i}": draw(st.sampled_from([1024, 1024, 512]))
        for n in range(draw(st.sampled_from([1, 2, 3, 4, 12])))
        for i in range(draw(st.integers(1, 4)))
    }
    nodes = sorted({gpu.partition(":")[0] for gpu in gpus})
    roles = draw(st.dictionaries(st.sampled_from(sorted(gpus)), st.sampled_from(GpuRole), max_size=3))
    hosts = draw(st.dictionaries(st.sampled_from(nodes), st.integers(0, 20)))
    rules = Rules(draw(st.sampled_from(PLACEMENTS)), interactive=draw(st.sampled_from([2.0, 1.2])))
    virtual = draw(st.booleans())
    return lambda: Model(gpus, roles, hosts, virtual, rules)


def play(model: Model, steps) -> list:
    """Do the steps, checking after each. Returns all that was chosen."""
    history = []
    for number, (verb, *args) in enumerate(steps):
        if verb in ("choose", "all"):
            wanted, tenant = args
            specs = [
                replace(s, group=f"g{number}.{i}", owner=tenant.job)
                for i, s in enumerate(wanted if verb == "all" else [wanted])
            ]
            before = model.dump()
            if verb == "all":
                placements = model.floor.choose_all(specs, model.rules, tenant)
            else:
                placements = one(model, specs[0], tenant)
            if placements is None:
                assert model.dump() == before
            else:
                assert [p.group for p in placements] == [s.group for s in specs]
                model.groups |= {s.group: (s, tenant, p) for s, p in zip(specs, placements, strict=True)}
            touched = [gpu for p in placements or () for gang in p.gangs for gpu in gang.gpus]
            model.check(touched)
            history.append(placements)
        elif model.groups:
            group = list(model.groups)[args[0] % len(model.groups)]
            spec, tenant, placement = model.groups[group]
            if verb == "vacate":
                del model.groups[group]
                model.floor.vacate(group)
            elif verb == "duty":
                model.groups[group] = replace(spec, duty=args[1]), tenant, placement
                model.floor.set_duty(group, args[1])
            else:
                history.append(improve(model, group))
            model.check()
    return history


def one(model: Model, spec: GroupSpec, tenant: Tenant) -> tuple[Placement] | None:
    """Choose for one group. One gang is refused only if no GPUs are left; it is on several nodes only if it must be."""
    free = model.free(spec, tenant, -1e-5)
    at_most = model.free(spec, tenant, 1e-5)
    try:
        placement = model.floor.choose(spec, model.rules, tenant)
    except DoesNotFit:
        assert spec.replicas > 1 or sum(free.values()) < spec.gang_size
        return None
    gangs = placement.gangs
    assert [gang.id for gang in gangs] == [f"{spec.group}/{i}" for i in range(spec.replicas)]
    assert all(len(set(gang.gpus)) == spec.gang_size == len(gang.extents) for gang in gangs)
    nodes = len({gpu.partition(":")[0] for gpu in gangs[0].gpus})
    if free == at_most:
        fullest = sorted(free.values(), reverse=True)
        least = next(n for n in range(1, 9) if sum(fullest[:n]) >= spec.gang_size)
        # `fit` goes on more rather than where no GPU has time, but never apart if one node has room.
        assert nodes == least or (model.rules.placement == "fit" and nodes > least > 1)
    if spec.replicas > 1 and spec.gang_size == 1 and sum(free.values()) >= spec.replicas and free == at_most:
        assert len({gang.gpus for gang in gangs}) == spec.replicas
    return (placement,)


def improve(model: Model, group: str) -> Placement | None:
    """Ask for a better place and go there."""
    spec, tenant, old = model.groups[group]
    before = model.dump()
    room = model.floor.room
    better = model.floor.better(group, model.rules, tenant)
    assert model.dump() == before and model.floor.room == room
    if better is None:
        return None
    here = {gpu for gang in old.gangs for gpu in gang.gpus}
    there = {gpu for gang in better.gangs for gpu in gang.gpus}
    worst = max(map(model.floor.predicted_stretch, here))
    assert not here & there
    model.floor.move(group, better)
    model.groups[group] = spec, tenant, better
    assert max(map(model.floor.predicted_stretch, there)) <= 0.8 * worst + 1e-5
    return better


@given(models(), STEPS)
def test_bytes_roles_hosts_isolation_and_bounds_hold_and_the_same_asks_get_the_same_places(model, steps):
    assert play(model(), steps) == play(model(), steps)
