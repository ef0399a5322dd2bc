"""The reference of bench.train: the same DeepSpeed in a program of its own, on plain transformers and peft.

Work as JSON in argv; each line on stdin asks for a step, each line on stdout tells its seconds. One thread on one core,
as a pretend GPU has it.
"""

import json
import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bench.trainwork import MICRO_BATCH, Work, sequences
from plexrl.engines.deepspeed import start
from plexrl.engines.deepspeed.form import settings
from plexrl.engines.torch.gang import Gang

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Plain:
    """Model and DeepSpeed engine."""

    def __init__(self, work: Work):
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {work.core})
        self._work = work
        library = start.load("cpu")
        start.join(library, Gang(0, 1, "", "127.0.0.1"), "127.0.0.1", "cpu")
        model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.bfloat16).eval()
        if work.rank:
            config = LoraConfig(r=work.rank, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS)
            model = get_peft_model(model, config, autocast_adapter_dtype=True).eval()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        config = settings(work.stage, sum(p.numel() for p in trained), not work.rank)
        optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
        self._model = model
        self._engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(self, number: int) -> float:
        """Gradients of all micro-batches, then an optimizer step. Seconds."""
        begun = time.perf_counter()
        for data in torch.from_numpy(sequences(self._work, number)).split(MICRO_BATCH):
            logits = self._engine(input_ids=data[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), data[:, 1:].flatten(), reduction="sum"
            )
            self._engine.backward(loss)
        self._engine.step()
        return time.perf_counter() - begun


def main() -> None:
    """Step whenever asked to."""
    plain = Plain(msgspec.json.decode(sys.argv[1], type=Work))
    for number, _ in enumerate(sys.stdin):
        print(json.dumps(plain.step(number)), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
