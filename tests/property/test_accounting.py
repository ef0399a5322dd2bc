"""charged + overhead + unattributed = P, whatever the spans and intervals look like."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl.accounting.charges import MINUTE_US, charge, split
from plexrl.accounting.sweep import PRECEDENCE, held, segments, spans
from plexrl.types import Epoch, Span, SpanClass
from plexrl.types import records as r

GPUS = ("n1:0", "n1:1", "n2:0")
JOBS = ("11.0", "12.0", "12.1")
TIMES = st.integers(0, 5 * MINUTE_US)
UNTIL = 4 * MINUTE_US


@st.composite
def interval(draw):
    start, length = draw(TIMES), draw(TIMES)
    gpu, job = draw(st.sampled_from(GPUS)), draw(st.integers(1, 2))
    return r.AgentInterval(
        now_us=0, node=gpu[:2], gpu=gpu, slurm_job=job, start_us=start, end_us=start + length, final=draw(st.booleans())
    )


@st.composite
def span(draw):
    start, length = draw(TIMES), draw(TIMES)
    shares = draw(st.lists(st.tuples(st.sampled_from(JOBS), st.integers(0, 9)), max_size=3, unique_by=lambda s: s[0]))
    return Span(
        draw(st.sampled_from(GPUS)), start, start + length, draw(st.sampled_from(list(SpanClass))), "g/0", tuple(shares)
    )


@st.composite
def history(draw):
    """Records of several epochs, in one allocation or more, ended in order or not, with overlapping spans."""
    records = []
    now = 0
    for start in range(draw(st.integers(0, 3))):
        now += draw(st.integers(0, MINUTE_US))
        allocated = draw(st.integers(0, now))
        gpus = tuple(draw(st.sets(st.sampled_from(GPUS))))
        records.append(
            r.EpochStarted(
                now_us=now,
                epoch=Epoch(start, 1, 0),
                pool="p",
                instance="i",
                gpus=gpus,
                slurm_job=draw(st.integers(1, 2)),
                allocated_us=allocated,
            )
        )
        records += [r.SpanClosed(now_us=now, span=s) for s in draw(st.lists(span(), max_size=6))]
        now += draw(st.integers(0, MINUTE_US))
        if draw(st.booleans()):
            records.append(r.EpochEnded(now_us=now, reason="stop"))
    return records


@given(history(), st.lists(interval(), max_size=8))
def test_every_held_microsecond_is_counted_once(records, intervals):
    holding = held(intervals, UNTIL)
    charges = charge(segments(spans(records, UNTIL), holding), holding)
    for minute in charges.minutes.values():
        assert minute.charged_us + minute.overhead_us + minute.unattributed_us == minute.pool_us
        assert sum(minute.classes.values()) + minute.unattributed_us == minute.pool_us
        assert minute.charged_us == sum(sum(job.get(minute.start_us, ())) for job in charges.jobs.values())
        assert 0 <= minute.pool_us <= len(GPUS) * MINUTE_US
    assert sum(m.pool_us for m in charges.minutes.values()) == sum(b - a for p in holding.values() for a, b in p)


@given(st.lists(span(), max_size=8), st.lists(interval(), max_size=8), st.sampled_from(GPUS), TIMES)
def test_the_class_of_a_microsecond_is_the_first_in_rule_11(some, intervals, gpu, at):
    found = [s for s in segments(some, held(intervals, UNTIL)) if s.gpu == gpu and s.start_us <= at < s.end_us]
    is_held = at < UNTIL and any(i.gpu == gpu and i.start_us <= at < i.end_us for i in intervals)
    kinds = [s.kind for s in some if s.gpu == gpu and s.start_us <= at < s.end_us]
    assert [s.kind for s in found] == ([min(kinds, key=PRECEDENCE.get, default=None)] if is_held else [])


@given(st.integers(0, 10**9), st.lists(st.integers(1, 10**6), min_size=1, max_size=9))
def test_a_split_adds_up_and_is_fair(us, weights):
    parts = list(split(us, [(str(i), w) for i, w in enumerate(weights)]))
    assert sum(part for _, part in parts) == us
    for (_, part), weight in zip(parts, weights, strict=True):
        assert abs(part - us * weight / sum(weights)) <= 1


@given(history(), st.lists(interval(), max_size=8), st.integers(0, UNTIL))
def test_a_closed_minute_never_changes(records, intervals, now):
    """Spans that are recorded later begin later: minutes that ended before them keep their charges."""
    early = [x for x in records if not isinstance(x, r.SpanClosed) or x.span.end_us <= now]
    late = [x for x in records if not isinstance(x, r.SpanClosed) or x.span.end_us <= now or x.span.start_us >= now]
    holding = held(intervals, UNTIL)
    a, b = (charge(segments(spans(some, UNTIL), holding), holding) for some in (early, late))
    for start, minute in a.minutes.items():
        if start + MINUTE_US <= now:
            assert minute == b.minutes[start]
