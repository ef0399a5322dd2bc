"""`python -m bench.asleep NAME BYTES`: what other people's ways of taking state off a GPU cost, one JSON object.

NAME: torch_memory_saver, cuda-checkpoint (one tensor of BYTES), deepspeed (a model whose state with AdamW has about
BYTES; ZeRO 2) or vllm (a model of about BYTES, weights made up; level 1). It checks that what comes back is what went.
Without a GPU only deepspeed runs, from host to host, which says that it works and nothing of its speed. These are
references for bench.switch.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from bench.switch_serve import digest
from plexrl.memory import fallback
from plexrl.memory.fallback import Fallback
from plexrl.types import PlexrlError, Unavailable

REPEATS = 3


def timed(state: Fallback, check: Callable[[], int]) -> dict:
    """Medians of GB/s (1e9 bytes a second) out and in. Raises PlexrlError when check() changes."""
    before, out, back = check(), [], []
    for _ in range(REPEATS):
        left, came = state.offload(), state.load()
        out.append(left.bytes_out / left.seconds / 1e9)
        back.append(came.bytes_in / came.seconds / 1e9)
        if check() != before:
            raise PlexrlError("other bytes came back than had gone")
    sleep, wake = statistics.median(out), statistics.median(back)
    return {"sleep_gbs": round(sleep, 2), "wake_gbs": round(wake, 2), "bytes": left.bytes_out}


def torch_memory_saver(size: int) -> dict:
    """In this process, by torch's own allocator hooks."""
    state = fallback.torch_memory_saver(size)
    from torch_memory_saver import torch_memory_saver as saver

    need_gpu()
    saver.hook_mode = "torch"
    with saver.region(enable_cpu_backup=True):
        held = torch.arange(size // 8, dtype=torch.int64, device="cuda").view(torch.uint8)
    return timed(state, lambda: digest(held))


def cuda_checkpoint(size: int) -> dict:
    """Of a process that knows nothing of it."""
    need_gpu()
    holder = subprocess.Popen(
        [sys.executable, "-m", "bench.asleep", "hold", str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def check() -> int:
        holder.stdin.write("\n")
        holder.stdin.flush()
        return int(holder.stdout.readline() or -1)

    try:
        return timed(fallback.cuda_checkpoint(holder.pid, size), check)
    finally:
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.close()
        try:
            holder.wait(10)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()


def hold(size: int) -> None:
    """What cuda_checkpoint checkpoints: a tensor on the GPU, whose digest it prints for each line."""
    held = torch.arange(size // 8, dtype=torch.int64, device="cuda").view(torch.uint8)
    for _ in sys.stdin:
        print(digest(held), flush=True)


def deepspeed(size: int) -> dict:
    """A stack of linear layers, one step taken so that the optimizer has its state."""
    try:
        import deepspeed as ds
    except ImportError as error:
        raise Unavailable("deepspeed is not installed", "pip install 'plexrl[deepspeed]'") from error
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    folder = tempfile.TemporaryDirectory()  # it goes with the process
    torch.distributed.init_process_group(backend, init_method=f"file://{folder.name}/meet", rank=0, world_size=1)
    os.environ |= {"LOCAL_RANK": "0"}
    layers = max(size // 16 // (1024 * 1024), 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
    engine, *_ = ds.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
    inputs = torch.ones(1, 1024, device=engine.device)

    def check() -> int:
        with torch.no_grad():
            return digest(engine(inputs).contiguous().view(torch.uint8).flatten())

    engine.backward(engine(inputs).square().sum())
    engine.step()
    parameters = layers * 1024 * 1024
    # fp32: weights, their flat copy in the optimizer, two moments. Gradients are gone after a step.
    return {**timed(fallback.deepspeed(engine, 16 * parameters), check), "device": str(engine.device)}


def vllm(size: int) -> dict:
    """A random Qwen2 without a tokenizer."""
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise Unavailable("vllm is not installed", "Install vLLM for this machine's CUDA") from error
    need_gpu()
    hidden = 1024
    # bf16; a layer: four projections of the width, three of the feed-forward's four widths; embeddings are small.
    layers = max(size // (2 * hidden * hidden * 16), 1)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 1024,
        "torch_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            enforce_eager=True,
            max_model_len=128,
        )

    def check() -> int:
        greedy = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy, use_tqdm=False)
        return hash(tuple(answers[0].outputs[0].token_ids))

    return timed(fallback.vllm(llm, layers * 2 * hidden * hidden * 16), check)


def need_gpu() -> None:
    """Raises Unavailable."""
    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU here", "Run it on a machine with one")


WAYS = {
    "torch_memory_saver": torch_memory_saver,
    "cuda-checkpoint": cuda_checkpoint,
    "deepspeed": deepspeed,
    "vllm": vllm,
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.asleep", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[*WAYS, "hold"])
    parser.add_argument("bytes", type=int)
    args = parser.parse_args(argv)
    try:
        if args.name == "hold":
            hold(args.bytes)
        else:
            print(json.dumps(WAYS[args.name](args.bytes)))
    except PlexrlError as error:
        print(f"bench.asleep: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
