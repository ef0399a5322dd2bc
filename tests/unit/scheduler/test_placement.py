"""Where gangs live."""

from collections.abc import Mapping
from math import inf

import pytest
from msgspec import Struct, field

from plexrl.scheduler.placement import Floor
from plexrl.types import DoesNotFit, Extent, GroupSpec, JobClass, Placement, Role, Tenant

BOUNDS = {JobClass.INTERACTIVE: 2.0, JobClass.NORMAL: 4.0, JobClass.SCAVENGER: inf}


class Rules(Struct):
    """The part of a policy that placement reads."""

    placement: str
    max_stretch: Mapping[JobClass, float] = field(default_factory=lambda: dict(BOUNDS))


def choose(floor: Floor, spec: GroupSpec, placement: str) -> Placement:
    return floor.choose(spec, Rules(placement), Tenant(job=spec.owner))


GPUS = {f"n{n}:{i}": 1024 for n in (1, 2) for i in range(2)}


def spec(group: str, owner: str, gang_size: int = 1, replicas: int = 1, size: int = 512, role=Role.TRAIN) -> GroupSpec:
    return GroupSpec(group=group, role=role, owner=owner, gang_size=gang_size, replicas=replicas, device_bytes=size)


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
