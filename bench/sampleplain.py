"""vLLM alone, for bench.sample: `python -m bench.sampleplain WORK`, a line "requests seed" in, seconds out.

The settings are those of the pool's replica; core and niceness too. What a user would start instead of a pool.
"""

import os
import sys
import time

import msgspec

from bench.samplework import Work, prompts


def main() -> None:
    """Serve until stdin ends."""
    work = msgspec.json.decode(sys.argv[1], type=Work)
    os.sched_setaffinity(0, {work.core})
    os.nice(10)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS="1",
    )
    # vLLM and what it imports print; our lines go where stdout was.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=work.model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=work.context,
        max_num_seqs=work.max_batch,
        kv_cache_memory_bytes=work.kv_bytes,
        skip_tokenizer_init=True,
    )
    asked = SamplingParams(max_tokens=work.new, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        requests, seed = map(int, line.split())
        texts = [{"prompt_token_ids": prompt} for prompt in prompts(work, requests, seed)]
        begun = time.perf_counter()
        found = llm.generate(texts, asked, use_tqdm=False)
        taken = time.perf_counter() - begun
        assert sum(len(each.outputs[0].token_ids) for each in found) == requests * work.new
        print(taken, file=out, flush=True)


if __name__ == "__main__":
    main()
