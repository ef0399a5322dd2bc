"""What the pool knows: jobs, sessions, models, worker groups, versions, sampling sessions, futures.

The book changes only by `apply(record)`, live and in a replay alike, so a new head that reads the journal knows what
the old one knew. It decides nothing and does no I/O.
"""

from dataclasses import dataclass, field

from msgspec import Struct

from plexrl.types import CallKind
from plexrl.types import records as r


@dataclass
class Job:
    """A logical job and the last result it was given (the causal edge of its next call)."""

    attached: r.JobAttached
    ended: str = ""
    last_delivered: str = ""


@dataclass
class Session:
    """What one SDK client opened. beat_us: its last sign of life."""

    opened: r.SessionOpened
    beat_us: int
    ended: str = ""


@dataclass
class Model:
    """A deployment. next_seq: the next training call that may run. held: calls that came before their turn.

    checkpoint, saved: its newest one, and the folder. exact: that is the state of today, as far as calls have ended.
    gradients: some may wait for an optim_step; a checkpoint has none. versions: all that were published of it, by age.
    """

    created: r.ModelCreated
    next_seq: int = 1
    consumed: set[int] = field(default_factory=set)
    held: dict[int, str] = field(default_factory=dict)
    held_since_us: int = 0
    ended: str = ""
    lost: bool = False
    applied: int = 0
    checkpoint: str = ""
    versions: list[str] = field(default_factory=list)
    saved: str = ""
    exact: bool = False
    gradients: bool = False

    def note(self, kind: CallKind, ok: bool, work: dict[str, object]) -> None:
        """A training call of it ended: what that says of its state and its last checkpoint."""
        match kind:
            case CallKind.SAVE_STATE if ok:
                self.checkpoint, self.saved = str(work["path"]), str(work["folder"])
                self.exact = not self.gradients
            case CallKind.FORWARD_BACKWARD:
                self.exact, self.gradients = False, True
            case CallKind.OPTIM_STEP | CallKind.LOAD_STATE:
                self.exact, self.gradients = False, self.gradients and not ok

    @property
    def id(self) -> str:
        return self.created.model

    @property
    def resume(self) -> str:
        """What to add to a message that says that the model is lost."""
        return f"; its last checkpoint is {self.checkpoint}" if self.checkpoint else "; it had no checkpoint"


@dataclass
class Group:
    """A worker group: where it is and which deployments it holds.

    unbuilt: gangs whose engines were ended while they slept. rebuilt: those that were so once.
    """

    placed: r.GroupPlaced
    ended: str = ""
    unbuilt: set[str] = field(default_factory=set)
    rebuilt: set[str] = field(default_factory=set)


@dataclass
class Version:
    """A published snapshot. nodes: where there is a slab of it now, be it spilled to NVMe.

    number: the how manieth of its model, from 1. readers: sessions that have a sampling session of it and live.
    """

    published: r.VersionPublished
    nodes: tuple[str, ...]
    number: int
    readers: set[str] = field(default_factory=set)


class Entry(Struct, gc=False):
    """A future: a creation (accepted None) or a call. There are many, and no cycles: the collector leaves them out."""

    id: str
    job: str
    uid: int
    accepted: r.CallAccepted | None = None
    ended: r.CallEnded | None = None
    delivered: bool = False


class Book:
    """The state of one pool instance."""

    def __init__(self) -> None:
        self.started: r.EpochStarted | None = None
        self.orderly_end = True
        self.last_span_us = 0
        self.jobs: dict[str, Job] = {}
        self.sessions: dict[str, Session] = {}
        self.session_keys: dict[tuple[str, str], str] = {}
        self.models: dict[str, Model] = {}
        self.groups: dict[str, Group] = {}
        self.versions: dict[str, Version] = {}
        self.samplers: dict[str, r.SamplerOpened] = {}
        self.entries: dict[str, Entry] = {}
        self.open_calls: dict[str, set[str]] = {}  # job -> calls not ended

    def apply(self, record: r.Record) -> None:
        """Take one record in. Unknown ids raise KeyError: the journal would be inconsistent."""
        _APPLY[type(record)](self, record)

    # -- reading -------------------------------------------------------------------------------------------------------

    def live_models(self, group: str) -> list[Model]:
        """Deployments of a group that have not ended, oldest first."""
        return [m for m in self.models.values() if m.created.group == group and not m.ended]

    def model_versions(self, model: str) -> list[Version]:
        """Snapshots of a model that the nodes have, oldest first."""
        return [v for name in self.models[model].versions if (v := self.versions[name]).nodes]

    def behind(self, version: str) -> tuple[int, str]:
        """How many versions of its model were published after this one, and the newest of them (else itself)."""
        known = self.versions[version]
        versions = self.models[known.published.model].versions
        return len(versions) - known.number, versions[-1]

    def release(self, model: Model) -> list[str]:
        """Held calls whose turn has come, in order; next_seq moves past them and past consumed seq ids."""
        ready: list[str] = []
        while True:
            if model.next_seq in model.consumed:
                model.consumed.discard(model.next_seq)
            elif model.next_seq in model.held:
                ready.append(model.held.pop(model.next_seq))
            else:
                return ready
            model.next_seq += 1

    def forget_job(self, job: str) -> None:
        """Drop the futures of a job that has ended: nobody can ask for them any more."""
        for entry in [e for e in self.entries.values() if e.job == job and e.ended]:
            del self.entries[entry.id]

    # -- writing -------------------------------------------------------------------------------------------------------

    def _epoch_started(self, record: r.EpochStarted) -> None:
        self.started = record
        self.orderly_end = False

    def _epoch_ended(self, record: r.EpochEnded) -> None:
        self.orderly_end = True

    def _job_attached(self, record: r.JobAttached) -> None:
        self.jobs[record.job] = Job(record)

    def _job_ended(self, record: r.JobEnded) -> None:
        if record.job in self.jobs:
            self.jobs[record.job].ended = record.reason

    def _session_opened(self, record: r.SessionOpened) -> None:
        self.sessions[record.session] = Session(record, beat_us=record.now_us)
        self.session_keys[(record.job, record.key)] = record.session

    def _session_ended(self, record: r.SessionEnded) -> None:
        self.sessions[record.session].ended = record.reason
        for version in self.versions.values():
            version.readers.discard(record.session)

    def _group_placed(self, record: r.GroupPlaced) -> None:
        self.groups[record.spec.group] = Group(record)

    def _group_ended(self, record: r.GroupEnded) -> None:
        self.groups[record.group].ended = record.reason

    def _unbuilt(self, record: r.Unbuilt) -> None:
        group = self.groups[record.gang.rpartition("/")[0]]
        if record.built:
            group.unbuilt.discard(record.gang)
            group.rebuilt.add(record.gang)
        else:
            group.unbuilt.add(record.gang)

    def _model_created(self, record: r.ModelCreated) -> None:
        self.models[record.model] = Model(record)
        self.entries[f"{record.model}:0"] = Entry(f"{record.model}:0", record.job, record.uid)

    def _model_ended(self, record: r.ModelEnded) -> None:
        model = self.models[record.model]
        model.ended, model.lost = record.reason, record.lost

    def _version_published(self, record: r.VersionPublished) -> None:
        versions = self.models[record.model].versions
        versions.append(record.version)
        self.versions[record.version] = Version(record, nodes=record.nodes, number=len(versions))

    def _version_dropped(self, record: r.VersionDropped) -> None:
        self.versions[record.version].nodes = ()

    def _version_kept(self, record: r.VersionKept) -> None:
        self.versions[record.version].nodes = record.nodes

    def _sampler_opened(self, record: r.SamplerOpened) -> None:
        self.samplers[record.sampler] = record
        if record.version:
            self.versions[record.version].readers.add(record.session)

    def _seq_consumed(self, record: r.SeqConsumed) -> None:
        model = self.models[record.model]
        if record.since:
            model.next_seq = max(model.next_seq, record.seq + 1)
            model.consumed = {seq for seq in model.consumed if seq >= model.next_seq}
        elif record.seq >= model.next_seq:
            model.consumed.add(record.seq)

    def _call_accepted(self, record: r.CallAccepted) -> None:
        call = record.call
        self.entries[call.id] = Entry(call.id, call.job, record.uid, accepted=record)
        self.open_calls.setdefault(call.job, set()).add(call.id)
        if call.seq is not None:
            model = self.models[call.deployment]
            if not model.held:
                model.held_since_us = record.now_us
            model.held[call.seq] = call.id

    def _call_ended(self, record: r.CallEnded) -> None:
        entry = self.entries[record.id]
        entry.ended = record
        if entry.accepted is None:
            return
        call = entry.accepted.call
        self.open_calls[call.job].discard(record.id)
        if call.seq is not None:
            model = self.models[call.deployment]
            if record.ok:
                model.applied = max(model.applied, call.seq)
            model.note(call.kind, record.ok, entry.accepted.work)
            if call.seq in model.held:
                # It ended without having run (a gap that never closed, a job that ended): its place is used up.
                del model.held[call.seq]
                if call.seq >= model.next_seq:
                    model.consumed.add(call.seq)

    def _delivered(self, record: r.Delivered) -> None:
        if record.id in self.entries:
            self.entries[record.id].delivered = True
        if record.job in self.jobs:
            self.jobs[record.job].last_delivered = record.id

    def _span_closed(self, record: r.SpanClosed) -> None:
        self.last_span_us = max(self.last_span_us, record.span.end_us)

    def _nothing(self, record: r.Record) -> None:
        """Records for accounting only."""


_APPLY = {
    r.EpochStarted: Book._epoch_started,
    r.EpochEnded: Book._epoch_ended,
    r.JobAttached: Book._job_attached,
    r.JobEnded: Book._job_ended,
    r.SessionOpened: Book._session_opened,
    r.SessionEnded: Book._session_ended,
    r.GroupPlaced: Book._group_placed,
    r.GroupEnded: Book._group_ended,
    r.Unbuilt: Book._unbuilt,
    r.ModelCreated: Book._model_created,
    r.ModelEnded: Book._model_ended,
    r.VersionPublished: Book._version_published,
    r.VersionDropped: Book._version_dropped,
    r.VersionKept: Book._version_kept,
    r.SamplerOpened: Book._sampler_opened,
    r.SeqConsumed: Book._seq_consumed,
    r.CallAccepted: Book._call_accepted,
    r.CallEnded: Book._call_ended,
    r.Delivered: Book._delivered,
    r.SpanClosed: Book._span_closed,
    r.Switched: Book._nothing,
    r.AgentInterval: Book._nothing,
}
