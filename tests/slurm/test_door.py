"""The door on a real Slurm: `--plexrl-pool` attaches, or the job does not run. The attach helper is a fake one."""

import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.slurm.door import GOOD_HELPER, USER, Door, ends

POOL = "--plexrl-pool=demo"


@pytest.fixture(scope="module")
def one_door(cluster) -> Iterator[Door]:
    door = Door(cluster, cluster.directory / "door")
    yield door
    door.restore()


@pytest.fixture
def door(one_door: Door) -> Door:
    one_door.reset()
    return one_door


def refused(done, *words: str) -> str:
    """An sbatch that ended without a job, and said why."""
    assert done.returncode != 0 and not done.stdout, (done.stdout, done.stderr)
    for word in words:
        assert word in done.stderr
    return done.stderr


# ---- an attached job ----


def test_an_attached_job_gets_the_pool_and_no_gpu(door: Door):
    job = door.run(POOL, "--gres=gpu:1", script="env; ls -l /proc/self/fd >&2")
    env, shown = job.environment, job.show()
    assert shown["JobState"] == "COMPLETED"
    assert (env["TINKER_BASE_URL"], env["TINKER_API_KEY"]) == ("http://127.0.0.1:4711", "tml-secret")
    assert env["OPENAI_BASE_URL"] and env["OPENAI_API_KEY"] and env["NO_PROXY"] and env["no_proxy"]
    assert env["SLURM_PLEXRL_POOL"] == "demo"
    assert env["CUDA_VISIBLE_DEVICES"] == "" and env["ROCR_VISIBLE_DEVICES"] == ""
    assert not [name for name in env if "GPU" in name and name.startswith("SLURM")]
    assert "gpu" not in shown["TRES"] and "plexrl_demo" in shown["Licenses"]
    assert job.note == {"pool": "demo", "gres": "gpu:1", "gpus": 1}


def test_accounting_knows_the_licence_and_no_gpu(door: Door):
    job = door.run(POOL, "--gres=gpu:1")
    row = ["sacct", "-nPX", "-j", str(job.number), "-o", "AllocTRES,AdminComment"]
    for _ in range(100):
        row_text = door.cluster.run("root", row).stdout
        if "cpu=" in row_text and "PXL1:" in row_text:
            break
    assert "license/plexrl_demo=1" in row_text and "gpu" not in row_text.partition("|")[0]
    assert '"pool":"demo"' in row_text


@pytest.mark.parametrize(
    ("options", "gres", "gpus"),
    [
        ((), "", 0),
        (("--gres=gpu",), "gpu", 1),
        (("--gres=gpu:1",), "gpu:1", 1),
        (("--gpus=2",), "gpu:2", 2),
        (("-G", "1"), "gpu:1", 1),
        (("--gpus-per-node=1",), "gpu:1", 1),
        (("--gpus-per-node=8", "-N", "2"), "gpu:8", 16),
        (("--gpus=16", "--gpus-per-node=8", "-N", "2"), "gpu:8,gpu:16", 16),
        (("--gres=gpu:h100:4",), "gpu:h100:4", 4),
    ],
)
def test_each_way_of_asking_is_stripped_and_remembered_and_srun_works(door: Door, options, gres, gpus):
    job = door.run(POOL, *options, script="env; srun /usr/bin/env | sed s/^/step-/")
    env, shown = job.environment, job.show()
    assert shown["JobState"] == "COMPLETED", job.output
    assert "gpu" not in shown["TRES"].lower() and shown["NumNodes"] == "1"
    assert job.note == {"pool": "demo", "gres": gres, "gpus": gpus}
    assert env["step-TINKER_BASE_URL"] == env["TINKER_BASE_URL"] and env["step-CUDA_VISIBLE_DEVICES"] == ""
    assert (door.seen / f"{job.number}.helper").read_text().count("--pool\n") == 1


def test_more_nodes_become_one_and_it_says_so(door: Door):
    done = door.submit(POOL, "-N", "2", "--ntasks-per-node=2", script="srun hostname")
    assert "2 nodes were asked for" in done.stderr
    job = door.job(done).wait()
    assert job.show()["JobState"] == "COMPLETED" and job.show()["NumNodes"] == "1", job.output


def test_many_tasks_and_steps_attach_once(door: Door):
    job = door.run(POOL, "-n", "4", script="srun -n 4 printenv TINKER_API_KEY; srun -n 2 printenv TINKER_API_KEY")
    assert job.output.split() == ["tml-secret"] * 6
    assert len(list(door.seen.glob(f"{job.number}.*"))) == 2


def test_export_none(door: Door):
    steps = {"step-": "", "all-": "--export=ALL", "list-": "--export=X=1"}
    script = "env; " + "; ".join(f"srun {how} /usr/bin/env | sed s/^/{prefix}/" for prefix, how in steps.items())
    job = door.run(POOL, "--gres=gpu:1", "--export=NONE", script=script, env={"OUTSIDE": "1"})
    env = job.environment
    assert job.show()["JobState"] == "COMPLETED" and "OUTSIDE" not in env, job.output
    for prefix in ("", *steps):
        assert env[f"{prefix}TINKER_BASE_URL"] == "http://127.0.0.1:4711", prefix
        assert env[f"{prefix}OPENAI_API_KEY"] == "tml-secret" and env[f"{prefix}CUDA_VISIBLE_DEVICES"] == "", prefix


def test_the_option_in_the_script_and_the_command_line_wins(door: Door):
    text = "#SBATCH --plexrl-pool=unknown\n#SBATCH --gres=gpu:1\nenv"
    job = door.run(POOL, script=text)
    assert job.note["pool"] == "demo" and job.environment["SLURM_PLEXRL_POOL"] == "demo"
    refused(door.submit(script=text), "unknown", "demo, lab")


def test_the_users_own_variables_do_not_win(door: Door):
    env = {"TINKER_BASE_URL": "https://elsewhere.example", "OPENAI_API_KEY": "sk-mine"}
    job = door.run(POOL, script="env", env=env)
    assert job.environment["TINKER_BASE_URL"] == "http://127.0.0.1:4711"
    assert job.environment["OPENAI_API_KEY"] == "tml-secret"


def test_the_helper_gets_what_it_needs_and_nothing_else(door: Door):
    door.write_plugstack(pool_uids="0,991", munge_socket="/some/socket", deadline="7")
    job = door.run(POOL, env={"LD_PRELOAD": "", "PYTHONPATH": "/tmp", "TINKER_API_KEY": "mine"})
    lines = (door.seen / f"{job.number}.helper").read_text().splitlines()
    words = f"--registry {door.registry} --pool demo --pool-uids 0,991"
    words += " --munge-socket /some/socket --lifeline 3 --deadline 7"
    assert lines[: len(words.split())] == words.split()
    variables = {line.split("=")[0] for line in lines if re.match(r"\w+=", line)} - {"PWD", "SHLVL", "_", "uid"}
    assert variables == {"SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PATH", "LANG"}
    assert f"uid={pwd.getpwnam(USER).pw_uid}" in lines
    numbers = {line for line in lines if line.isdigit() and len(line) < 3} - {"7"}
    assert numbers <= {"0", "1", "2", "3", "4"}  # 4: ls's own


def test_how_old_versions_may_be_is_told_to_the_helper(door: Door):
    job = door.run(POOL, env={"PLEXRL_MAX_STALENESS": "2"})
    assert "PLEXRL_MAX_STALENESS=2" in (door.seen / f"{job.number}.helper").read_text().splitlines()
    late = door.run(POOL, script="echo SCRIPT-RAN", env={"PLEXRL_MAX_STALENESS": "1" * 40})
    not_started(late, "PLEXRL_MAX_STALENESS cannot be read, or is too long for a number")


def test_a_requeued_job_attaches_again(door: Door):
    script = "echo again=$TINKER_API_KEY; [ $SLURM_RESTART_COUNT ] || sleep 100"
    job = door.job(door.submit(POOL, "--requeue", script=script, env={"SLURM_RESTART_COUNT": "7"}))
    first = job.proxy
    seen = door.seen / f"{job.number}.helper"
    assert "SLURM_RESTART_COUNT=0" in seen.read_text()
    seen.unlink()
    door.cluster.run("root", ["scontrol", "requeue", str(job.number)])
    assert ends(first)
    until = time.monotonic() + 30
    while ((shown := job.show())["JobState"], shown["Restarts"]) != ("PENDING", "1"):
        assert time.monotonic() < until, shown
        time.sleep(0.1)
    # Slurm puts a requeued job off by two minutes, because slurmd refuses a credential that is not from a later second
    # than the end of the job's first life ("Job credential revoked", and the job fails). Two seconds are enough.
    door.cluster.run("root", ["scontrol", "update", f"jobid={job.number}", "StartTime=now+2"])
    assert "SLURM_RESTART_COUNT=1" in job.wait_for(seen)
    assert job.wait().output.count("again=tml-secret") == 1  # the second run's output replaces the first's


SHOW = """
slurm.log_user("<%s|%s|%s|%s>", job_desc.licenses or "", job_desc.tres_per_node or "", job_desc.tres_per_job or "",
    job_desc.admin_comment or "")
return slurm.ERROR"""


def rewritten(door: Door, *options: str) -> list[str]:
    """Licences, TRES per node, TRES per job and AdminComment as our module leaves them; the job is then rejected."""
    return re.search(r"<(.*)>", refused(door.submit(*options, env=door.more_gres)))[1].split("|")


def test_other_gres_are_kept_as_sbatch_writes_them(door: Door):
    door.write_site_lua(after=SHOW)
    for other in ("lscratch:10", "lscratch:ssd:10,fpga:1"):
        alone = rewritten(door, f"--gres={other}")[1]
        assert alone
        for options in (
            (f"--gres=gpu:2,{other}",),
            (f"--gres={other},gpu:2",),
            (f"--gres={other}", "--gpus-per-node=2"),
        ):
            licences, node, job, comment = rewritten(door, POOL, *options)
            assert (licences, node, job) == ("plexrl_demo:1", alone, ""), options
            assert '"gres":"gpu:2","gpus":2' in comment


def test_licences_of_the_user_are_kept(door: Door):
    door.write_site_lua(after=SHOW)
    assert rewritten(door, POOL, "-L", "matlab:1")[0] == "matlab:1,plexrl_demo:1"
    assert rewritten(door, POOL, "-L", "matlab:1;ansys:2")[0] == "matlab:1;ansys:2;plexrl_demo:1"


def test_a_note_in_admin_comment_is_kept(door: Door):
    door.write_site_lua(rules="job_desc.admin_comment = 'JS1:None'")
    job = door.run(POOL, "--comment=mine")
    shown = job.show()
    assert shown["Comment"] == "mine"
    assert shown["AdminComment"] == 'JS1:None PXL1:{"pool":"demo","gres":"","gpus":0}'


def test_the_sites_table(door: Door):
    table = "{ partition = { gpu = 'cpu' }, features = { h100 = '' }, reservation = { ['*'] = '' }, memory_mib = 1024 }"
    door.write_site_lua(table=table)
    done = door.submit(POOL, "-p", "gpu", "-C", "h100", "--reservation=gone", "--mem=40G")
    shown = door.job(done).wait().show()
    assert (shown["Partition"], shown["MinMemoryNode"], shown["JobState"]) == ("cpu", "1G", "COMPLETED")
    assert "40960 MiB of memory were asked for" in done.stderr
    refused(door.submit("--reservation=gone"), "reservation")  # others keep what they asked for


# ---- the end ----


def test_the_proxy_ends_with_the_script(door: Door):
    job = door.run(POOL, script="sleep 0.5")
    assert ends(job.proxy)


def test_the_proxy_lives_as_long_as_the_script_whatever_it_does(door: Door):
    script = f"""for n in $(ls /proc/$$/fd); do [ $n -gt 2 -a $n -lt 255 ] && eval "exec $n>&-"; done
        setsid sleep 30 </dev/null >/dev/null 2>&1 &
        echo $! > {door.seen}/$SLURM_JOB_ID.left
        sleep 1
        kill -0 $(cat {door.seen}/$SLURM_JOB_ID.proxy) && echo alive"""
    job = door.run(POOL, script=script)
    assert job.output == "alive\n" and ends(job.proxy)
    os.kill(int((door.seen / f"{job.number}.left").read_text()), 9)  # linuxproc lets it live


def test_the_proxy_ends_with_a_killed_slurmstepd(door: Door):
    job = door.job(door.submit(POOL, script=f"echo $PPID > {door.seen}/$SLURM_JOB_ID.step; exec sleep 100"))
    slurmstepd = int(job.wait_for(door.seen / f"{job.number}.step"))
    os.kill(slurmstepd, 9)
    assert ends(job.proxy)
    door.cluster.run("root", ["scancel", str(job.number)])


def test_no_orphan_after_scancel(door: Door):
    job = door.job(door.submit(POOL, script="srun sleep 100"))
    proxy = job.proxy
    job.cancel()
    assert job.wait().show()["JobState"] == "CANCELLED"
    assert ends(proxy)


def test_scancel_while_the_helper_works(door: Door):
    door.write_helper("#!/bin/sh\necho $$ > SEEN/$SLURM_JOB_ID.proxy\nsleep 100\n")
    job = door.job(door.submit(POOL, script="echo SCRIPT-RAN"))
    helper = job.proxy
    job.cancel()
    assert ends(helper)
    assert job.wait().show()["JobState"] in ("CANCELLED", "FAILED")
    assert "SCRIPT-RAN" not in job.output
    nodes = door.cluster.run("root", ["sinfo", "-h", "-o", "%T"]).stdout
    assert "drain" not in nodes and "down" not in nodes


# ---- faults on the node: the script is not started ----

HELPERS = {
    "says no": ("#!/bin/sh\necho 'plexrl: no head' >&2\nexit 78\n", "no head"),
    "says no after an answer": (None, "ended with 3"),
    "is killed": ("#!/bin/sh\nkill -9 $$\n", "signal 9"),
    "says nothing": ("#!/bin/sh\nexit 0\n", "did not say TINKER_BASE_URL"),
    "prints garbage": ("#!/bin/sh\nhead -c 3000 /dev/urandom | base64\n", "not KEY=VALUE"),
    "prints binary": ("#!/bin/sh\nhead -c 3000 /dev/urandom\n", "attach helper"),
    "prints zeros": ("#!/bin/sh\nhead -c 300 /dev/zero\n", "not text"),
    "prints without end": ("#!/bin/sh\nyes A=B\n", "more than it should"),
    "breaks off": ("#!/bin/sh\nprintf TINKER_BASE_URL=http\n", "breaks off"),
    "leaves the key empty": (None, "did not say TINKER_API_KEY"),
    "is no program": ("nonsense\0", "cannot start"),
}


def not_started(job, reason: str) -> None:
    shown = job.show()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "78:0"), job.output
    assert reason in job.output and "SCRIPT-RAN" not in job.output


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_that_fails(door: Door, name: str):
    text, reason = HELPERS[name]
    if name == "says no after an answer":
        text = GOOD_HELPER + "exit 3\n"
    elif name == "leaves the key empty":
        text = GOOD_HELPER.replace("TINKER_API_KEY=tml-secret", "TINKER_API_KEY=")
    door.write_helper(text)
    not_started(door.run(POOL, script="echo SCRIPT-RAN"), reason)


def test_a_helper_that_hangs(door: Door):
    door.write_plugstack(deadline="1")
    door.write_helper("#!/bin/sh\necho $$ > SEEN/$SLURM_JOB_ID.proxy\ntrap '' TERM\nsleep 100\n")
    job = door.run(POOL, script="echo SCRIPT-RAN")
    not_started(job, "did not answer in time")
    assert ends(job.proxy)


def test_a_helper_that_closes_its_output_and_hangs(door: Door):
    door.write_plugstack(deadline="1")
    door.write_helper(GOOD_HELPER + "exec >/dev/null\nsleep 100\n")
    job = door.run(POOL, script="echo SCRIPT-RAN")
    not_started(job, "did not end in time")
    assert ends(job.proxy)


def test_no_helper(door: Door):
    door.helper.unlink()
    not_started(door.run(POOL, script="echo SCRIPT-RAN"), "is not there")


def spoil_owner(door: Door) -> None:
    os.chown(door.helper, pwd.getpwnam(USER).pw_uid, -1)


def spoil_mode(door: Door) -> None:
    door.helper.chmod(0o775)


def spoil_link(door: Door) -> None:
    real = door.bin / "real"
    door.helper.replace(real)
    door.helper.symlink_to(real)


def spoil_folder(door: Door) -> None:
    door.bin.chmod(0o777)


@pytest.mark.parametrize("spoil", [spoil_owner, spoil_mode, spoil_link, spoil_folder])
def test_a_helper_that_others_could_write(door: Door, spoil):
    spoil(door)
    not_started(door.run(POOL, script="echo SCRIPT-RAN"), "attach helper")


def test_a_plugstack_line_that_is_wrong_on_the_node(door: Door):
    # sbatch reads the line at submission, slurmstepd when the job starts
    done = door.submit(POOL, "--hold", script="echo SCRIPT-RAN")
    job = door.job(done)
    door.write_plugstack(helper="relative")
    door.cluster.run("root", ["scontrol", "release", str(job.number)])
    not_started(job.wait(), "helper= is not an absolute path")
    other = door.run(script="echo SCRIPT-RAN")
    assert other.output == "SCRIPT-RAN\n"


def test_a_node_without_the_plugin_sends_nobody_to_a_public_endpoint(door: Door):
    job = door.job(door.submit(POOL, "--hold", script="env", env={"OPENAI_API_KEY": "sk-mine"}))
    (door.etc / "plugstack.conf").write_text("")
    door.cluster.run("root", ["scontrol", "release", str(job.number)])
    env = job.wait().environment
    for kind in ("TINKER", "OPENAI"):
        assert (
            env[f"{kind}_BASE_URL"].startswith("http://127.0.0.1:9/") and env[f"{kind}_API_KEY"] == "tml-not-attached"
        )


# ---- refusals in sbatch: nothing is submitted ----


@pytest.mark.parametrize(
    "name", ["Demo", "demo:1,matlab", "../demo", "", "a" * 33, "1st", "de mo", 'de"mo', "demo.live"]
)
def test_an_invalid_name(door: Door, name: str):
    before = door.jobs()
    refused(door.submit(f"--plexrl-pool={name}"), "invalid pool name", "demo, lab")
    assert door.jobs() == before


def test_an_undeclared_name(door: Door):
    before = door.jobs()
    refused(door.submit("--plexrl-pool=nosuch"), "there is no pool 'nosuch'", "demo, lab")
    assert door.jobs() == before


def test_no_pool_is_declared(door: Door):
    for path in door.registry.iterdir():
        path.unlink()
    refused(door.submit(POOL), "there is no pool 'demo'", "none")


def test_no_registry(door: Door):
    door.registry.rename(door.folder / "elsewhere")
    try:
        refused(door.submit(POOL), "registry", "No such file")
        door.registry.symlink_to(door.folder / "elsewhere")
        refused(door.submit(POOL), "registry")
        door.registry.unlink()
    finally:
        (door.folder / "elsewhere").rename(door.registry)


def test_a_registry_that_others_could_write(door: Door):
    door.registry.chmod(0o777)
    refused(door.submit(POOL), "others can write")
    door.registry.chmod(0o755)
    os.chown(door.registry, pwd.getpwnam("bob").pw_uid, -1)
    refused(door.submit(POOL), "not owned by root or a pool account")


def test_a_declaration_that_others_could_write(door: Door):
    file = door.registry / "demo.json"
    file.chmod(0o664)
    refused(door.submit(POOL), "demo.json", "others can write")
    file.chmod(0o644)
    os.chown(file, pwd.getpwnam("bob").pw_uid, -1)
    refused(door.submit(POOL), "demo.json")
    door.write_plugstack(pool_uids=str(pwd.getpwnam("bob").pw_uid))
    assert door.run(POOL).show()["JobState"] == "COMPLETED"
    file.unlink()
    file.symlink_to(door.registry / "lab.json")
    refused(door.submit(POOL), "demo.json", "not a link")
    file.unlink()
    os.mkfifo(file)
    refused(door.submit(POOL), "demo.json", "regular file")


@pytest.mark.parametrize(
    "change", [{"pool_uids": "0,x"}, {"pool_uids": "-1"}, {"deadline": "0"}, {"registry": None}, {"wrong": "1"}]
)
def test_a_plugstack_line_that_is_wrong_here(door: Door, change):
    door.write_plugstack(**change)
    refused(door.submit(POOL), "plugstack.conf")
    assert door.run().show()["JobState"] == "COMPLETED"


# ---- refusals in slurmctld: spellings and doors that are not handled yet ----


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--gpus-per-task=1", "-n", "1"), "--gpus-per-task"),
        (("--gpus-per-socket=1", "--sockets-per-node=1"), "--gpus-per-socket"),
        (("--gpus=1", "--cpus-per-gpu=2"), "--cpus-per-gpu"),
        (("--gpus=1", "--mem-per-gpu=1G"), "--mem-per-gpu"),
        (("--gpus=1", "--ntasks-per-gpu=1"), "--ntasks-per-gpu"),
        (("--gpus=1", "--gpu-bind=single:1"), "--gpu-bind"),
        (("--gpus=1", "--gpu-freq=high"), "--gpu-freq"),
        (("--gres=shard:1",), "share of a GPU"),
        (("--gres=lscratch:1,mps:10",), "share of a GPU"),
        (("--exclusive",), "--exclusive"),
        (("--exclusive=user",), "--exclusive"),
        (("--array=1-2",), "arrays"),
        (("-n", "1", ":", "-n", "1"), "heterogeneous"),
        (("-L", "matlab|ansys"), "choice of licences"),
        (("-L", "plexrl_demo:1"), "licence of a pool"),
    ],
)
def test_what_is_not_handled_is_refused(door: Door, options, word):
    before = door.jobs()
    refused(door.submit(POOL, *options, env=door.more_gres), word)
    assert door.jobs() == before


@pytest.mark.parametrize(
    "command", [["srun", POOL, "true"], ["salloc", POOL, "true"], ["srun", POOL, "--gpus=1", "true"]]
)
def test_srun_and_salloc_outside_a_job(door: Door, command):
    done = door.cluster.run(USER, command, check=False, timeout=30)
    assert done.returncode != 0 and "sbatch" in done.stderr


def test_srun_with_the_option_inside_jobs(door: Door):
    attached = door.run(POOL, script=f"srun {POOL} printenv TINKER_API_KEY; srun --plexrl-pool=lab true || echo no")
    assert attached.output.split()[0] == "tml-secret" and attached.output.split()[-1] == "no"
    plain = door.run(script=f"srun {POOL} echo SCRIPT-RAN || echo no")
    assert plain.output.split()[-1] == "no" and "SCRIPT-RAN" not in plain.output


def test_an_sbatch_inside_an_attached_job_asks_for_itself(door: Door):
    inner = "sbatch --parsable --output=/dev/null --wrap=true"
    job = door.run(POOL, script=inner)
    nested = door.cluster.run("root", ["scontrol", "show", "job", job.output.strip()]).stdout
    assert "PXL1" not in nested and "plexrl_" not in nested


def test_a_job_that_only_pretends(door: Door):
    refused(door.submit("-L", "plexrl_demo:1"), "licence of a pool")
    refused(door.submit(env={"SLURM_SPANK_PLEXRL_POOL": "demo"}), "SLURM_SPANK_PLEXRL_POOL")
    door.write_site_lua(rules="job_desc.admin_comment = 'PXL1:{}'")
    refused(door.submit(), "PXL1")
    refused(door.submit(POOL), "PXL1")


# ---- the module is broken: jobs that ask for a pool are rejected, all others pass ----

BREAKS = {
    "syntax": lambda text: text + "\nx = = 1\n",
    "missing": lambda text: None,
    "error at load": lambda text: "error('broken')\n" + text,
    "error in submit": lambda text: text.replace(
        "local function strip_gpus(job)", "local function strip_gpus(job)\nx.y = 1"
    ),
    "error before the option is read": lambda text: text.replace(
        "local function submit(job, submit_uid, map)", "local function submit(job, submit_uid, map)\nx.y = 1"
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_module(door: Door, name: str):
    before = door.jobs()
    text = BREAKS[name](door.module.read_text())
    if text is None:
        door.module.unlink()
    else:
        assert text != door.module.read_text()
        door.module.write_text(text)
    door.write_site_lua()
    refused(door.submit(POOL, "--gres=gpu:1"), "module")
    assert door.jobs() == before
    job = door.run("--gres=gpu:1")
    assert job.show()["JobState"] == "COMPLETED" and "gres/gpu=1" in job.show()["TRES"]


# ---- after submission ----


@pytest.mark.parametrize(
    "change", ["Gres=gpu:1", "Licenses=plexrl_lab:1", "Licenses=", "AdminComment=x", "TresPerNode=gres:gpu:1"]
)
def test_an_attached_job_keeps_its_pool(door: Door, change: str):
    job = door.job(door.submit(POOL, "--hold"))
    before = job.show()
    done = door.cluster.run(USER, ["scontrol", "update", f"jobid={job.number}", change], check=False)
    after = job.show()
    assert done.returncode != 0, done.stdout
    assert (after["Licenses"], after["AdminComment"]) == (before["Licenses"], before["AdminComment"])
    assert "gpu" not in after.get("TresPerNode", "")
    door.cluster.run(USER, ["scontrol", "update", f"jobid={job.number}", "TimeLimit=3"])
    job.cancel()


def test_the_licence_cannot_be_handed_back_while_running(door: Door):
    job = door.job(door.submit(POOL, script="sleep 100")).wait("RUNNING")
    assert door.cluster.run(USER, ["scontrol", "update", f"jobid={job.number}", "Licenses="], check=False).returncode
    assert "plexrl_demo" in job.show()["Licenses"]
    door.cluster.run("root", ["scontrol", "update", f"jobid={job.number}", "Comment=by-root"])
    job.cancel()


# ---- everybody else ----


def test_a_job_without_the_option_is_untouched(door: Door):
    job = door.run("--gres=gpu:1", "-N", "2", script="env; srun -n 2 /usr/bin/env | sed s/^/step-/")
    env, shown = job.environment, job.show()
    assert shown["JobState"] == "COMPLETED" and shown["NumNodes"] == "2" and "gres/gpu=2" in shown["TRES"]
    assert env["CUDA_VISIBLE_DEVICES"] == "0" and "AdminComment" not in shown
    assert not [name for name in env if "PLEXRL_POOL=" in name or name.startswith(("TINKER", "OPENAI", "SLURM_PLEXRL"))]


def test_its_owner_may_change_it(door: Door):
    job = door.job(door.submit("--hold"))
    door.cluster.run(USER, ["scontrol", "update", f"jobid={job.number}", "Gres=gpu:1"])
    assert "gpu" in job.show()["TresPerNode"]
    job.cancel()


def test_help_names_the_option(door: Door):
    assert "--plexrl-pool=NAME" in door.cluster.run(USER, ["sbatch", "--help"]).stdout


def test_the_plugin_exports_only_what_slurm_looks_for(door: Door):
    done = subprocess.run(["nm", "-D", "--defined-only", str(door.plugin)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert all(name.startswith(("plugin_", "spank_plugin_", "slurm_spank_")) for name in names), names
