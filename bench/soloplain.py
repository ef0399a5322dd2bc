"""The reference of bench.solo: the same GRPO step in plain transformers and peft, one process on all the cores.

Work as JSON in argv; each line on stdin asks for a step, each line on stdout tells its seconds. As a good
single-process program does it: one batch, KV cache, logits of the answers only, the draw's logprobs taken from the
same forward pass.
"""

import json
import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.solowork import Work, advantage, prompts

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class Plain:
    """Model, adapter, optimizer."""

    def __init__(self, work: Work):
        torch.set_num_threads(work.threads)
        torch.manual_seed(0)
        self._work = work
        self._tokenizer = AutoTokenizer.from_pretrained(work.model)
        self.batches = prompts(work, self._tokenizer)
        base = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
        config = LoraConfig(r=work.rank, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS)
        self._model = get_peft_model(base, config).eval()
        self._adam = torch.optim.AdamW([p for p in self._model.parameters() if p.requires_grad], lr=work.lr, fused=True)

    def step(self, batch: list[list[int]]) -> dict[str, float]:
        """Sample, then learn."""
        work, begun = self._work, time.perf_counter()
        asked = self._tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            drawn = self._model.generate(
                **asked,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=work.max_tokens,
                min_new_tokens=work.max_tokens,
                num_return_sequences=work.samples,
                pad_token_id=self._tokenizer.pad_token_id,
            )
        sampled = time.perf_counter()
        mask = torch.cat(
            [asked["attention_mask"].repeat_interleave(work.samples, 0), torch.ones(len(drawn), work.max_tokens)], 1
        )
        logits = self._model(
            input_ids=drawn, attention_mask=mask, logits_to_keep=work.max_tokens + 1, use_cache=False
        ).logits[:, :-1]
        answers = drawn[:, -work.max_tokens :, None]
        logprobs = logits.gather(2, answers)[..., 0] - torch.logsumexp(logits, -1)
        advantages = torch.tensor([advantage(i) for i in range(work.samples)] * len(batch))[:, None]
        (-(torch.exp(logprobs - logprobs.detach()) * advantages).sum()).backward()
        self._adam.step()
        self._adam.zero_grad()
        return {"sampling": sampled - begun, "training": time.perf_counter() - sampled}


def main() -> None:
    """Step whenever asked to."""
    plain = Plain(msgspec.json.decode(sys.argv[1], type=Work))
    for batch, _ in zip(plain.batches, sys.stdin, strict=False):
        print(json.dumps(plain.step(batch)), flush=True)


if __name__ == "__main__":
    main()
