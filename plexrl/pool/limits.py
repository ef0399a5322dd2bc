"""What policies of plexrl.yaml let an account, a user or the jobs of a QOS have: checked before anything is begun."""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from plexrl.config.policies import Rule
from plexrl.pool.book import Book, Model
from plexrl.pool.bounds import Bound, bounds_of
from plexrl.pool.core import Core
from plexrl.pool.layout import meta_of
from plexrl.pool.needs import state_bytes
from plexrl.pool.stored import Stored
from plexrl.pool.usage import HOUR_US, Usage, Used
from plexrl.types import ApiError, CallKind, PlexrlError, commands

_FRESH_US = 1_000_000
WINDOW_US = 7 * 24 * HOUR_US
_WORK = (commands.CreateModel, commands.LoadModel, commands.Train, commands.Sample)
_SAVES = (CallKind.SAVE_STATE, CallKind.PUBLISH)


class OverLimit(ApiError):
    """A policy's limit or a budget is used up: 403, which clients do not try again."""

    exit_code = 5
    kind = "over_limit"

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(403, what, mend)


class Shape(NamedTuple):
    """What a deployment's bytes depend on beside its base model."""

    lora_rank: int | None
    attn: bool
    mlp: bool
    unembed: bool


class Limits:
    """Refuses what would be too much. stored: what is on the pool's disk."""

    def __init__(self, core: Core, usage: Usage, stored: Stored):
        self._core = core
        self._usage = usage
        self._stored = stored
        self._spent: dict[tuple[str, str], tuple[int, OverLimit | None]] = {}

    def hello(self, peer: Any) -> None:
        """A job wants to attach. Raises OverLimit."""
        for bound in bounds_of(self._core.config, peer):
            most = bound.rule.jobs
            # The run before of a job that was requeued is on its way out.
            same = f"{peer.job.partition('.')[0]}."
            jobs = self._core.book.jobs
            there = [jobs[name].attached for name in jobs if not jobs[name].ended and not name.startswith(same)]
            if most is not None and sum(bound.covers(job) for job in there) >= most:
                raise OverLimit(
                    f"{bound} has {most} jobs attached, the most that {bound.key}.jobs allows",
                    "Submit it again when one has ended; sbatch --dependency=afterany:JOB waits for that",
                )
            self._time(bound)

    def command(self, peer: Any, command: commands.Command) -> None:
        """A job asks for something. Raises OverLimit, and ApiError 400 for a checkpoint that has no room."""
        work = is_work(command)
        if not work and not _saves(command):
            return
        for bound in bounds_of(self._core.config, peer):
            if work:
                self._time(bound)
            else:
                self._disk(bound, command)
            if isinstance(command, commands.CreateModel | commands.LoadModel):
                self._deployment(bound, peer, command)

    # -- each limit ----------------------------------------------------------------------------------------------------

    def _time(self, bound: Bound) -> None:
        """Every call asks: what was found holds for a second."""
        if bound.rule.gpu_time_us is None:
            return
        until_us, refusal = self._spent.get((bound.kind, bound.name), (0, None))
        now_us = self._core.now_us()
        if now_us >= until_us:
            refusal = self._over_time(bound, bound.rule.gpu_time_us)
            self._spent[bound.kind, bound.name] = now_us + _FRESH_US, refusal
        if refusal is not None:
            raise OverLimit(refusal.what, refusal.mend)

    def _over_time(self, bound: Bound, most: int) -> OverLimit | None:
        window_us = bound.rule.window_us or WINDOW_US
        hours = self._usage.hours(self._core.now_us() - window_us)
        used = sum(_of(bound, each) for _, each in hours)
        if used < most:
            return None
        free_us, left = self._core.now_us() + window_us, used
        for hour, each in hours:
            left -= _of(bound, each)
            if left < most:
                free_us = hour + HOUR_US + window_us
                break
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(free_us / 1e6))
        return OverLimit(
            f"{bound} has used {used / HOUR_US:.2f} GPU hours in {window_us / HOUR_US:g} h, and {bound.key}.gpu_time "
            f"allows {most / HOUR_US:g}",
            f"Calls are taken again from {when} on; save_state still works",
        )

    def _disk(self, bound: Bound, command: commands.Train) -> None:
        if not isinstance(bound.rule, Rule) or bound.rule.checkpoint_bytes is None:
            return
        if command.kind is CallKind.PUBLISH and command.name is None:
            return  # kept in memory alone
        used = self._stored.of(bound.kind, bound.name)
        if used >= bound.rule.checkpoint_bytes:
            raise ApiError(
                400,
                f"{bound} has {used} bytes of checkpoints, and {bound.key}.checkpoint_bytes allows "
                f"{bound.rule.checkpoint_bytes}",
                "Delete some: plexrl checkpoint list, delete",
            )

    def _deployment(self, bound: Bound, peer: Any, command: commands.CreateModel | commands.LoadModel) -> None:
        rule, book = bound.rule, self._core.book
        if (rule.worker_groups, rule.gang_size, rule.host_bytes) == (None, None, None):
            return
        asked = self._asked(peer, command)
        if asked is None:
            return  # the API says what is wrong with it
        base, shape = asked
        config = self._core.config.models[base]
        if rule.gang_size is not None and config.train.gpus > rule.gang_size:
            raise OverLimit(
                f"model {base!r} trains on {config.train.gpus} GPUs, and {bound.key}.gang_size allows {bound} "
                f"{rule.gang_size}",
                "Ask for a smaller model",
            )
        mine = [model for model in book.models.values() if not model.ended and bound.covers(_attached(book, model))]
        if rule.worker_groups is not None:
            groups = set(groups_of(book, mine))
            new = shape.lora_rank is None or not any(model.created.base == base for model in mine if _lora(model))
            if len(groups) + new > rule.worker_groups:
                raise OverLimit(
                    f"{bound} has {len(groups)} worker groups, and {bound.key}.worker_groups allows "
                    f"{rule.worker_groups}",
                    "Unload a model, or share a base model's group by LoRA",
                )
        if rule.host_bytes is not None:
            held = sum(self._bytes(model.created.base, model.created) for model in mine)
            wanted = self._bytes(base, shape)
            if held + wanted > rule.host_bytes:
                raise OverLimit(
                    f"{bound} holds {held} bytes of state, this model has {wanted}, and {bound.key}.host_bytes allows "
                    f"{rule.host_bytes}",
                    "Unload a model, or ask for a smaller rank",
                )

    def _asked(self, peer: Any, command: commands.CreateModel | commands.LoadModel) -> tuple[str, Shape] | None:
        """(base, shape) of what is to be made; None for what the pool has not, and for a repeat of what there is."""
        if f"{command.session}:train:{command.model_seq}" in self._core.book.models:
            return None
        if isinstance(command, commands.CreateModel):
            shape = Shape(command.lora_rank, command.train_attn, command.train_mlp, command.train_unembed)
            return (command.base_model, shape) if command.base_model in self._core.config.models else None
        with contextlib.suppress(PlexrlError, OSError, ValueError, KeyError):
            folder = self._core.layout.checkpoint(peer.uid, *command.path.removeprefix("tinker://").split("/")[:3])
            meta = json.loads(meta_of(folder).read_text())
            shape = Shape(meta["lora_rank"], meta["attn"], meta["mlp"], meta["unembed"])
            return (meta["base"], shape) if meta["base"] in self._core.config.models else None
        return None

    def _bytes(self, base: str, created: Any) -> int:
        """Of a deployment's state, on all ranks."""
        config = self._core.config.models[base]
        return state_bytes(config, "full" if created.lora_rank is None else "lora", created) * config.train.gpus


def is_work(command: commands.Command) -> bool:
    """Whether it costs GPU time for its own sake: who may have no more may still save what there is, and end it."""
    return isinstance(command, _WORK) and not _saves(command)


def _saves(command: commands.Command) -> bool:
    return isinstance(command, commands.Train) and command.kind in _SAVES


def groups_of(book: Book, models: Iterable[Model]) -> Iterator[str]:
    """The worker groups, trainers and samplers, that hold these deployments or are to hold them."""
    for model in models:
        yield model.created.group
    lora = {model.created.base for model in models if _lora(model)}
    full = {model.id for model in models if not _lora(model)}
    for name, group in book.groups.items():
        placed = group.placed
        if not group.ended and (placed.model in full or (placed.kind == "lora" and placed.base in lora)):
            yield name


def _lora(model: Model) -> bool:
    return model.created.lora_rank is not None


def _attached(book: Book, model: Model) -> Any:
    return book.jobs[model.created.job].attached


def _of(bound: Bound, used: dict[Used, int]) -> int:
    return sum(amount for who, amount in used.items() if bound.covers(who))
