"""`plexrl trace`: what a pool has recorded, in a form that `plexrl simulate` reads, and how well that predicts it."""

import os
import pwd
import sys
from pathlib import Path

import msgspec
import typer

from plexrl.accounting.export import export as exported
from plexrl.accounting.ledger import read
from plexrl.cli.books import trusted
from plexrl.config.schema import Device, Host, SchedulerPolicy
from plexrl.config.source import Source
from plexrl.pool import profiles
from plexrl.pool.layout import Layout
from plexrl.sim import trace as traces
from plexrl.types import BadInput, Unavailable
from plexrl.wire.registry import Declared

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Traces of what pools have done."""


@app.command()
def export(
    pool: str = typer.Option(..., envvar="SLURM_PLEXRL_POOL", metavar="NAME", help="The pool."),
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Write it here; default: standard output."),
    user: str | None = typer.Option(None, metavar="USER", help="This user's jobs only; a name or a uid."),
    registry: str = typer.Option(
        ..., envvar="PLEXRL_REGISTRY", metavar="DIR", help="The site's registry of pools, or your own pools'."
    ),
    pool_uids: str = typer.Option(
        "", envvar="PLEXRL_POOL_UIDS", metavar="UID,..", help="Accounts whose registry files are believed."
    ),
) -> None:
    """Write a pool's calls, switches and placements as JSON lines.

    For root and the pool's account: the ledger is theirs alone. Nothing in it tells what users sent or got.
    """
    declared = trusted(registry, pool_uids).declared(pool)
    ledger = _ledger(declared)
    policy, gpu_bytes, host_bytes = _configured(Path(declared.config))
    recording = exported(
        read(ledger),
        user=user,
        policy=policy,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        links=profiles.read(profiles.path_of(declared.state_dir)).links,
    )
    if out is None:
        sys.stdout.buffer.write(traces.encode(recording))
        return
    traces.write(recording, out)
    print(f"{out}: {len(recording.calls)} calls of {len(recording.jobs)} jobs")


@app.command()
def calibrate(
    file: Path = typer.Argument(..., metavar="FILE", help="A trace that plexrl trace export wrote."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; shares and errors as fractions of 1."),
) -> None:
    """Simulate the recorded jobs again and print by how much step times and busy shares are missed.

    Service and switch models are fitted to the trace; the policy is the recorded one.
    """
    from plexrl.sim.calibrate import calibrate as calibrated

    found = calibrated(traces.read(file))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    from plexrl.sim.table import Column, show

    columns = (
        Column("job", "job", text=True),
        Column("steps", "steps"),
        Column("step_s", "step s", ".2f"),
        Column("predicted_step_s", "predicted", ".2f"),
        Column("step_error", "error", "%"),
        Column("busy", "busy", "%"),
        Column("predicted_busy", "predicted", "%"),
        Column("busy_error", "error", "%"),
    )
    notes = [f"{fit.group}: {fit.calls} calls, service model off by {fit.error:.1%} a call" for fit in found.fits]
    switch = found.switch
    notes.append(
        f"switches: {switch.gbps_in:.1f} GB/s in, {switch.gbps_out:.1f} out, {switch.overhead_us / 1e3:.1f} ms overhead"
    )
    notes.append(f"mean error: step times {found.error:.1%}, busy shares {found.busy_error:.1%}")
    show(f"{file}: recorded and predicted", columns, [msgspec.structs.asdict(row) for row in found.rows], notes)


def _ledger(declared: Declared) -> Path:
    """Raises Unavailable for who may not read it, and where there is none."""
    if os.geteuid() not in (0, declared.owner_uid):
        raise Unavailable(
            f"the ledger of pool {declared.name} is not for uid {os.geteuid()}",
            f"Ask root or {_name(declared.owner_uid)} to export it; plexrl report shows you your own jobs",
        )
    folder = Layout(declared.state_dir).ledger
    if not folder.is_dir():
        raise Unavailable(f"pool {declared.name} has no ledger in {folder}", "It is made when the pool first starts")
    return folder


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _configured(path: Path) -> tuple[dict, int, int]:
    """(scheduler section by the names of Policy, bytes of a GPU, bytes of a node) as they stand in the pool's file now.

    A pool may outlive its file: then nothing is known of them. Raises BadInput for a file that does not parse.
    """
    if not path.exists():
        return {}, 0, 0
    data = Source(path).data
    try:
        scheduler = SchedulerPolicy.model_validate(data.get("scheduler", {}))
        device, host = Device.model_validate(data.get("device", {})), Host.model_validate(data.get("host", {}))
    except ValueError as error:
        raise BadInput(f"{path} is no configuration of a pool: {error}", "See plexrl config check") from error
    return scheduler.model_dump(mode="json"), device.bytes, host.bytes
