"""Fair-share remembers what was used before the head began."""

from plexrl.pool.book import Book
from plexrl.pool.usage import Usage, Used
from plexrl.scheduler import Policy, Scheduler
from plexrl.types import Span, SpanClass, records

HOUR = 3_600_000_000


def test_spans_are_split_among_users_and_decay():
    book, usage = Book(), Usage()
    for job, user in (("1.0", "ann"), ("2.0", "bob")):
        book.apply(records.JobAttached(now_us=1, job=job, slurm_job=1, uid=1, user=user, account="a",
                                       qos="long" if user == "ann" else ""))  # fmt: skip
    busy = Span("n:0", 0, 900, SpanClass.BUSY, "g/0", (("1.0", 2), ("2.0", 1), ("forgotten", 6)))
    for span in (busy, Span("n:0", 900, 1000, SpanClass.IDLE, "", ()),
                 Span("n:0", HOUR, HOUR + 100, SpanClass.KEPT, "g/0", (("1.0", 1),))):  # fmt: skip
        usage.add(span, book)
    scheduler = Scheduler({"n:0": 64}, Policy(half_life_us=HOUR))
    usage.charge(scheduler)
    assert scheduler.shares.usage(HOUR, "a", "ann") == 200 / 2 + 100
    assert scheduler.shares.usage(HOUR, "a", "bob") == 100 / 2
    ann, bob = Used("a", "ann", "long"), Used("a", "bob", "")
    assert usage.since(0) == {ann: 300, bob: 100}
    assert usage.since(HOUR) == {ann: 100}  # the hour that it lies in counts whole
    assert usage.hours(0) == [(0, {ann: 200, bob: 100}), (HOUR, {ann: 100})]
