"""What memory is left, by the machine and by cgroups of both versions; and NUMA, from what the kernel writes."""

from pathlib import Path

import pytest

from plexrl.memory import numa, room
from plexrl.types import DoesNotFit

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def limits(tmp_path: Path, line: str, files: dict[str, object]) -> list[room.Room]:
    (tmp_path / "of").write_text(line + "\n")
    write(tmp_path / "cgroup", files)
    return list(room._limits(tmp_path / "of", tmp_path / "cgroup"))


def test_version_two_with_the_limit_at_the_job(tmp_path):
    job, step = "system.slice/slurmstepd.scope/job_7", "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    files = {
        "cgroup.controllers": "memory",
        f"{step}/memory.max": "max",
        f"{step}/memory.current": GIB,
        f"{job}/memory.max": 8 * GIB,
        f"{job}/memory.current": 3 * GIB,
        f"{job}/memory.stat": f"file {2 * GIB}\nshmem {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 4}",
    }
    (found,) = limits(tmp_path, f"0::/{step}", files)
    assert found.bytes == 5 * GIB + GIB // 2 + GIB // 4
    assert f"/{job}, {8 * GIB} bytes" in found.bound


def test_version_one_beside_an_empty_version_two(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": 9 * GIB,
        "memory/memory.usage_in_bytes": 2 * GIB,
        "memory/slurm/uid_0/memory.limit_in_bytes": 4 * GIB,
        "memory/slurm/uid_0/memory.usage_in_bytes": 5 * GIB,
        "memory/slurm/uid_0/memory.stat": f"inactive_file 77\ntotal_inactive_file {GIB}",
        "unified/cgroup.controllers": "",
    }
    inner, outer = limits(tmp_path, "4:cpu,memory:/slurm/uid_0\n0::/", files)
    assert (inner.bytes, outer.bytes) == (0, 7 * GIB)
    assert "/slurm/uid_0, " in inner.bound and "cgroup /, " in outer.bound


def test_outer_groups_of_a_container_and_other_systems_are_not_seen(tmp_path):
    assert limits(tmp_path, "0::/../../other", {"cgroup.controllers": "memory"}) == []
    assert list(room._limits(tmp_path / "none", tmp_path)) == []


def test_the_tighter_bound_counts_and_is_named(tmp_path):
    (tmp_path / "of").write_text("0::/a\n")
    write(tmp_path, {"cgroup.controllers": "memory", "a/memory.max": 1 << 20, "a/memory.current": 4096})
    assert room.room(tmp_path / "of", tmp_path).bytes == (1 << 20) - 4096
    write(tmp_path, {"a/memory.max": 1 << 62})
    found = room.room(tmp_path / "of", tmp_path)
    assert 0 < found.bytes < 1 << 62 and "this machine" in found.bound


def test_more_than_there_is_is_refused_with_figures():
    room.require(1 << 20, "a little", "")
    with pytest.raises(DoesNotFit, match=rf"everything takes {1 << 60} bytes .* are left of .*Lower host.bytes"):
        room.require(1 << 60, "everything", "Lower host.bytes")


def test_nodes_and_their_cores(tmp_path):
    write(
        tmp_path, {"has_memory": "0,2-3", "node0/cpulist": "0-3,8", "node1/cpulist": "4-7", "node2/cpulist": "9-11,20"}
    )
    assert numa.nodes(tmp_path) == (0, 2, 3)
    assert [numa.node_of_core(core, tmp_path) for core in (0, 8, 4, 10, 20, 99)] == [0, 0, 0, 2, 2, 0]
    assert numa.nodes(tmp_path / "none") == (0,) and numa.node_of_core(5, tmp_path / "none") == 0


def test_shared_memory_prefers_the_node_it_is_bound_to(memfd):
    from plexrl.memory import pages

    mapping = pages.map_shared(memfd(1 << 20), 1 << 20)
    (node, *_), start = numa.nodes(), pages.address(mapping)
    if not numa.prefer(start, 1 << 20, node):
        pytest.skip("this kernel, or the container, binds no memory to nodes")
    assert not numa.prefer(start, 1 << 20, 1000)
    pages.populate(mapping, 0, 1 << 20)
    (line,) = [w for w in Path("/proc/self/numa_maps").read_text().splitlines() if w.startswith(f"{start:x} ")]
    assert f"prefer:{node}" in line.replace("=", ":")
