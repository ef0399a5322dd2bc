"""Keeps a pool's policies: who may attach and ask, whose budget has run out, what plexrl.yaml says by now.

SIGHUP makes it read plexrl.yaml again: the whole file is taken up, or nothing of it (docs/admins.md says what may
change). What it knows stands in run/policies.json, for `plexrl shares` and `plexrl pool status`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from plexrl.config import PoolConfig, load
from plexrl.config.reload import kept
from plexrl.pool import budgets
from plexrl.pool.admission import Admission, Standing
from plexrl.pool.api import Api
from plexrl.pool.bounds import bounds_of
from plexrl.pool.control import replace
from plexrl.pool.core import Core
from plexrl.pool.limits import Limits, OverLimit, is_work
from plexrl.pool.rules import policy_of, set_shares
from plexrl.pool.stored import Stored
from plexrl.pool.turns import Turns
from plexrl.pool.usage import Usage
from plexrl.scheduler.retune import retune
from plexrl.types import BadInput, Peer, PlexrlError, commands

log = logging.getLogger("plexrl.head")
_LOOK_S = 10.0
_ASK_S = 60.0  # Slurm, for usage against budgets
_TREE_S = 600.0  # Slurm, for shares alone
_DISK_S = 60.0


class Governor:
    """file: plexrl.yaml. end_job: ends a job with all that it has, for a reason."""

    def __init__(
        self,
        core: Core,
        api: Api,
        turns: Turns,
        admission: Admission,
        usage: Usage,
        file: str,
        end_job: Callable[[str, str], Awaitable[None]],
    ):
        self._core = core
        self._api = api
        self._turns = turns
        self._admission = admission
        self._usage = usage
        self._file = file
        self._end_job = end_job
        self._stored = Stored(core.layout)
        self._limits = Limits(core, usage, self._stored)
        self._standing = Standing()
        self._budgets: list[budgets.Line] = []
        self._ending: dict[str, int] = {}  # job -> when its budget was seen to have run out
        self._wanted = asyncio.Event()
        self._loaded_us = core.now_us()
        self._refused = ""
        self._readings = 0
        self._asked = self._looked = -_TREE_S

    # -- at the door ---------------------------------------------------------------------------------------------------

    def hello(self, peer: Peer) -> None:
        """A job wants to attach, for the first time. Raises OverLimit."""
        if (line := budgets.exhausted(self._budgets, self._standing, peer)) is not None:
            raise _used_up(line)
        self._limits.hello(peer)

    def command(self, peer: Peer, command: commands.Command) -> None:
        """A job asks for something. Raises OverLimit, ApiError."""
        if is_work(command) and peer.job in self._ending:
            line = budgets.exhausted(self._budgets, self._standing, peer)
            if line is not None:
                raise _used_up(line)
        self._limits.command(peer, command)

    # -- now and then --------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Read plexrl.yaml again, soon."""
        self._wanted.set()

    async def watch(self) -> None:
        """Until cancelled; what goes wrong once is tried again."""
        while True:
            try:
                if self._wanted.is_set():
                    self._wanted.clear()
                    await self._reload()
                await self._ask()
                await self._look()
                await self._mind_budgets()
                self._tell()
            except Exception:
                log.exception("keeping policies failed")
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def _reload(self) -> None:
        """All or nothing."""
        core = self._core
        self._readings += 1
        try:
            new = await asyncio.to_thread(load, self._file)
            if stays := kept(core.config, new):
                raise BadInput(
                    f"{self._file}: {', '.join(stays)} cannot change while the pool runs",
                    "Take that back, or stop the pool and start it again",
                )
            policy = policy_of(new)
            standing = await self._fetch(new) if _asks(new) else self._standing
        except PlexrlError as error:
            self._refused = str(error)
            log.error("plexrl.yaml was not taken up, what was read before holds: %s", error)
            return
        now_us = core.now_us()
        core.config, self._standing = new, standing
        self._loaded_us, self._refused = now_us, ""
        self._turns.perform(retune(core.scheduler, now_us, policy))
        set_shares(new, core.scheduler, now_us, standing.associations)
        for job in core.book.jobs.values():
            if not job.ended:
                self._turns.enroll(job.attached)
        log.info("%s was read anew and taken up", self._file)

    async def _fetch(self, config: PoolConfig) -> Standing:
        self._asked = time.monotonic()
        return await self._admission.standing(config.budgets.from_slurm)

    async def _ask(self) -> None:
        """Slurm's shares, budgets and usage, where the file wants them. While it does not answer the last ones hold."""
        config = self._core.config
        every = _ASK_S if config.budgets.from_slurm else _TREE_S
        if not _asks(config) or time.monotonic() - self._asked < every:
            return
        try:
            standing = await self._fetch(config)
        except PlexrlError as error:
            log.error("Slurm did not tell of shares and budgets, the last ones hold: %s", error)
            return
        if standing.associations != self._standing.associations:
            set_shares(config, self._core.scheduler, self._core.now_us(), standing.associations)
        self._standing = standing

    async def _look(self) -> None:
        """At the disk, where a rule is about it; what is too old goes."""
        policies = self._core.config.policies
        rules = (*policies.accounts.values(), *policies.users.values())
        wanted = any(rule.checkpoint_bytes is not None or rule.checkpoint_age_us is not None for rule in rules)
        if not wanted or time.monotonic() - self._looked < _DISK_S:
            return
        self._looked = time.monotonic()
        self._stored.note(await asyncio.to_thread(self._stored.look), self._core.book)
        await self._retire()

    async def _retire(self) -> None:
        """Delete checkpoints that are older than the rules of their user or account let them be."""
        now_s = time.time()
        for each in self._stored.kept:
            ages = [
                bound.rule.checkpoint_age_us
                for bound in bounds_of(self._core.config, each)
                if bound.kind != "qos" and bound.rule.checkpoint_age_us is not None
            ]
            if not ages or each.saved > now_s - min(ages) / 1e6:
                continue
            owner = Peer(uid=each.uid, user=each.user, account=each.account, job="")
            try:
                await self._api.answer(owner, commands.DeleteCheckpoint(path=each.path))
            except PlexrlError as error:
                log.warning("%s is too old and was not deleted: %s", each.path, error)
            else:
                log.info("%s of %s is older than its policy allows: it is deleted", each.path, each.user)

    async def _mind_budgets(self) -> None:
        """End jobs whose budget ran out a while ago; they could save what they had meanwhile."""
        core, config = self._core, self._core.config
        self._budgets = budgets.lines(config, self._standing, self._usage.since(budgets.since_us(config)))
        live = {name: job.attached for name, job in core.book.jobs.items() if not job.ended}
        self._ending = {job: since for job, since in self._ending.items() if job in live}
        for name, attached in live.items():
            line = budgets.exhausted(self._budgets, self._standing, attached)
            if line is None:
                self._ending.pop(name, None)
            elif name not in self._ending:
                log.warning("job %s has %d s to save its state: %s", name, config.budgets.grace_us // 1_000_000, line)
                self._ending[name] = core.now_us()
            elif core.now_us() - self._ending[name] >= config.budgets.grace_us:
                log.warning("job %s is ended: %s", name, line)
                await self._end_job(name, str(line))

    def _tell(self) -> None:
        """Replace run/policies.json."""
        core, config = self._core, self._core.config
        known = {
            "now_us": core.now_us(),
            "file": self._file,
            "loaded_us": self._loaded_us,
            "refused": self._refused,
            "readings": self._readings,
            "shares_from": config.shares_from,
            "order": config.scheduler.order,
            "half_life_us": config.scheduler.half_life_us,
            "users": [each._asdict() for each in core.scheduler.shares.tree(core.now_us())],
            "budgets": [msgspec.structs.asdict(line) | {"left_s": line.left_s} for line in self._budgets],
        }
        replace(policies_of(core.layout.run), msgspec.json.encode(known))


def policies_of(run: Path) -> Path:
    """The file in a pool's run/ that tells of its policies."""
    return run / "policies.json"


def _asks(config: PoolConfig) -> bool:
    return config.budgets.from_slurm or config.shares_from == "slurm"


def _used_up(line: budgets.Line) -> OverLimit:
    return OverLimit(str(line), "Ask who gave it; plexrl shares tells what is left")
