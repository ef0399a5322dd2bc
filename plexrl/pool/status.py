"""run/status.json: what the pool does right now, for the service account and root; rewritten each second."""

import os
import time

import msgspec

from plexrl.pool.core import Core
from plexrl.pool.layout import Layout
from plexrl.pool.profiles import Profiles
from plexrl.pool.sleepers import Sleepers
from plexrl.pool.tiers import Tiers

# A head with many jobs explains some of them each second, in turn.
_EXPLAIN_S = 0.02


class Status:
    """Writes the file."""

    def __init__(self, layout: Layout, core: Core, profiles: Profiles, tiers: Tiers, sleepers: Sleepers):
        self._path = layout.run / "status.json"
        self._core = core
        self._profiles = profiles
        self._tiers = tiers
        self._sleepers = sleepers
        self._told: dict[str, tuple[int, str]] = {}

    def write(self, state: str) -> None:
        """Replace the file. state: of the pool."""
        core = self._core
        scheduler, book = core.scheduler, core.book
        gpus = {}
        for gpu in scheduler.floor.gpus:
            turn = scheduler.held.get(gpu)
            gpus[gpu] = {
                "turn": turn.state.id if turn else "",
                "phase": str(turn.phase) if turn else "",
                "resident": sorted(name for name, g in scheduler.residence.on[gpu].items() if g.occupies),
            }
        live = {name: job for name, job in book.jobs.items() if not job.ended}
        self._explain(list(live))
        jobs = {
            name: {
                "user": job.attached.user,
                "account": job.attached.account,
                "open_calls": len(book.open_calls.get(name, ())),
                "models": [model.id for model in book.models.values() if model.created.job == name and not model.ended],
                "explained_us": self._told[name][0],
                "explained": self._told[name][1],
            }
            for name, job in live.items()
        }
        groups = {
            name: {"user": key.user, "expected_duty": seen.expected, "duty": seen.duty, "error": seen.error}
            for name, key, seen in self._profiles.live()
        }
        status = {
            "state": state,
            "now_us": core.now_us(),
            "gpus": gpus,
            "jobs": jobs,
            "groups": groups,
            "links": scheduler.bandwidth.links,
            "tiers": self._tiers.report(),
            "engines": {
                "ended": self._sleepers.ended,
                "built_again": self._sleepers.built,
                "deployments_restored": self._tiers.restored,
            },
            "syncs": core.journal.syncs,
        }
        temporary = self._path.with_name(f".status.{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(status))
        os.replace(temporary, self._path)

    def _explain(self, jobs: list[str]) -> None:
        """Say anew of jobs why they wait: of those first of whom it was said longest ago."""
        now_us, begun = self._core.now_us(), time.monotonic()
        self._told = {job: self._told.get(job, (0, "")) for job in jobs}
        for job in sorted(jobs, key=lambda job: self._told[job][0]):
            if self._told[job][0] and time.monotonic() - begun > _EXPLAIN_S:
                break
            self._told[job] = now_us, self._core.scheduler.explain(job)
