"""The book: the same by replay as live; the order of training calls, gaps, seq ids that are used up."""

import dataclasses

import pytest

from plexrl.pool.book import Book
from plexrl.types import Call, CallKind, Epoch, Gang, GroupSpec, Placement, Role, records

MODEL = "s:train:0"


def accepted(seq: int, kind: CallKind = CallKind.FORWARD_BACKWARD, **work: object) -> records.CallAccepted:
    call = Call(id=f"{MODEL}:{seq}", kind=kind, group="g", deployment=MODEL, job="1.0", seq=seq)
    return records.CallAccepted(now_us=100 + seq, call=call, uid=5, digest="", work=work, body=b"")


def ended(seq: int, ok: bool = True) -> records.CallEnded:
    return records.CallEnded(now_us=200 + seq, id=f"{MODEL}:{seq}", ok=ok)


def begun() -> list[records.Record]:
    placement = Placement("g", (Gang("g/0", "g", ("n:0",), ()),))
    spec = GroupSpec(group="g", role=Role.TRAIN, owner="1.0", gang_size=1, replicas=1, device_bytes=64)
    return [
        records.EpochStarted(
            now_us=1, epoch=Epoch(1, 0, 0), pool="p", instance="i", gpus=("n:0",), slurm_job=0, allocated_us=1
        ),
        records.JobAttached(now_us=2, job="1.0", slurm_job=1, uid=5, user="u", account="a"),
        records.SessionOpened(now_us=3, session="s", job="1.0", uid=5, account="a", key="k"),
        records.GroupPlaced(now_us=4, spec=spec, placement=placement, base="b", kind="lora", model=""),
        records.ModelCreated(
            now_us=5,
            model=MODEL,
            session="s",
            job="1.0",
            uid=5,
            account="a",
            base="b",
            lora_rank=8,
            seed=1,
            attn=True,
            mlp=True,
            unembed=True,
            group="g",
        ),
        records.CallEnded(now_us=6, id=f"{MODEL}:0", ok=True),
    ]


@pytest.fixture
def book() -> Book:
    fresh = Book()
    for record in begun():
        fresh.apply(record)
    return fresh


def released(book: Book) -> list[int]:
    return [int(call.rpartition(":")[2]) for call in book.release(book.models[MODEL])]


def test_calls_are_released_in_order_whatever_order_they_come_in(book):
    for seq in (3, 1):
        book.apply(accepted(seq))
    assert released(book) == [1]
    assert released(book) == []
    book.apply(accepted(2))
    assert released(book) == [2, 3]


def test_a_refused_call_uses_its_place_up(book):
    book.apply(accepted(3))
    book.apply(records.SeqConsumed(now_us=1, model=MODEL, seq=1))
    book.apply(records.SeqConsumed(now_us=1, model=MODEL, seq=2))
    assert released(book) == [3]
    book.apply(records.SeqConsumed(now_us=1, model=MODEL, seq=2))
    assert not book.models[MODEL].consumed


def test_a_gap_that_is_given_up_jumps_over_what_was_held(book):
    for seq in (2, 4):
        book.apply(accepted(seq))
    book.apply(records.SeqConsumed(now_us=1, model=MODEL, seq=4, since=1))
    for seq in (2, 4):
        book.apply(ended(seq, ok=False))
    book.apply(accepted(5))
    assert released(book) == [5]


def test_a_held_call_that_ended_uses_its_place_up(book):
    book.apply(accepted(2))
    book.apply(ended(2, ok=False))
    book.apply(accepted(1))
    book.apply(accepted(3))
    assert released(book) == [1, 3]


def test_a_checkpoint_is_the_present_state_until_something_may_have_changed_it(book):
    model = next(iter(book.models.values()))
    seq = 0

    def call(kind: CallKind, ok: bool = True) -> bool:
        nonlocal seq
        seq += 1
        book.apply(accepted(seq, kind, path="tinker://s:train:0/weights/x", folder="/f"))
        book.apply(ended(seq, ok))
        return model.exact

    assert not call(CallKind.OPTIM_STEP) and not call(CallKind.SAVE_STATE, ok=False) and not model.saved
    assert call(CallKind.SAVE_STATE) and model.saved == "/f"
    assert call(CallKind.FORWARD) and call(CallKind.PUBLISH), "nothing of the state changes in these"
    assert not call(CallKind.FORWARD_BACKWARD, ok=False), "who knows how far it came"
    assert not call(CallKind.SAVE_STATE), "gradients are not saved"
    assert not call(CallKind.OPTIM_STEP) and call(CallKind.SAVE_STATE)
    assert not call(CallKind.LOAD_STATE)


def test_an_engine_that_was_ended_is_known_to_the_next_head(book):
    (group,) = book.groups.values()
    gang = group.placed.placement.gangs[0].id
    book.apply(records.Unbuilt(now_us=1, gang=gang))
    assert (group.unbuilt, group.rebuilt) == ({gang}, set())
    book.apply(records.Unbuilt(now_us=2, gang=gang, built=True))
    assert (group.unbuilt, group.rebuilt) == (set(), {gang})


def test_a_replay_comes_to_the_same(book):
    """Live, calls are released between the records; a new head releases after all of them."""
    stream = [
        accepted(2),
        accepted(1),
        ended(1),
        records.SeqConsumed(now_us=1, model=MODEL, seq=3),
        accepted(4, CallKind.SAVE_STATE, path="tinker://s:train:0/weights/x", folder="/f"),
        ended(2),
        accepted(6),
        ended(4),
        accepted(7),
    ]
    for record in stream:
        book.apply(record)
        book.release(book.models[MODEL])
    again = Book()
    for record in [*begun(), *stream]:
        again.apply(record)
    assert again.release(again.models[MODEL]) == []
    for one in (book, again):
        one.models[MODEL].held_since_us = 0
    assert {f: getattr(again, f) for f in vars(again)} == {f: getattr(book, f) for f in vars(book)}
    assert dataclasses.asdict(again.models[MODEL])["next_seq"] == 5
    assert again.models[MODEL].applied == 4
    assert again.open_calls["1.0"] == {f"{MODEL}:6", f"{MODEL}:7"}
    assert again.models[MODEL].resume == "; its last checkpoint is tinker://s:train:0/weights/x"


def test_an_orderly_end_is_remembered(book):
    assert not book.orderly_end
    book.apply(records.EpochEnded(now_us=9, reason="stopped"))
    assert book.orderly_end


def test_futures_of_a_job_that_is_over_are_forgotten(book):
    book.apply(accepted(1))
    book.forget_job("1.0")
    assert set(book.entries) == {f"{MODEL}:1"}, "an open call is still to end"
    book.apply(ended(1))
    book.forget_job("1.0")
    assert not book.entries
