"""run/status.json: what the pool does right now, for the service account and root; rewritten each second."""

import os

import msgspec

from plexrl.pool.core import Core
from plexrl.pool.layout import Layout


def write_status(layout: Layout, core: Core, state: str) -> None:
    """Replace the file."""
    scheduler, book = core.scheduler, core.book
    gpus = {}
    for gpu in scheduler.floor.gpus:
        turn = scheduler.held.get(gpu)
        gpus[gpu] = {
            "turn": turn.state.id if turn else "",
            "phase": str(turn.phase) if turn else "",
            "resident": sorted(name for name, g in scheduler.gangs.items() if g.occupies and gpu in g.gpus),
        }
    jobs = {
        name: {
            "user": job.attached.user,
            "account": job.attached.account,
            "open_calls": len(book.open_calls.get(name, ())),
            "models": [model.id for model in book.models.values() if model.created.job == name and not model.ended],
        }
        for name, job in book.jobs.items()
        if not job.ended
    }
    status = {"state": state, "now_us": core.now_us(), "gpus": gpus, "jobs": jobs, "syncs": core.journal.syncs}
    path = layout.run / "status.json"
    temporary = layout.run / f".status.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(status))
    os.replace(temporary, path)
