"""`python -m bench.scheduler [--json]`: what one event costs the scheduler, at 100 to 10,000 deployments on 2,048 GPUs.

Virtual time, real scheduler: each event method is called as a head would call it, and timed together with the `wake_at`
that follows. The reference, driven by the same calls in the same process: one FIFO lock per node, which knows no gangs,
memory, costs or accounts. Half of the deployments are trainers of 1, 2, 4 and 8 GPUs (two forward_backwards and an
optim_step, then a pause), half are samplers of two replicas (eight samples, then a pause). Pauses are such that the
GPUs would be busy 80 % of the time if switches were free.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random

from plexrl.scheduler import Build, Dropped, Gather, Pause, Policy, Prefetch, Run, Scheduler, Switch
from plexrl.scheduler.costs import SWITCH_PRIOR
from plexrl.types import Call, CallKind, GroupSpec, PlexrlError, Role

GPUS = 2048
PER_NODE = 8
GPU_BYTES = 80 << 30
STATE_BYTES = {Role.TRAIN: 48 << 30, Role.SAMPLE: 24 << 30}  # of all that live on a GPU, few fit at the same time
SIZES = (100, 1_000, 10_000)
LOAD = 0.8
POLICY = {"order": "hrrs", "placement": "spread"}
TRAIN = ((CallKind.FORWARD_BACKWARD, 1_000_000), (CallKind.FORWARD_BACKWARD, 1_000_000), (CallKind.OPTIM_STEP, 300_000))
SAMPLE = ((CallKind.SAMPLE, 4_000_000),) * 8
ROUND_US = {Role.TRAIN: 2_300_000, Role.SAMPLE: 11_000_000}  # alone; 4 s times the mean maximum of eight exponentials
BUILD_US = 1_000_000
PAUSE_US = 20_000
SEED = 1


def deployments(count: int, gpus: int) -> list[GroupSpec]:
    """What is to be placed. Expected duties fill the GPUs to LOAD, none above 0.9."""
    shapes = [
        (Role.SAMPLE, 1 + i // 2 % 2, 2) if i % 2 else (Role.TRAIN, min(gpus, 1 << i // 2 % 4), 1) for i in range(count)
    ]
    duty = min(0.9, LOAD * gpus / sum(size * replicas for _, size, replicas in shapes))
    return [
        GroupSpec(
            group=f"g{i}",
            role=role,
            owner=f"j{i}",
            gang_size=size,
            replicas=replicas,
            device_bytes=STATE_BYTES[role],
            duty=duty,
        )
        for i, (role, size, replicas) in enumerate(shapes)
    ]


class Locks:
    """The reference: who comes first has its node's lock until nothing of it runs or waits there."""

    def __init__(self, nodes: int) -> None:
        self._lines: list[deque[list[Call]]] = [deque() for _ in range(nodes)]
        self._waiting: dict[str, list[Call]] = {}
        self._running: Counter[str] = Counter()
        self._calls: dict[str, Call] = {}

    def _line(self, call: Call) -> deque[list[Call]]:
        return self._lines[int(call.group[1:]) % len(self._lines)]

    def submit(self, now: int, call: Call) -> list[Run]:
        self._calls[call.id] = call
        line = self._line(call)
        waiting = self._waiting.get(call.group)
        if waiting is None:
            waiting = self._waiting[call.group] = []
            line.append(waiting)
        waiting.append(call)
        return self._grant(line)

    def finished(self, now: int, call_id: str, units: int) -> list[Run]:
        call = self._calls.pop(call_id)
        self._running[call.group] -= 1
        line = self._line(call)
        if not self._running[call.group] and not self._waiting[call.group]:
            del self._waiting[call.group]
            line.popleft()
        return self._grant(line)

    def wake_at(self) -> None:
        return None

    def _grant(self, line: deque[list[Call]]) -> list[Run]:
        runs = []
        while line and (calls := line[0]):
            call = calls[0]
            if call.seq is not None and self._running[call.group]:
                break
            calls.pop(0)
            self._running[call.group] += 1
            runs.append(Run(f"{call.group}/0", (call.id,)))
        return runs


class Drive:
    """Programs and engines around a scheduler: answers its actions in virtual time, and times its events.

    ns: event -> nanoseconds of each call of it since they were last cleared; cpu_ns: CPU time of all of them.
    outstanding: calls not ended yet.
    """

    def __init__(self, scheduler: Scheduler | Locks, specs: Sequence[GroupSpec], seed: int) -> None:
        self.scheduler = scheduler
        self.now = 0
        self.ns: dict[str, list[int]] = {}
        self.cpu_ns = 0
        self.outstanding: dict[str, Call] = {}
        self.running: dict[str, dict[str, int]] = {}  # gang -> call -> the run that may end it
        self.building = 0
        self.ended = 0
        self._specs = {spec.group: spec for spec in specs}
        self._left = Counter(dict.fromkeys(self._specs, 0))
        self._seqs = Counter(dict.fromkeys(self._specs, 0))
        self._random = Random(seed)
        self._agenda: list[tuple[int, int, str, tuple]] = []
        self._number = 0

    def place_all(self) -> float:
        """Place and build all groups; microseconds per placement."""
        start = time.perf_counter_ns()
        for group in self._specs.values():
            self.building += len(self.scheduler.place(self.now, group).gangs)
        placing = time.perf_counter_ns() - start
        while self.building:
            self.step()
        return placing / len(self._specs) / 1e3

    def begin(self) -> None:
        """Every program starts somewhere in its pause."""
        for spec in self._specs.values():
            self._at(self._random.random() * self._pause_us(spec), "round", spec)

    def events(self, count: int) -> None:
        """Go on until so many events have been timed."""
        self.ns, self.cpu_ns = {}, 0
        while sum(map(len, self.ns.values())) < count:
            for _ in range(100):
                self.step()

    def step(self) -> None:
        """One thing happens: a tick that was wanted, or what is next on the agenda."""
        wake = self.scheduler.wake_at()
        if wake is not None and (not self._agenda or wake <= self._agenda[0][0]):
            self.now = max(self.now, wake)
            self._do("tick")
            return
        self.now, _, what, arguments = heappop(self._agenda)
        getattr(self, f"_{what}")(*arguments)

    def _at(self, delay: float, what: str, *arguments: object) -> int:
        self._number += 1
        heappush(self._agenda, (self.now + int(delay), self._number, what, arguments))
        return self._number

    def _do(self, event: str, *arguments: object) -> None:
        method = getattr(self.scheduler, event)
        cpu, start = time.thread_time_ns(), time.perf_counter_ns()
        actions = method(self.now, *arguments)
        self.scheduler.wake_at()
        self.ns.setdefault(event, []).append(time.perf_counter_ns() - start)
        self.cpu_ns += time.thread_time_ns() - cpu
        for action in actions:
            match action:
                case Run(gang, calls):
                    self._run(gang, calls)
                case Switch(gang, evict):
                    self._at(self._switch_us(gang, evict), "answer", "switched", gang, True, {}, evict)
                case Prefetch(gang, evict):
                    self._at(self._switch_us(gang, evict), "answer", "prefetched", gang, True, {}, evict)
                case Build(gang, evict):
                    self._at(BUILD_US, "answer", "built", gang, evict)
                case Pause(gang):
                    self._at(PAUSE_US, "pause_now", gang)
                case Gather(gang, _, calls):
                    for call in calls:
                        self.running[gang].pop(call, None)
                case Dropped():
                    raise AssertionError(f"nothing fails here, and {action}")

    def _switch_us(self, gang: str, evict: Sequence[str]) -> int:
        size, *leave = (self._specs[name.rpartition("/")[0]].device_bytes for name in (gang, *evict))
        return SWITCH_PRIOR.switch_us(size, sum(leave))

    # ---- engines

    def _run(self, gang: str, calls: Sequence[str]) -> None:
        running = self.running.setdefault(gang, {})
        for call in calls:
            mean = self.outstanding[call].cost_us
            us = self._random.expovariate(1 / mean) if self.outstanding[call].seq is None else mean
            running[call] = self._at(us, "finish", gang, call, self._number + 1)  # the number that it is given

    def _finish(self, gang: str, call: str, run: int) -> None:
        if self.running[gang].get(call) != run:
            return  # paused or gathered before it came to that
        del self.running[gang][call]
        group = self.outstanding.pop(call).group
        self.ended += 1
        self._do("finished", call, 1)
        self._left[group] -= 1
        if not self._left[group]:
            spec = self._specs[group]
            self._at(self._random.expovariate(1 / self._pause_us(spec)), "round", spec)

    def _pause_now(self, gang: str) -> None:
        running = self.running.setdefault(gang, {})
        unfinished = tuple(running)
        running.clear()
        self._do("paused", gang, unfinished)

    def _answer(self, event: str, *arguments: object) -> None:
        self.building -= event == "built"
        self._do(event, *arguments)

    # ---- programs

    def _pause_us(self, spec: GroupSpec) -> float:
        return ROUND_US[spec.role] * (1 - spec.duty) / spec.duty

    def _round(self, spec: GroupSpec) -> None:
        calls = TRAIN if spec.role is Role.TRAIN else SAMPLE
        self._left[spec.group] = len(calls)
        for kind, us in calls:
            seq = self._seqs[spec.group]
            self._seqs[spec.group] += 1
            call = Call(
                id=f"{spec.group}:{seq}",
                kind=kind,
                group=spec.group,
                deployment=spec.group,
                job=spec.owner,
                seq=None if kind is CallKind.SAMPLE else seq,
                cost_us=us,
            )
            self.outstanding[call.id] = call
            self._do("submit", call)


def measure(count: int, gpus: int, events: int, seed: int = SEED) -> dict:
    """One row: microseconds per event. mean, p99: wall time, which other programs lengthen; cpu, reference_cpu: means
    of the CPU time of the scheduler and of the reference; ratio: of these two."""
    specs = deployments(count, gpus)
    names = {f"n{i // PER_NODE}:{i % PER_NODE}": GPU_BYTES for i in range(gpus)}
    scheduler = Scheduler(names, Policy(**POLICY), virtual=True)
    scheduler.start(0)
    drive = Drive(scheduler, specs, seed)
    place_us = drive.place_all()
    scheduler.startup_done(drive.now)
    reference = Drive(Locks(max(1, gpus // PER_NODE)), specs, seed)
    for each in (drive, reference):
        each.begin()
        each.events(5 * count)  # until lines have grown as long as they get
        each.events(events)
    taken = [ns / 1e3 for each in drive.ns.values() for ns in each]
    plain = reference.cpu_ns / sum(map(len, reference.ns.values())) / 1e3
    cpu = drive.cpu_ns / len(taken) / 1e3
    return {
        "deployments": count,
        "mean_us": round(statistics.fmean(taken), 2),
        "p99_us": round(statistics.quantiles(taken, n=100)[98], 2),
        "cpu_us": round(cpu, 2),
        "reference_cpu_us": round(plain, 2),
        "ratio": round(cpu / plain, 1),
        "events": len(taken),
        "by_event": {
            event: {"share": round(len(ns) / len(taken), 3), "mean_us": round(statistics.fmean(ns) / 1e3, 2)}
            for event, ns in sorted(drive.ns.items())
        },
        "place_us": round(place_us, 1),
        "waiting_calls": len(drive.outstanding) - sum(map(len, drive.running.values())),
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--deployments", type=int, nargs="+", default=SIZES, help="sizes (default: 100 1000 10000)")
    parser.add_argument("--gpus", type=int, default=GPUS, help="GPUs, eight to a node (default: 2048)")
    parser.add_argument("--events", type=int, default=20_000, help="timed events per size (default: 20000)")
    args = parser.parse_args(argv)
    rows = []
    try:
        for count in args.deployments:
            print(f"bench.scheduler: {count:,} deployments", file=sys.stderr)
            rows.append(measure(count, args.gpus, args.events))
    except PlexrlError as error:
        print(f"bench.scheduler: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(
            json.dumps({"gpus": args.gpus, "policy": "hrrs, spread", "reference": "FIFO lock per node", "rows": rows})
        )
        return 0
    print(
        f"One event of the scheduler, {args.gpus:,} GPUs, hrrs and spread (reference: a FIFO lock per node, same run)"
    )
    print("  deployments   mean us   p99 us   CPU us reference   ratio")
    columns = (("mean_us", 10, 1), ("p99_us", 9, 1), ("cpu_us", 9, 1), ("reference_cpu_us", 10, 2), ("ratio", 8, 1))
    for row in rows:
        print(f"  {row['deployments']:11,}" + "".join(f"{row[name]:{width}.{n}f}" for name, width, n in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
