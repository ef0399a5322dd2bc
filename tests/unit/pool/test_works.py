"""What the head keeps of calls for their engine hosts, and knows of what these may have begun."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from plexrl.pool import messages as m
from plexrl.pool.links import OrderFailed
from plexrl.pool.works import Works
from plexrl.scheduler import Run
from plexrl.types import Call, CallKind


class Pool:
    """A sampler that sleeps with two samples half drawn, and a trainer. told: orders to engine hosts."""

    def __init__(self, fails: bool = False):
        self.told: list[tuple] = []
        self.sent: list[m.Run] = []
        self.fails = fails
        calls = {
            "s:1": Call(id="s:1", kind=CallKind.SAMPLE, group="s", deployment="s", job="j"),
            "s:2": Call(id="s:2", kind=CallKind.SAMPLE, group="s", deployment="s", job="j"),
            "t:1": Call(id="t:1", kind=CallKind.FORWARD_BACKWARD, group="t", deployment="t", job="j", seq=1),
        }
        self.entries = {
            name: SimpleNamespace(accepted=SimpleNamespace(call=call, work={"version": ""}, body=b""), ended=None)
            for name, call in calls.items()
        }
        gangs = {
            "s/0": SimpleNamespace(trains=False, begun={"s:1", "s:2"}),
            "t/0": SimpleNamespace(trains=True, begun=set()),
        }
        core = SimpleNamespace(
            scheduler=SimpleNamespace(gangs=gangs),
            book=SimpleNamespace(entries=self.entries, models={"t": None}),
            links=SimpleNamespace(send=lambda name, message: self.sent.append(message)),
        )
        groups = SimpleNamespace(
            gangs=SimpleNamespace(order=self._order), snapshots=None, tiers=SimpleNamespace(bring=self._bring)
        )
        self.works = Works(core, groups, lambda call: None)

    async def _order(self, gang: str, verb: str, args: dict) -> dict:
        self.told.append((gang, verb, args))
        if self.fails:
            raise OrderFailed("no", "server")
        return {"drawn": {call: {"state": b"half"} for call in args["calls"]}}

    async def _bring(self, model) -> None:
        pass

    def run(self, gang: str, *calls: str) -> list[m.Work]:
        asyncio.run(self.works.run(Run(gang, calls)))
        return list(self.sent[-1].works)


@pytest.mark.parametrize("fails", [False, True])
def test_the_next_engine_goes_on_with_what_the_last_one_had_drawn(fails):
    pool = Pool(fails)
    pool.entries["s:2"].ended = "cancelled meanwhile"
    asyncio.run(pool.works.take_out("s/0"))
    assert pool.told == [("s/0", "take", {"calls": ["s:1", "s:2"]})]
    (work,) = pool.run("s/0", "s:1")
    assert work.args["drawn"] == (None if fails else {"state": b"half"}), "from its beginning if it cannot be had"
    asyncio.run(pool.works.take_out("t/0"))
    assert len(pool.told) == 1


def test_a_checkpoint_is_no_present_state_while_a_call_may_have_begun(tmp_path: Path):
    pool = Pool()
    model = SimpleNamespace(id="t", exact=True, saved=str(tmp_path))
    assert pool.works.checkpoint_of(model) == str(tmp_path)
    pool.run("t/0", "t:1")
    assert pool.works.checkpoint_of(model) == ""
    pool.works.forget("t:1")
    assert pool.works.checkpoint_of(model) == str(tmp_path)
    model.saved = str(tmp_path / "deleted")
    assert pool.works.checkpoint_of(model) == ""
