"""What pools do and did as Prometheus metrics: pure, from a pool's status and what it published. Times are GPU-seconds.

Counters come from closed minutes, so they only rise; a pool that is declared afresh begins again at 0, as counters may.
What may fall, because models are fitted again with more data, is a gauge.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from plexrl.accounting.figures import stretch
from plexrl.accounting.published import Job, Published
from plexrl.types import SpanClass

RECENT_MINUTES = 15
_WHO = ("user", "account", "qos", "partition")


class Pool(Struct, frozen=True, kw_only=True):
    """One pool. state: as its live file says, `down` without one. status: run/status.json; published: the whole report;
    None where there is none or it may not be read."""

    name: str
    state: str
    status: Mapping | None = None
    published: Published | None = None


def render(pools: Sequence[Pool]) -> bytes:
    """The text format, as a scrape or node_exporter's textfile collector reads it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(pools))
    return generate_latest(registry)


class _Collector:
    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not collect in order to learn names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every family once, with all pools."""
        yield from _states(self._pools)
        yield from _now([(pool.name, pool.status) for pool in self._pools if pool.status is not None])
        told = [(pool.name, pool.published) for pool in self._pools if pool.published is not None]
        yield from _sums(told)
        yield from _jobs(told)


def _gauge(name: str, help: str, labels: Iterable[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"plexrl_{name}", help, labels=("pool", *labels))


def _counter(name: str, help: str, labels: Iterable[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"plexrl_{name}", help, labels=("pool", *labels))


def _states(pools: Sequence[Pool]) -> Iterator[Metric]:
    up = _gauge("pool_up", "1 while the pool is ready for jobs.", ())
    state = _gauge("pool_state", "1 for the state that the pool is in.", ("state",))
    for pool in pools:
        up.add_metric((pool.name,), float(pool.state == "ready"))
        state.add_metric((pool.name, pool.state), 1)
    yield from (up, state)


def _now(told: Sequence[tuple[str, Mapping]]) -> Iterator[Metric]:
    """What the head said last."""
    at = _gauge("status_timestamp_seconds", "When the head last wrote its status, unix time.", ())
    gpus = _gauge("gpus", "GPUs of the pool by what they do now: working, switching, or idle.", ("doing",))
    jobs = _gauge("jobs_attached", "Logical jobs attached now.", ())
    calls = _gauge("calls_open", "Calls accepted and not ended: the queue and what runs.", ("account",))
    host = _gauge("host_bytes", "Host memory for state: there is, and is promised.", ("node", "what"))
    spilled = _gauge("spilled_bytes", "State of deployments on NVMe.", ("node",))
    link = _gauge("link_bytes_per_second", "How fast state has moved.", ("node", "way"))
    for pool, status in told:
        at.add_metric((pool,), status["now_us"] / 1e6)
        doing = dict.fromkeys(("working", "switching", "idle"), 0)
        for gpu in status["gpus"].values():
            phase = gpu["phase"]
            doing["idle" if not phase else "working" if phase == "open" else "switching"] += 1
        for name, count in doing.items():
            gpus.add_metric((pool, name), count)
        jobs.add_metric((pool,), len(status["jobs"]))
        open_calls: dict[str, int] = defaultdict(int)
        for job in status["jobs"].values():
            open_calls[job["account"]] += job["open_calls"]
        for account, count in open_calls.items():
            calls.add_metric((pool, account), count)
        for node, tier in status["tiers"].items():
            host.add_metric((pool, node, "limit"), tier["host_bytes"])
            host.add_metric((pool, node, "promised"), tier["promised_bytes"])
            spilled.add_metric((pool, node), sum(tier["spilled"].values()))
        for node, seen in status["links"].items():
            for way in ("in", "out", "refill", "spill"):
                link.add_metric((pool, node, way), seen[f"gbps_{way}"] * 1e9)
    yield from (at, gpus, jobs, calls, host, spilled, link)


def _sums(told: Sequence[tuple[str, Published]]) -> Iterator[Metric]:
    """What the GPUs' time went to."""
    at = _gauge("report_timestamp_seconds", "Up to when the pool's accounts are told, unix time.", ())
    held = _counter("held_gpu_seconds", "What the pool held, by its agents' own clocks.", ())
    classes = _counter("class_gpu_seconds", "What the GPUs' time went to: busy, switch, kept, idle, ...", ("class",))
    overhead = _counter("overhead_gpu_seconds", "What no job pays for.", ())
    switches = _counter("switches", "Times that a worker group's state was brought onto its GPUs.", ())
    moved = _counter("moved_bytes", "Bytes that switches moved.", ("way",))
    busy = _gauge("busy_ratio", f"Busy share of what the pool held in the last {RECENT_MINUTES} minutes told.", ())
    saved = _gauge("saved_gpu_seconds", "What dedicated runs would have held less what the pool held; may be < 0.", ())
    for pool, published in told:
        minutes = published.minutes
        at.add_metric((pool,), published.until_us / 1e6)
        held.add_metric((pool,), sum(m.pool_us for m in minutes) / 1e6)
        for kind in SpanClass:
            classes.add_metric((pool, kind.value), sum(m.classes.get(kind, 0) for m in minutes) / 1e6)
        classes.add_metric((pool, "unattributed"), sum(m.unattributed_us for m in minutes) / 1e6)
        overhead.add_metric((pool,), sum(m.overhead_us for m in minutes) / 1e6)
        switches.add_metric((pool,), published.switches)
        moved.add_metric((pool, "in"), sum(m.bytes_in for m in published.moves))
        moved.add_metric((pool, "out"), sum(m.bytes_out for m in published.moves))
        recent = minutes[-RECENT_MINUTES:]
        if wide := sum(m.pool_us for m in recent):
            busy.add_metric((pool,), sum(m.classes.get(SpanClass.BUSY, 0) for m in recent) / wide)
        saved.add_metric((pool,), sum(m.dedicated_us - m.pool_us for m in minutes) / 1e6)
    yield from (at, held, classes, overhead, switches, moved, busy, saved)


def _jobs(told: Sequence[tuple[str, Published]]) -> Iterator[Metric]:
    """By who pays."""
    charged = _counter("charged_gpu_seconds", "GPU time charged.", _WHO)
    count = _counter("jobs", "Logical jobs that ever attached.", _WHO)
    dedicated = _gauge("dedicated_gpu_seconds", "What dedicated runs would have held.", (*_WHO, "confidence"))
    longer = _gauge("stretch_ratio", "Wall time in the pool over wall time alone, mean over jobs.", _WHO)
    for pool, published in told:
        by_who: dict[tuple[str, ...], list[Job]] = defaultdict(list)
        for job in published.jobs:
            by_who[tuple(getattr(job, name) for name in _WHO)].append(job)
        for who, jobs in by_who.items():
            charged.add_metric((pool, *who), sum(sum(row[1:4]) for job in jobs for row in job.minutes) / 1e6)
            count.add_metric((pool, *who), len(jobs))
            sure: dict[str, float] = defaultdict(float)
            for job in jobs:
                sure[job.basis.confidence] += sum(row[4] for row in job.minutes) / 1e6
            for confidence, seconds in sure.items():
                dedicated.add_metric((pool, *who, confidence), seconds)
            if told_stretches := [s for job in jobs if (s := stretch(job)) is not None]:
                longer.add_metric((pool, *who), sum(told_stretches) / len(told_stretches))
    yield from (charged, count, dedicated, longer)
