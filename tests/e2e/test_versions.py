"""Versions on a private pool: which drew, how old it may be, what NVMe gives back, a sampler killed in an update."""

from plexrl.types import records

from .journals import of_kind
from .localpool import finish
from .test_rank_killed import open_calls, ranks

LOGPROB_BOUND = 1e-3


def test_pinned_told_and_refused_when_too_old(local_pool, tmp_path):
    nvme = {"path": str(tmp_path / "nvme"), "bytes": 64 << 20}
    pool = local_pool(nvme=nvme, limits={"versions_per_model": 1})
    seen = pool.run("versions.py", PLEXRL_MAX_STALENESS="2")
    assert seen["pinned"] == [True, True] and seen["other"]
    versions = seen["models"]["versions"]
    named, first, _, newest = (version["path"] for version in versions)
    assert [(v["number"], v["behind"], v["ephemeral"]) for v in versions] == [
        (1, 3, False),
        (2, 2, True),
        (3, 1, True),
        (4, 0, True),
    ]
    assert versions[0]["kept"] in ("memory", "disk") and versions[3]["kept"] == "memory"
    assert seen["models"]["max_staleness"] == 2
    assert seen["jobs"][0]["versions"] == {versions[0]["model"]: newest} and seen["jobs"][0]["max_staleness"] == 2
    # What drew each token: in a header, and in the journal beside the call.
    assert seen["header"] == first
    accepted = {r.call.id: r.work["version"] for r in of_kind(pool, records.CallAccepted) if r.call.seq is None}
    ended = {r.id: r.headers.get("x-plexrl-version") for r in of_kind(pool, records.CallEnded) if r.id in accepted}
    assert accepted == ended and set(accepted.values()) == {first, versions[2]["path"], newest}
    # Refused by name, with the mend: by both APIs, and as data.
    code, text = seen["openai"]
    assert code == "stale_version" and named in text and newest in text
    for refusal, behind, mend in (
        (seen["tinker"], f"version '{named}' is 3 behind '{newest}'", "Sample from a client of a newer version"),
        (seen["data"], f"version '{first}' is 3 behind", "Leave these data out"),
    ):
        assert refusal["type"] == "stale_version" and "this job allows 2" in refusal["detail"]
        assert behind in refusal["detail"] and mend in refusal["mend"]
    assert seen["fresh"] == 1
    (attached,) = of_kind(pool, records.JobAttached)
    assert attached.max_staleness == 2
    published = of_kind(pool, records.VersionPublished)
    assert len(published) == 5 and all(r.checksum.startswith("xxh3:") for r in published)


def test_a_sampler_killed_in_an_update_draws_by_the_new_version_or_not_at_all(local_pool, tmp_path):
    pool = local_pool()
    program = pool.popen("versions.py", "--hit", str(tmp_path))
    pool.wait_until("the second version is there", (tmp_path / "hit.published").exists)
    sampler = ranks(pool)[-1]
    sampler.suspend()
    (tmp_path / "hit.go").touch()
    pool.wait_until("it is to be drawn from", lambda: any(":sample:" in call for call in open_calls(pool)))
    sampler.kill()
    seen = finish(program)
    assert seen["first"] < LOGPROB_BOUND and seen["second"] < LOGPROB_BOUND
