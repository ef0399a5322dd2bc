"""Calls under way on virtual engines: what is left of them. Times in integer microseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plexrl.types import CallKind

if TYPE_CHECKING:
    from plexrl.sim.engine import SampleEngine


class SampleTask:
    """A sample call: what is left of it, wherever it is. tokens, left: decode steps. done: told when it ended.

    prompt: tokens to prefill unless the cache has them. cache: (engine, its loads) in which its prefix lies. version,
    published_us: which weights of `deployment`, and since when they are there. about: the job's own business.
    """

    __slots__ = (
        "about",
        "batch",
        "cache",
        "call",
        "deployment",
        "done",
        "end",
        "left",
        "prompt",
        "published_us",
        "tokens",
        "units",
        "version",
    )

    def __init__(
        self,
        call: str,
        done: Callable[[SampleTask], None],
        *,
        deployment: str,
        prompt: int,
        tokens: float,
        batch: int,
        units: int,
        version: int,
        published_us: int,
        about: Any,
        cache: tuple[SampleEngine, int] | None,
    ) -> None:
        self.call = call
        self.done = done
        self.deployment = deployment
        self.prompt = prompt
        self.tokens = self.left = tokens
        self.batch = batch
        self.units = units
        self.version = version
        self.published_us = published_us
        self.about = about
        self.cache = cache
        self.end = 0.0

    def prefill(self, engine: SampleEngine) -> float:
        """Tokens to compute before it can decode: the prompts, and what was drawn where no cache has it."""
        if self.cache == (engine, engine.loads):
            return 0.0
        return self.prompt + self.units * (1 - self.left / self.tokens)


class TrainTask:
    """A training call: left_us of work on its gang. done: told when it ended."""

    __slots__ = ("about", "call", "done", "end_us", "kind", "left_us", "start_us", "units")

    def __init__(
        self, call: str, done: Callable[[TrainTask], None], *, kind: CallKind, work_us: int, units: int, about: int
    ) -> None:
        self.call = call
        self.done = done
        self.kind = kind
        self.left_us = work_us
        self.units = units
        self.about = about
        self.start_us = self.end_us = 0
