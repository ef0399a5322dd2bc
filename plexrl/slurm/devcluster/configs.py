"""The text of every configuration file of a development cluster."""

import socket
from pathlib import Path

from msgspec import Struct

CLUSTER = "plexrl-dev"
DATABASE = "slurm_acct"
POOLS = ("demo", "lab", "test", "bench")
LICENCES_PER_POOL = 16

# The host may have two cores; logical jobs ask for a CPU each and wait most of the time.
_CPUS_PER_NODE = 16


class Layout(Struct, frozen=True):
    """Paths below DIR and the shape of the cluster, as the configuration files need them."""

    root: Path
    nodes: int
    gpus_per_node: int
    ports: dict[str, int]
    service_uid: int
    version: tuple[int, int]

    @property
    def conf(self) -> Path:
        """slurm.conf, what SLURM_CONF points to."""
        return self.root / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """The own munged's socket."""
        return self.root / "run" / "munge.socket"

    @property
    def names(self) -> list[str]:
        """Node names n1, n2, ..."""
        return [f"n{index}" for index in range(1, self.nodes + 1)]


def answers_on_loopback() -> bool:
    """Whether this machine's own name means loopback: Slurm binds either to that address or to every interface."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return False


def slurm_conf(at: Layout) -> str:
    """slurm.conf."""
    root, host = at.root, socket.gethostname().partition(".")[0]
    bind = "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny\n" if answers_on_loopback() else ""
    licences = ",".join(f"plexrl_{pool}:{LICENCES_PER_POOL}" for pool in POOLS)
    tres = ",".join(["gres/gpu", *(f"license/plexrl_{pool}" for pool in POOLS)])
    gres = f"Gres=gpu:{at.gpus_per_node} " if at.gpus_per_node else ""
    nodes = "\n".join(
        f"NodeName={name} NodeHostName={host} NodeAddr=127.0.0.1 Port={at.ports[name]} CPUs={_CPUS_PER_NODE} Boards=1 "
        f"SocketsPerBoard=1 CoresPerSocket={_CPUS_PER_NODE} ThreadsPerCore=1 RealMemory=65536 {gres}State=UNKNOWN"
        for name in at.names
    )
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={at.ports["slurmctld"]}
{bind}SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at.munge_socket}
StateSaveLocation={root}/var/slurmctld
SlurmdSpoolDir={root}/var/slurmd-%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
MailProg=/bin/true

# One machine without systemd and without cgroups of its own plays all nodes.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none

SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_min_interval=100000
PriorityType=priority/multifactor
PriorityWeightFairshare=1000
GresTypes=gpu
Licenses={licences}

JobSubmitPlugins=lua
PlugStackConfig={root}/etc/plugstack.conf

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={at.ports["slurmdbd"]}
# Connections to slurmdbd do not look at AuthInfo: this is the path of their MUNGE socket.
AccountingStoragePass={at.munge_socket}
AccountingStorageEnforce=associations,limits
AccountingStorageTRES={tres}
PrivateData=jobs

{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=cpu Nodes=ALL MaxTime=INFINITE State=UP
"""


def gres_conf(at: Layout) -> str:
    """gres.conf: GPUs are null devices of ours, so that Slurm counts and assigns real device files."""
    if not at.gpus_per_node:
        return "AutoDetect=off\n"
    last = at.gpus_per_node - 1
    files = "nvidia0" if last == 0 else f"nvidia[0-{last}]"
    lines = [f"NodeName={name} Name=gpu File={at.root}/dev/{name}/{files}" for name in at.names]
    return "\n".join(["AutoDetect=off", *lines, ""])


def cgroup_conf(at: Layout) -> str:
    """cgroup.conf. `disabled` came with 24.05 and kills slurmd 22.05; the v1 plugin mounts nothing unasked."""
    return f"CgroupPlugin={'disabled' if at.version >= (24, 5) else 'cgroup/v1'}\n"


def slurmdbd_conf(at: Layout) -> str:
    """slurmdbd.conf. MariaDB lets OS root in by its unix socket, so there is no password to keep."""
    bind = "CommunicationParameters=NoInAddrAny\n" if answers_on_loopback() else ""
    return f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={at.ports["slurmdbd"]}
{bind}SlurmUser=root
PrivateData=jobs
AuthType=auth/munge
AuthInfo=socket={at.munge_socket}
PidFile={at.root}/run/slurmdbd.pid
LogFile={at.root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc={DATABASE}
"""


def plugstack_conf(at: Layout) -> str:
    """plugstack.conf: `required`, because the return code of an optional plugin is thrown away."""
    root = at.root
    return (
        f"required {root}/opt/lib/spank_plexrl.so registry={root}/registry helper={root}/opt/bin/plexrl-attach-helper "
        f"pool_uids=0,{at.service_uid} munge_socket={at.munge_socket}\n"
    )


def job_submit_lua(at: Layout) -> str:
    """The site's own job_submit.lua: slurm_plugin/job_submit.lua.example with this site's table.

    Written anew whenever plexrl.lua may have changed: slurmctld loads both again when this file is newer.
    """
    return _JOB_SUBMIT.format(module=at.root / "opt" / "lib" / "plexrl.lua")


_JOB_SUBMIT = """\
local loaded, plexrl = pcall(dofile, "{module}")
local site = {{ partition = {{ gpu = "cpu" }} }}

function slurm_job_submit(job_desc, part_list, submit_uid)
	if loaded then
		if plexrl.submit(job_desc, part_list, submit_uid, site) ~= slurm.SUCCESS then return slurm.ERROR end
	elseif table.concat(job_desc.spank_job_env or {{ [0] = "" }}, " ", 0):find("PLEXRL_POOL=", 1, true) then
		slurm.log_user("%s", "plexrl: the site's PlexRL module cannot be loaded: " .. tostring(plexrl))
		return slurm.ERROR
	end
	return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
	if loaded then
		if plexrl.modify(job_desc, job_rec, part_list, modify_uid) ~= slurm.SUCCESS then return slurm.ERROR end
	elseif modify_uid ~= 0 and (job_rec.admin_comment or ""):find("PXL1:", 1, true) then
		return slurm.ERROR
	end
	return slurm.SUCCESS
end

return slurm.SUCCESS
"""
