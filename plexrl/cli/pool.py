"""`plexrl pool`: declare, start, watch, drain and stop pools; and the processes that a pool consists of."""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from plexrl.cli.books import trusted
from plexrl.types import BadInput, PlexrlError
from plexrl.wire.registry import Registry

app = typer.Typer(no_args_is_help=True, help="Declare, start, watch, drain and stop pools.")

_NAME = typer.Argument(..., metavar="NAME", help="The pool.")
_REGISTRY = typer.Option(
    ..., "--registry", envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry, or your own pools'."
)
_POOL_UIDS = typer.Option(
    "", "--pool-uids", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
)
_RELOAD_S = 30.0
_JSON = typer.Option(False, "--json", help="Print JSON.")


def _lifecycle(registry: Registry):
    from plexrl.pool.lifecycle import Lifecycle
    from plexrl.slurm.commands import SlurmCommands

    return Lifecycle(registry, SlurmCommands() if shutil.which("sbatch") else None)


def _say(as_json: bool, words: str, **facts: object) -> None:
    """Words for people, or the same as JSON."""
    print(msgspec.json.encode(facts).decode() if as_json else words)


def _placeable(config: str | Path, gpus: int | None = None) -> None:
    """Refuse a configuration that a pool (of so many GPUs) could not serve. Raises BadInput with file, line, mend."""
    from plexrl.config import read
    from plexrl.pool import fits

    read(config, fits.problems, *([] if gpus is None else [lambda config: fits.gangs(config, gpus)]))


@app.command()
def declare(
    name: str = _NAME,
    config: Path = typer.Option(..., "--config", metavar="FILE", help="The pool's plexrl.yaml."),
    registry: str = _REGISTRY,
    owner: str = typer.Option("", help="Service account; default: service_user of the file."),
    private: bool = typer.Option(False, "--private", help="A pool of your own, for your uid only, without Slurm."),
    fresh: bool = typer.Option(False, "--fresh", help="Remove what the pool left: journal, ledger, logs, checkpoints."),
    as_json: bool = _JSON,
) -> None:
    """Make a pool known for good; done once, as root: it makes the pool's folders and holds its licence until it is up.

    With --private: a pool of your own, which `plexrl pool run` starts.
    """
    from plexrl.accounting.store import reports_of

    _placeable(config)
    life = _lifecycle(trusted(registry))
    declared = life.declare(name, config, owner or None, private)
    if fresh:
        life.forget(name)
    if not private:
        life.make_folder(Path(declared.state_dir), declared.owner_uid, 0o700)
        life.make_folder(reports_of(registry, name), declared.owner_uid, 0o755)
        life.hold(name)
    told = f"pool {name} is declared for uid {declared.owner_uid}, {declared.kind}, configured by {declared.config}"
    _say(as_json, told, **msgspec.structs.asdict(declared))


@app.command()
def start(
    name: str = _NAME,
    registry: str = _REGISTRY,
    nodes: int = typer.Option(1, "--nodes", min=1, help="Nodes of the allocation."),
    gpus_per_node: int = typer.Option(1, "--gpus-per-node", min=1, help="GPUs on each."),
    config: Path | None = typer.Option(None, "--config", metavar="FILE", help="Declare it again with this file first."),
    wait: float = typer.Option(300.0, help="Seconds to wait until it is ready; 0: do not wait."),
    option: list[str] = typer.Option([], "--sbatch", metavar="OPTION", help="One more option for sbatch; repeatable."),
    as_json: bool = _JSON,
) -> None:
    """Submit the pool as a Slurm job of its service account; as that account or root, with `plexrl` on the PATH."""
    books = trusted(registry)
    life = _lifecycle(books)
    if config is not None:
        from plexrl.pool.lifecycle import account_of

        life.declare(name, config, account_of(books.declared(name).owner_uid), private=False)
    _placeable(books.declared(name).config, nodes * gpus_per_node)
    job = life.start(name, nodes, gpus_per_node, option)
    if not as_json:
        print(f"pool {name} is Slurm job {job}")
    live = life.wait(name, job, wait) if wait else None
    if live is not None or as_json:
        epoch = live.epoch if live else None
        _say(as_json, f"pool {name} is ready, epoch {epoch}", pool=name, slurm_job=job, epoch=epoch)


@app.command("list")
def list_(registry: str = _REGISTRY, pool_uids: str = _POOL_UIDS, as_json: bool = _JSON) -> None:
    """Every declared pool and its state."""
    books = trusted(registry, pool_uids)
    rows = []
    for name in books.names():
        live = books.live(name)
        rows.append(
            {
                "pool": name,
                "kind": books.declared(name).kind,
                "state": live.state if live else "down",
                "slurm_job": live.slurm_job if live else 0,
            }
        )
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    table = Table("pool", "kind", "state", "Slurm job")
    for row in rows:
        table.add_row(row["pool"], row["kind"], row["state"], str(row["slurm_job"] or "-"))
    Console().print(table)


@app.command()
def status(name: str = _NAME, registry: str = _REGISTRY, pool_uids: str = _POOL_UIDS, as_json: bool = _JSON) -> None:
    """One pool. Its engines and who is on which GPU are told to the service account and root. Ends with 0 when ready,
    else 1.
    """
    from plexrl.cli.shares import read_policies
    from plexrl.config import choices, read

    books = trusted(registry, pool_uids)
    declared = books.declared(name)
    live = books.live(name)
    found: dict[str, object] = {"pool": name, "state": live.state if live else "down"}
    if live is not None:
        found |= {"slurm_job": live.slurm_job, "epoch": live.epoch}
        if os.getuid() in (0, declared.owner_uid):
            detail = Path(declared.state_dir) / "run" / "status.json"
            if detail.exists():
                found |= {"detail": msgspec.json.decode(detail.read_bytes())}
            found |= {"config_refused": (read_policies(declared) or {}).get("refused", "")}
            with contextlib.suppress(BadInput):  # the file may have been changed since the pool took it
                found |= {"engines": [choice._asdict() for choice in choices(read(declared.config))]}
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print_status(found)
    raise typer.Exit(0 if found["state"] == "ready" else 1)


def _print_status(found: dict) -> None:
    console = Console()
    console.print(f"pool {found['pool']}: [bold]{found['state']}[/bold], Slurm job {found.get('slurm_job') or '-'}")
    if found.get("config_refused"):
        console.print(f"plexrl.yaml was not taken up: {found['config_refused']}", style="red", markup=False)
    if engines := found.get("engines"):
        table = Table("model", "role", "engine", "by")
        for choice in engines:
            table.add_row(*choice.values())
        console.print(table)
    detail = found.get("detail")
    if detail:
        table = Table("GPU", "turn", "phase", "resident")
        for gpu, what in detail["gpus"].items():
            table.add_row(gpu, what["turn"] or "-", what["phase"] or "-", ", ".join(what["resident"]) or "-")
        console.print(table)
        table = Table("job", "user", "account", "open calls", "models")
        for job, what in detail["jobs"].items():
            table.add_row(job, what["user"], what["account"], str(what["open_calls"]), ", ".join(what["models"]))
        console.print(table)


@app.command()
def drain(name: str = _NAME, registry: str = _REGISTRY, pool_uids: str = _POOL_UIDS, as_json: bool = _JSON) -> None:
    """Grant no new turns, let open ones end for some seconds, end the pool; `stop` also waits for that."""
    job = _lifecycle(trusted(registry, pool_uids)).drain(name)
    _say(as_json, f"pool {name} (Slurm job {job}) drains", pool=name, slurm_job=job)


@app.command()
def reload(name: str = _NAME, registry: str = _REGISTRY, pool_uids: str = _POOL_UIDS, as_json: bool = _JSON) -> None:
    """Let the pool read its plexrl.yaml again: shares, tenants, policies, budgets, limits, scheduler, models' accounts.

    It takes the whole file up or nothing of it; other changes wait for the next start. Ends with 0 when it is taken up.
    """
    from plexrl.cli.shares import read_policies

    books = trusted(registry, pool_uids)
    declared = books.declared(name)
    before = read_policies(declared)
    job = _lifecycle(books).reload(name)
    deadline = time.monotonic() + _RELOAD_S
    while before is not None and time.monotonic() < deadline:
        told = read_policies(declared) or before
        if told["readings"] > before["readings"]:
            if told["refused"]:
                raise BadInput(f"pool {name} keeps what it had: {told['refused']}")
            _say(as_json, f"pool {name} has taken {declared.config} up", pool=name, slurm_job=job, taken_up=True)
            return
        time.sleep(0.5)
    told = f"pool {name} (Slurm job {job}) is told to read {declared.config}; its status tells what came of that"
    _say(as_json, told, pool=name, slurm_job=job, taken_up=None)


@app.command()
def stop(name: str = _NAME, registry: str = _REGISTRY, pool_uids: str = _POOL_UIDS, as_json: bool = _JSON) -> None:
    """Drain the pool and wait until its Slurm job has ended; what has not after a minute is cancelled."""
    job = _lifecycle(trusted(registry, pool_uids)).stop(name)
    _say(as_json, f"pool {name} (Slurm job {job}) has ended", pool=name, slurm_job=job)


@app.command()
def run(
    name: str = _NAME,
    registry: str = _REGISTRY,
    gpus: int = typer.Option(1, min=1, help="Pretend GPUs; never more than cores."),
) -> None:
    """Run a private pool in the foreground, without Slurm: one head, one agent, this machine. Ctrl-C ends it.

    Declare it first: plexrl pool declare NAME --private --config plexrl.yaml. Programs join it from another terminal:
    plexrl attach --pool NAME -- python train.py
    """
    books = trusted(registry)
    if books.declared(name).kind != "private":
        raise BadInput(f"pool {name!r} is a site pool", f"Start it with: plexrl pool start {name}")
    if gpus > (os.cpu_count() or 1):
        raise BadInput(f"{gpus} pretend GPUs on {os.cpu_count()} cores", "Every pretend GPU needs a core of its own")
    _placeable(books.declared(name).config, gpus)
    from plexrl.pool.keeper import keep

    _log_to_stderr()
    here = [sys.executable, "-I", "-m", "plexrl.cli.main", "pool"]
    common = [name, "--registry", registry, "--allocated-us", str(time.time_ns() // 1000)]
    head = [*here, "head", *common, "--nodes", "1"]
    raise typer.Exit(asyncio.run(keep(head, [*here, "agent", *common, "--node", "local", "--gpus", str(gpus)])))


# -- the processes of a pool, started by pool.sbatch -------------------------------------------------------------------


def _allocation(allocated_us: int) -> tuple[int, int]:
    """(Slurm job id, StartTime in microseconds) of the allocation that we are in."""
    job = int(os.environ.get("SLURM_JOB_ID", "0"))
    if allocated_us or not job:
        return job if not allocated_us else 0, allocated_us or time.time_ns() // 1000
    from plexrl.slurm.commands import SlurmCommands

    info = SlurmCommands().job(job)
    if info is None or info.start_time is None:
        raise PlexrlError(f"slurmctld does not know our job {job}")
    return job, info.start_time * 1_000_000


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=os.environ.get("PLEXRL_LOG", "INFO"), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


def _patiently(write: Callable[[], object]) -> None:
    """A full disk is waited for: the pool's engine hosts keep what they have meanwhile."""
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logging.getLogger("plexrl.head").critical("%s; trying again", error)
            time.sleep(5.0)


@app.command(hidden=True)
def head(
    name: str = _NAME,
    registry: str = _REGISTRY,
    nodes: int = typer.Option(0, help="Agents to wait for; default: nodes of the Slurm job."),
    allocated_us: int = typer.Option(0, help="When the allocation began; default: asked of slurmctld."),
) -> None:
    """The head of a pool."""
    import uvloop

    from plexrl.accounting.ledger import Ledger
    from plexrl.accounting.store import Publisher, reports_of
    from plexrl.config import load
    from plexrl.gateway import TinkerGateway
    from plexrl.pool.admission import PrivateAdmission, SlurmAdmission
    from plexrl.pool.head import Allocation, Head
    from plexrl.pool.layout import Layout
    from plexrl.slurm import slurm_of

    _log_to_stderr()
    if os.getuid() == 0:
        raise BadInput("a pool's head does not run as root", "Start it under the pool's service account")
    books = trusted(registry)
    declared = books.declared(name)
    if declared.owner_uid != os.getuid():
        raise BadInput(f"pool {name!r} is declared for uid {declared.owner_uid}, this is {os.getuid()}")
    config = load(declared.config)
    job, start_us = _allocation(allocated_us)
    layout = Layout(config.state_dir)
    layout.make()
    publisher = Publisher(layout, reports_of(registry, name), config.device.bytes, config.device.kind == "cpu")
    _patiently(publisher.repair)
    ledger = Ledger(layout.ledger)
    life = _lifecycle(books)

    def admission(instance: str):
        if declared.kind == "private":
            return PrivateAdmission()
        return SlurmAdmission(slurm_of(config.slurm_backend), name, instance, config.munge_socket)

    async def serve() -> int:
        return await Head(
            name,
            books,
            config,
            TinkerGateway(config),
            admission,
            ledger.take,
            publisher.publish,
            Allocation(
                slurm_job=job, nodes=nodes or int(os.environ.get("SLURM_JOB_NUM_NODES", "1")), allocated_us=start_us
            ),
            (lambda up: life.release(name) if up else life.hold(name)) if declared.kind == "site" else None,
        ).run()

    try:
        raise typer.Exit(uvloop.run(serve()))
    finally:
        ledger.close()


@app.command(hidden=True)
def agent(
    name: str = _NAME,
    registry: str = _REGISTRY,
    node: str = typer.Option("", help="Name of this node; default: Slurm's."),
    gpus: int = typer.Option(0, help="GPUs of this node; default: as allocated."),
    allocated_us: int = typer.Option(0, help="When the allocation began; default: asked of slurmctld."),
) -> None:
    """The agent of one node."""
    from plexrl.config import load
    from plexrl.pool.agent import Agent

    _log_to_stderr()
    if os.getuid() == 0:
        raise BadInput("a pool's agent does not run as root", "Start it under the pool's service account")
    config = load(trusted(registry).declared(name).config)
    job, start_us = _allocation(allocated_us)
    where = node or os.environ["SLURMD_NODENAME"]
    count = gpus or len([g for g in os.environ.get("SLURM_STEP_GPUS", "").split(",") if g])
    count = count or int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    if not count:
        raise BadInput(f"the allocation has no GPU on node {where}", "Start the pool with --gpus-per-node")
    raise typer.Exit(asyncio.run(Agent(config, where, count, job, start_us).run()))


if __name__ == "__main__":
    app()
