"""The program that bench.sample attaches to its pool: requests through the SDK beside vLLM alone.

Work as JSON in argv; progress on stderr, JSON on stdout: per row, seconds of both sides in every round.
"""

import json
import os
import subprocess
import sys
import time

import msgspec
import tinker
from tinker import types

from bench.samplework import MODEL, Work, prompts


def say(text: str) -> None:
    """Progress."""
    print(f"bench.sample: {text}", file=sys.stderr, flush=True)


def pool(work: Work, clients: list[tinker.SamplingClient], requests: int, seed: int) -> float:
    """Seconds for so many requests at once, dealt out to the clients."""
    asked = types.SamplingParams(max_tokens=work.new, temperature=1.0, stop=[])
    inputs = [types.ModelInput.from_ints(prompt) for prompt in prompts(work, requests, seed)]
    begun = time.perf_counter()
    futures = [clients[i % len(clients)].sample(each, 1, asked) for i, each in enumerate(inputs)]
    found = [future.result() for future in futures]
    taken = time.perf_counter() - begun
    assert sum(len(each.sequences[0].tokens) for each in found) == requests * work.new
    return taken


def main() -> None:
    """All rows."""
    work = msgspec.json.decode(sys.argv[1], type=Work)
    service = tinker.ServiceClient()
    base = [service.create_sampling_client(base_model=MODEL)]
    rows: list[dict[str, object]] = []
    command = [sys.executable, "-m", "bench.sampleplain", sys.argv[1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as plain:

        def alone(requests: int, seed: int) -> float:
            plain.stdin.write(f"{requests} {seed}\n")
            plain.stdin.flush()
            return float(plain.stdout.readline())

        assert plain.stdout.readline() == "ready\n"
        say(f"warm: pool {pool(work, base, 2, 0):.1f} s, vLLM alone {alone(2, 0):.1f} s")
        for requests in work.concurrency:
            pairs = []
            for seed in range(1, work.rounds + 1):
                pairs.append((pool(work, base, requests, seed), alone(requests, seed)))
                say(f"{requests} requests: pool {pairs[-1][0]:.2f} s, vLLM alone {pairs[-1][1]:.2f} s")
            rows.append({"case": "base", "concurrency": requests, "tenants": 0, "pairs": pairs})
        plain.stdin.close()
    trainers = [service.create_lora_training_client(MODEL, rank=work.rank, seed=i) for i in range(work.tenants)]
    tenants = [trainer.result().save_weights_and_get_sampling_client() for trainer in trainers]
    tenants = [each.result() if hasattr(each, "result") else each for each in tenants]
    pool(work, tenants, work.tenants, 0)
    pairs = []
    for seed in range(1, work.rounds + 1):
        several = pool(work, tenants, work.tenant_requests, seed)
        pairs.append((several, pool(work, tenants[:1], work.tenant_requests, seed)))
        say(f"{work.tenant_requests} requests: {work.tenants} tenants {pairs[-1][0]:.2f} s, one {pairs[-1][1]:.2f} s")
    rows.append({"case": "tenants", "concurrency": work.tenant_requests, "tenants": work.tenants, "pairs": pairs})
    sys.stdout.write(json.dumps(rows) + "\n")
    sys.stdout.flush()
    # The SDK's own threads do not end; nothing of ours is left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
