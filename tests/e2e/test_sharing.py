"""The co-scheduler's ways in a real small pool: prefetch beside a turn, long tails that move together, explanations."""

import json
import subprocess
import sys
import time
from pathlib import Path

from plexrl.engines import sizing
from plexrl.types import Role, SpanClass, records

from .journals import of_kind, same_training
from .localpool import LocalPool, finish
from .rawclient import HttpClient
from .small import RESTLESS

MIB = 1 << 20
PROMPT = [1, 2, 3]


def decisions(pool: LocalPool) -> list[dict]:
    """What the head wrote of its newest decisions."""
    path = pool.state / "run" / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def beside(pool: LocalPool) -> int:
    """How many gangs came in on a GPU while another one was busy there, all the time that it took."""
    busy: dict[str, list[tuple[int, int, str]]] = {}
    for record in of_kind(pool, records.SpanClosed):
        span = record.span
        if span.kind is SpanClass.BUSY:
            busy.setdefault(span.gpu, []).append((span.start_us, span.end_us, span.gang))
    return sum(
        any(
            start <= moved.now_us - int(moved.moved.seconds * 1e6) and moved.now_us <= end and gang != moved.gang
            for start, end, gang in busy.get(moved.gpu, ())
        )
        for moved in of_kind(pool, records.Switched)
        if moved.incoming and moved.moved.bytes_in
    )


def crossings(pool: LocalPool) -> int:
    """How many gangs came in while another one left the same GPU."""
    moves = [
        (record.incoming, record.gpu, record.now_us - int(record.moved.seconds * 1e6), record.now_us)
        for record in of_kind(pool, records.Switched)
        if record.moved.seconds
    ]
    coming, going = ([move[1:] for move in moves if move[0] is way] for way in (True, False))
    return sum(
        any(gpu == other and start < stop and begin < end for other, begin, stop in going) for gpu, start, end in coming
    )


def test_the_next_group_comes_in_beside_the_turn_and_the_bits_are_the_same(local_pool, tiny_model, tmp_path):
    """Three trainers on a device for two: one of those that wait leaves for the other while the third works."""
    full = sizing.sizes(str(tiny_model), "float32", Role.TRAIN, "full", 1, 8, 0).device_bytes
    device = -(-(2 * full + full // 2) // 4096) * 4096
    model = {"micro_batch_tokens": 128, "sample": {"replicas": 1, "kv_bytes": MIB // 4, "max_batch": 4}}
    pool = local_pool(device=device, model=model, scheduler={**RESTLESS, "quantum": "100ms"})
    common = ("--rank", "0", "--steps", "6", "--rows", "16", "--lr", "1e-3")
    alone = pool.run("sft.py", *common)
    assert beside(pool) == 0
    names = ("a", "b", "c")
    together = [pool.popen("sft.py", *common, "--folder", str(tmp_path), "--name", name) for name in names]
    pool.wait_until("all models exist", lambda: len(list(tmp_path.glob("*.ready"))) == len(names))
    (tmp_path / "go").touch()
    for program in together:
        same_training(pool, alone, finish(program))
    assert beside(pool) > 0, decisions(pool)
    assert crossings(pool) > 0
    written, placed = decisions(pool), of_kind(pool, records.GroupPlaced)
    # Whether a turn found its gang there already, or waited for it, is a matter of milliseconds.
    began = {entry["reason"] for entry in written if entry["what"] == "began"}
    assert "build" in began and began & {"switch", "prefetched", "resident"}
    assert all(entry["waited_us"] >= 0 for entry in written if entry["what"] == "began")
    pool.stop()
    kept = json.loads((pool.state / "profiles.json").read_text())
    # The tiny model's pieces are too small to tell of the link itself.
    assert kept["links"]["local"]["moves"] > 0
    (line,) = kept["groups"]
    assert (line["key"]["base"], line["key"]["role"], line["key"]["kind"]) == ("tiny", "train", "full")
    assert 0 < line["profile"]["duty"] <= 1 and line["profile"]["steps"] == 4 * 6
    # The first was placed by a prior; those after it by what it had shown.
    specs = [record.spec for record in placed]
    assert specs[0].duty is None and all(0 < spec.duty <= 1 for spec in specs[1:])


def forced(model: Path, tokens: list[int]) -> list[float]:
    """Logprobs of what follows the prompt, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(input_ids=torch.tensor([PROMPT + tokens])).logits[0]
    rows = torch.log_softmax(logits.float(), -1)[len(PROMPT) - 1 : -1]
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_the_rest_of_a_rollout_moves_together_and_frees_a_gpu_for_who_waits(local_pool, tiny_model):
    import numpy
    from tinker.proto import tinker_public_pb2 as pb

    scheduler = {"quantum": "60s", "gather_share": 0.5, "paranoid": True}
    pool = local_pool(gpus=2, model={"train": {"gpus": 1}, "max_context": 128}, scheduler=scheduler)
    client, other = HttpClient(pool), HttpClient(pool)
    model = other.model()
    sampler = client.sampler(base="tiny")
    pool.wait_until("both replicas are there", lambda: [d["reason"] for d in decisions(pool)].count("built") == 3)
    # Each replica draws a long answer; the short ones are soon most of the rollout. A machine may be busy, and the
    # trainer's call come when all is over: then the next rollout is caught in its tail.
    lengths = [120, 120, *[2] * 12]
    for attempt in range(10):
        rollout = [
            client.sample(sampler, attempt * 100 + seq, PROMPT, samples=4, max_tokens=most, seed=seq)
            for seq, most in enumerate(lengths)
        ]
        train = other.train(model, attempt + 1)
        drawn = [pb.SampleResponse.FromString(client.wait(answer).body) for answer in rollout]
        assert not other.wait(train).failed
        time.sleep(1.5)  # decisions are written each second
        if any(decision["reason"] == "gathered" for decision in decisions(pool)):
            break
    else:
        raise AssertionError(f"nothing was gathered: {decisions(pool)}")
    for response, most in zip(drawn, lengths, strict=True):
        for sequence in response.sequences:
            tokens = numpy.frombuffer(sequence.tokens, "<i4").tolist()
            assert len(tokens) == most
            logprobs = numpy.frombuffer(sequence.logprobs, "<f4")
            numpy.testing.assert_allclose(logprobs, forced(tiny_model, tokens), atol=1e-3)
    client.close()
    other.close()


def explained(pool: LocalPool, *arguments: str, uid: int = 1000, **env: str) -> subprocess.CompletedProcess[str]:
    """`plexrl explain` as some uid; the pool's is 1000."""
    as_user = ["unshare", "--user", f"--map-user={uid}", f"--map-group={uid}"]
    command = [*as_user, sys.executable, "-m", "plexrl.cli.main", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_explain_tells_owner_and_pool_and_nobody_else(local_pool):
    pool = local_pool()
    client = HttpClient(pool)
    inside = {"TINKER_BASE_URL": client.url, "TINKER_API_KEY": client.key}
    assert "no such call, and no job with calls" in explained(pool, **inside).stdout
    model = client.model()
    for seq in range(1, 9):
        client.train(model, seq, rows=24)
    told = explained(pool, "--json", **inside)
    job = json.loads(told.stdout)["job"]
    assert f"Job {job}" in told.stdout
    client.wait(f"{model}:8")

    pool.wait_until(
        "the head has said so", lambda: job in explained(pool, job, "--registry", str(pool.registry)).stdout
    )
    assert job in explained(pool, job.partition(".")[0], "--registry", str(pool.registry)).stdout
    stolen = explained(pool, TINKER_BASE_URL=client.url, TINKER_API_KEY="guessed")
    assert stolen.returncode == 2 and "key" in stolen.stderr and not stolen.stdout
    client.close()


def test_explain_refuses_a_foreign_user(local_pool):
    pool = local_pool()
    refused = explained(pool, "1", "--registry", str(pool.registry), "--pool-uids", "1000", uid=1001)
    assert refused.returncode == 2 and not refused.stdout
    assert "only root and the account of a pool" in refused.stderr
