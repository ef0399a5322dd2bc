"""What the pool does, for one user: its GPUs, and their own jobs. Of others' only how many there are."""

from plexrl.pool.api.futures import Futures
from plexrl.pool.core import Core
from plexrl.types import Peer, answers, commands


class Looks:
    """Answers look."""

    def __init__(self, core: Core, futures: Futures):
        self._core = core
        self._futures = futures

    async def look(self, peer: Peer, command: commands.Look) -> answers.Seen:
        """Now."""
        book, scheduler = self._core.book, self._core.scheduler
        live = {name: job for name, job in book.jobs.items() if not job.ended}
        mine = {name: job for name, job in live.items() if job.attached.uid == peer.uid}
        gpus = []
        for gpu in scheduler.floor.gpus:
            turn = scheduler.held.get(gpu)
            calls = turn.state.active if turn else ()
            gpus.append(
                answers.GpuSeen(
                    gpu=gpu,
                    turn=turn.state.id if turn else "",
                    phase=str(turn.phase) if turn else "",
                    yours=any(call in book.entries and book.entries[call].uid == peer.uid for call in calls),
                )
            )
        return answers.Seen(
            gpus=tuple(gpus),
            open_calls=sum(len(book.open_calls.get(name, ())) for name in live),
            jobs_attached=len(live),
            jobs=tuple(
                answers.JobSeen(
                    job=name,
                    user=job.attached.user,
                    open_calls=len(book.open_calls.get(name, ())),
                    models=tuple(m.id for m in book.models.values() if m.created.job == name and not m.ended),
                    explained=self._futures.told(peer, name),
                    versions={
                        m.id: m.versions[-1]
                        for m in book.models.values()
                        if m.created.job == name and not m.ended and m.versions
                    },
                    max_staleness=job.attached.max_staleness,
                )
                for name, job in mine.items()
            ),
        )
