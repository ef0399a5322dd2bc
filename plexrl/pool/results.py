"""What the head adds to the result of a call that ended well: paths, versions, sampling sessions."""

import msgspec

from plexrl.pool.core import Core
from plexrl.pool.snapshots import Snapshots
from plexrl.types import CallKind, records


class Results:
    """Completes records of ended calls, and enters into the book what came of them."""

    def __init__(self, core: Core, snapshots: Snapshots):
        self._core = core
        self._snapshots = snapshots

    def complete(self, accepted: records.CallAccepted, record: records.CallEnded) -> records.CallEnded:
        """The record as the client is to get it. A publication becomes a version of the book's."""
        work = accepted.work
        body: dict[str, object]
        headers = {}
        match accepted.call.kind:
            case CallKind.SAVE_STATE:
                body = {"path": work["path"], "type": "save_weights"}
            case CallKind.LOAD_STATE:
                body = {"path": work["path"]}
            case CallKind.PUBLISH:
                body = self._published(accepted, record.body.decode())
                headers = {"x-plexrl-version": str(work["version"])}
            case CallKind.SAMPLE:
                version = str(work["version"])
                return msgspec.structs.replace(record, headers={"x-plexrl-version": version} if version else {})
            case _:
                return record
        payload = msgspec.json.encode({key: value for key, value in body.items() if value is not None})
        return msgspec.structs.replace(record, content_type="application/json", body=payload, headers=headers)

    def failed(self, accepted: records.CallAccepted) -> None:
        """A call that came to nothing: had it been to publish a version, the memory for that is given back."""
        call = accepted.call
        if call.kind is CallKind.PUBLISH and accepted.work["version"] not in self._core.book.versions:
            self._core.spawn(self._snapshots.discard(call.group, str(accepted.work["version"])))

    def _published(self, accepted: records.CallAccepted, checksum: str) -> dict[str, object]:
        core, work = self._core, accepted.work
        model = core.book.models[accepted.call.deployment]
        created = model.created
        core.commit(
            records.VersionPublished(
                now_us=core.now_us(),
                version=str(work["version"]),
                model=created.model,
                job=created.job,
                uid=created.uid,
                account=created.account,
                base=created.base,
                lora_rank=created.lora_rank,
                attn=created.attn,
                mlp=created.mlp,
                unembed=created.unembed,
                size=self._snapshots.bytes_of(model),
                nodes=self._snapshots.nodes(created.group),
                folder=str(work["folder"]) or self._snapshots.folder(model, str(work["version"])),
                checksum=checksum,
                ephemeral=not work["folder"],
            )
        )
        core.spawn(self._snapshots.settle_model(model))
        if not work["sampler"]:
            return {"path": work["version"]}
        core.commit(
            records.SamplerOpened(
                now_us=core.now_us(),
                sampler=str(work["sampler"]),
                session=created.session,
                job=created.job,
                uid=created.uid,
                base=created.base,
                version=str(work["version"]),
            )
        )
        return {"sampling_session_id": work["sampler"]}
