"""Every GPU-microsecond has one class, and is charged to whom it should be."""

from random import Random

from plexrl.scheduler import Policy
from plexrl.types import Role, Span, SpanClass
from tests.unit.scheduler.executor import MS, Executor, S
from tests.unit.scheduler.test_turns import FB, OPTIM, SAMPLE, pool, serve, two_trainers


def of(ex: Executor, gpu: str = "n1:0") -> list[tuple]:
    ex.close()
    return [(s.kind.value, s.start_us, s.end_us, s.gang, s.shares) for s in ex.spans if s.gpu == gpu]


def test_a_life_by_class():
    ex = Executor({"n1:0": 1024}, Policy(paranoid=True), start=100)
    ex.now = 1000
    ex.place("a", Role.TRAIN, "a", 1024, build=False)
    ex.now = 3000
    ex.answer(ex.engines["a/0"])
    ex.now = 4000
    ex.do(ex.scheduler.startup_done(ex.now))
    ex.now = 5000
    ex.submit("a", "a", FB, 1, units=7)
    ex.now = 9000
    ex.finish("a:1", units=9)
    ex.now = 9500
    ex.place("b", Role.TRAIN, "b", 1024, build=False)  # from here on, a is kept while another waits
    ex.wait(1 * S)
    ex.answer(ex.engines["b/0"])
    ex.do(ex.scheduler.drain(ex.now))
    ex.now += 77
    assert of(ex) == [
        ("startup", 100, 1000, "", ()),
        ("switch", 1000, 3000, "a/0", (("a", 1),)),
        ("startup", 3000, 4000, "", ()),
        ("idle", 4000, 5000, "", ()),
        ("busy", 5000, 9000, "a/0", (("a", 9),)),
        ("idle", 9000, 9500, "", ()),
        ("kept", 9500, 9000 + 1 * S, "a/0", (("a", 1),)),
        ("switch", 9000 + 1 * S, 9500 + 1 * S, "b/0", (("b", 1),)),
        ("drain", 9500 + 1 * S, 9577 + 1 * S, "", ()),
    ]


def test_a_sampling_turn_is_split_by_units():
    ex = pool()
    ex.place("s", Role.SAMPLE, "j", 512)
    ex.submit("s", "m1", SAMPLE, 1, job="one", units=10)
    ex.now = 100
    ex.submit("s", "m2", SAMPLE, 1, job="two", units=20)
    ex.now = 200
    ex.finish("m1:1", units=13)
    ex.now = 300
    assert of(ex) == [("busy", 0, 300, "s/0", (("one", 13), ("two", 20)))]
    ex.now = 400
    ex.finish("m2:1", units=40)
    assert of(ex)[1:] == [("busy", 300, 400, "s/0", (("two", 40),))]


def test_training_of_two_jobs_in_one_turn_is_split_by_time():
    ex = pool()
    ex.place("t", Role.TRAIN, "j", 512)
    ex.submit("t", "m1", FB, 1, job="one", units=5)
    ex.submit("t", "m1", OPTIM, 2, job="one", units=1)
    ex.submit("t", "m2", FB, 1, job="two", units=5)
    for at, call in [(100, "m1:1"), (150, "m1:2"), (400, "m2:1")]:
        ex.now = at
        ex.finish(call, 5)
    assert [(k, a, b, s) for k, a, b, _, s in of(ex)] == [
        ("busy", 0, 150, (("one", 10),)),
        ("busy", 150, 400, (("two", 5),)),
    ]


def test_an_offload_hidden_behind_work_is_not_counted_and_an_exposed_one_is():
    ex = pool(2)
    ex.place("wide", Role.TRAIN, "w", 512, 2)
    ex.place("left", Role.TRAIN, "l", 1024)
    ex.place("right", Role.TRAIN, "r", 512)
    assert [ex.engines[f"{name}/0"].gang.gpus for name in ("left", "right")] == [("n1:0",), ("n1:1",)]
    ex.submit("wide", "wide", OPTIM, 1)
    serve(ex)
    ex.finish("wide:1")
    ex.wait(S)
    ex.submit("right", "right", OPTIM, 1)
    ex.wait(S)
    start = ex.now
    ex.close()
    before = len(ex.spans)
    ex.submit("left", "left", FB, 1)  # wide must leave both GPUs for it, beside right, which works
    ex.now += 300
    ex.finish("right:1")
    ex.now += 200
    serve(ex)
    ex.now += 100
    ex.close()
    seen = [(s.gpu, s.kind.value, s.start_us - start, s.end_us - start, s.gang) for s in ex.spans[before:]]
    assert sorted(seen) == [
        ("n1:0", "busy", 500, 600, "left/0"),
        ("n1:0", "switch", 0, 500, "left/0"),
        ("n1:1", "busy", 0, 300, "right/0"),
        ("n1:1", "idle", 500, 600, ""),
        ("n1:1", "switch", 300, 500, "left/0"),
    ]


def test_spans_tile_the_time_exactly_to_the_microsecond():
    ex = two_trainers(2, quantum_us=70 * MS)
    ex.place("s", Role.SAMPLE, "a", 512, replicas=2)
    random = Random(11)
    for seq in range(1, 60):
        ex.submit("a", "a", random.choice([FB, OPTIM]), seq)
        ex.submit("b", "b", random.choice([FB, OPTIM]), seq)
        ex.submit("s", "s", SAMPLE, seq)
    for i in range(500):
        ex.wait(random.randrange(30 * MS))
        ex.step(random)
        if i % 50 == 0:
            ex.close()
    ex.close()
    for gpu in ("n1:0", "n1:1"):
        spans = [span for span in ex.spans if span.gpu == gpu]
        assert spans[0].start_us == 0 and spans[-1].end_us == ex.now
        assert all(a.end_us == b.start_us for a, b in zip(spans, spans[1:], strict=False))
        assert sum(span.end_us - span.start_us for span in spans) == ex.now
    assert all(charged(span) == (span.kind in ("busy", "switch", "kept")) for span in ex.spans)


def charged(span: Span) -> bool:
    return bool(span.gang) and bool(span.shares) and all(weight > 0 for _, weight in span.shares)


def test_nothing_is_kept_when_nobody_waits():
    ex = two_trainers()
    ex.submit("a", "a", FB, 1)
    serve(ex)
    ex.finish("a:1")
    ex.wait(100 * S)
    ex.close()
    assert SpanClass.KEPT not in {span.kind for span in ex.spans if span.gang == "a/0"}
