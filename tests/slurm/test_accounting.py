"""Where each GPU-second of a shared run is charged: by sreport, sshare, GrpTRESMins and plexrl report. None twice.

Prints the table that docs/accounting.md shows:  python -m pytest tests/slurm/test_accounting.py -s
"""

import json
import re
from collections.abc import Iterator

import pytest

from tests.slurm.site import POOL, Site

pytestmark = pytest.mark.timeout(500)
ACCOUNTS = ("plexrl", "ml", "bio")


@pytest.fixture
def site(cluster, tiny_model) -> Iterator[Site]:
    site = Site(cluster, tiny_model)
    site.plexrl("pool", "declare", POOL, "--config", str(site.config), "--fresh")
    yield site
    if (cluster.registry / f"{POOL}.live.json").exists():
        site.stop()


def sreport(site: Site) -> dict[str, int]:
    """GPU-seconds by account. It counts whole hours: what ran in this one may not be in it yet."""
    command = ["sreport", "-nP", "-t", "Seconds", "-T", "gres/gpu", "job", "SizesByAccount", "FlatView"]
    rows = site.cluster.run("root", [*command, "Start=now-2hours", "End=now+1hour"]).stdout.splitlines()
    cells = [row.split("|") for row in rows]
    return {name: sum(int(cell) for row in cells if row[1] == name for cell in row[2:-1]) for name in ACCOUNTS}


def sshare(site: Site) -> dict[str, int]:
    """RawUsage by account."""
    done = site.cluster.run("root", ["sshare", "-nP", "-a", "-o", "Account,User,RawUsage"])
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    return {name: next((int(r[2]) for r in rows if r[0] == name and not r[1]), 0) for name in ACCOUNTS}


def grp_tres_mins(site: Site) -> dict[str, int]:
    """GPU-minutes counted against GrpTRESMins, by account."""
    done = site.cluster.run("root", ["scontrol", "-o", "show", "assoc_mgr", "flags=assoc"])
    found = dict.fromkeys(ACCOUNTS, 0)
    for line in done.stdout.splitlines():
        who = re.search(r"Account=(\S+) UserName=(\S*) ", line)
        used = re.search(r"GrpTRESMins=\S*gres/gpu=\w+\((\d+)\)", line)
        if who and used and who[1] in found and not who[2].strip("()0123456789"):
            found[who[1]] = int(used[1])
    return found


def table(rows: list[tuple[str, dict, dict]]) -> str:
    """Before and after, by account."""
    lines = ["| told by | " + " | ".join(f"{a}, before | {a}, after" for a in ACCOUNTS) + " |"]
    lines.append("|---" * (1 + 2 * len(ACCOUNTS)) + "|")
    for name, before, after in rows:
        cells = [f"{before.get(a, 0):.0f} | {after.get(a, 0):.0f}" for a in ACCOUNTS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_each_gpu_second_is_charged_once(site: Site):
    slurm = site.cluster.slurm()
    before = [read(site) for read in (sreport, sshare, grp_tres_mins)]
    pool_job = site.start()
    jobs = {
        user: site.submit(user, "sft.py", "--steps", "8", "--rank", rank)
        for user, rank in (("alice", "4"), ("bob", "0"))
    }
    for user, job in jobs.items():
        site.result(user, job, 200)
    site.stop()
    site.wait_until("slurmdbd has the pool's end", lambda: all(row.end for row in slurm.sacct([pool_job])), 60)
    report = json.loads(site.plexrl("report", "--pool", POOL, "--json").stdout)
    after = [read(site) for read in (sreport, sshare, grp_tres_mins)]

    of_pool = sum(row.gpu_seconds for row in slurm.sacct([pool_job]))
    of_jobs = {row.account: row.gpu_seconds for row in slurm.sacct(jobs.values())}
    charged = {job["account"]: job["charged"] for job in report["jobs"]}
    rows = [
        ("sacct, GPU-s of these jobs", {}, {"plexrl": of_pool, **of_jobs}),
        ("plexrl report, GPU-s", {}, {"plexrl": report["overhead_gpu_seconds"], **charged}),
        ("sreport job SizesByAccount, GPU-s", before[0], after[0]),
        ("sshare, RawUsage (weights: CPU 1, GPU 0)", before[1], after[1]),
        ("GrpTRESMins, GPU-min counted", before[2], after[2]),
    ]
    print("\n" + table(rows))

    # Slurm books all of it on the service account, and nothing on those who used it ...
    assert of_pool > 0 and of_jobs == {"ml": 0, "bio": 0}
    for was, now in zip(before[::2], after[::2], strict=True):
        assert all(was[account] == now[account] for account in ("ml", "bio"))
    # ... PlexRL's ledger books the same seconds on the users and the pool's owner, each of them once.
    assert set(charged) == {"ml", "bio"} and all(charged.values())
    assert [job["declared_gpus"] for job in report["jobs"]] == [1, 1] and all(
        job["partition"] for job in report["jobs"]
    )
    ledger = sum(charged.values()) + report["overhead_gpu_seconds"] + report["unattributed_gpu_seconds"]
    assert abs(ledger - of_pool) <= 2 * report["gpus"], report
    # As Slurm would let: users see their own jobs, a coordinator the account's, an operator all.
    coordinator = site.plexrl("report", "--pool", POOL, "--account", "ml", user="bob", check=False)
    assert coordinator.returncode != 0 and "your own jobs only" in coordinator.stderr
    everybody = json.loads(site.plexrl("report", "--pool", POOL, "--json", user="plexrl").stdout)
    assert {job["user"] for job in everybody["jobs"]} == {"alice", "bob"}


def test_a_coordinator_reads_the_accounts_report(site: Site):
    run = site.cluster.run
    run("root", ["sacctmgr", "-i", "add", "coordinator", "account=bio", "names=alice"])
    try:
        site.start()
        site.result("bob", site.submit("bob", "sft.py", "--steps", "2", "--rank", "4"), 200)
        site.stop()
        seen = json.loads(site.plexrl("report", "--pool", POOL, "--json", user="alice").stdout)
        assert [job["user"] for job in seen["jobs"]] == ["bob"]
        refused = site.plexrl("report", "--pool", POOL, "--account", "ml", user="alice", check=False)
        assert refused.returncode == 2 and "your own jobs and those of bio only" in refused.stderr
    finally:
        run("root", ["sacctmgr", "-i", "delete", "coordinator", "account=bio", "names=alice"])
