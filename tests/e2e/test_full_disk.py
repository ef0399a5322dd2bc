"""A full disk under the checkpoints: what was saved before stays whole, the fault says so, the pool serves on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .localpool import LocalPool, unprivileged
from .rawclient import HttpClient

MIB = 1 << 20


class SmallDiskPool(LocalPool):
    """Its checkpoints lie on a file system of their own, of 1 MiB."""

    def command(self) -> list[str]:
        """What runs the pool: in a mount namespace of its own."""
        self.state.mkdir(mode=0o700)
        (self.state / "checkpoints").mkdir(mode=0o700)
        run = super().command()[len(unprivileged()) :]
        mount = f"mount -t tmpfs -o size=1m,mode=0700 tmpfs '{self.state}/checkpoints'"
        again = "exec unshare --user --map-user=1000 --map-group=1000"
        return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} && {again} "$@"', "sh", *run]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalPool]:
    tiny = {
        "path": str(tiny_model),
        "max_context": 128,
        "sample": {"kv_bytes": 2 * MIB, "max_batch": 16},
        "lora": {"max_rank": 8, "slots": 1},
    }
    config = {
        "models": {"tiny": tiny},
        "device": {"kind": "cpu", "bytes": 64 * MIB},
        "host": {"bytes": 16 * MIB},
    }
    with SmallDiskPool(tmp_path_factory.mktemp("full-disk"), config) as pool:
        yield pool


@pytest.fixture(scope="module")
def job(pool: LocalPool) -> Iterator[HttpClient]:
    client = HttpClient(pool)
    yield client
    client.close()


def test_saving_to_a_full_disk(job: HttpClient):
    model = job.model()
    at_save = job.wait(job.train(model, 1, forward_only=True)).logprobs()
    path = job.wait(job.save(model, 2, "kept")).json["path"]
    job.wait(job.train(model, 3))
    job.wait(job.step(model, 4, learning_rate=0.1))
    later = job.wait(job.train(model, 5, forward_only=True)).logprobs()
    assert later != at_save
    seq, refused = 6, []
    while not refused:
        ended = job.wait(job.save(model, seq, f"more{seq}"))
        if ended.failed:
            refused.append(ended)
        seq += 1
        assert seq < 40, "the disk is not small"
    refused.append(job.wait(job.save(model, seq, "kept", overwrite=True)))
    for ended in refused:
        assert "disk is full" in ended.detail and "save again" in ended.detail.lower(), ended.detail
        assert ended.json["category"] == "server"
    # The model is what it was, and so is the checkpoint that could not be replaced.
    assert job.wait(job.train(model, seq + 1, forward_only=True)).logprobs() == later
    copy = job.wait(job.load_new(path)).json["model_id"]
    assert job.wait(job.train(copy, 1, forward_only=True)).logprobs() == at_save
    # A name whose save failed is free.
    again = job.wait(job.save(model, seq + 2, f"more{seq - 1}"))
    assert again.failed and "disk is full" in again.detail
    job.unload(copy)
    job.unload(model)


def test_publishing_to_a_full_disk(job: HttpClient):
    """The version does not exist, and the memory that was meant for it comes back: 16 MiB would not last for all."""
    model = job.model(rank=None)
    seq, detail = 1, ""
    for seq in range(1, 31):
        ended = job.wait(job.publish(model, seq, f"v{seq}"))
        if ended.failed:
            detail = ended.detail
            assert "disk is full" in detail, detail
            assert job.ask_sampler(path=f"tinker://{model}/sampler_weights/v{seq}").status == 400
    assert detail
    # Without a name a version needs no disk.
    answer = job.post(
        "save_weights_for_sampler",
        model_id=model,
        seq_id=seq + 1,
        sampling_session_seq_id=99,
        type="save_weights_for_sampler",
    )
    sampler = job.wait(answer).json["sampling_session_id"]
    assert not job.wait(job.sample(sampler, 1)).failed
    assert not job.wait(job.train(model, seq + 2)).failed
    job.unload(model)
