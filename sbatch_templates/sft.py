#!/usr/bin/env python3
"""Supervised fine-tuning: LoRA, one file, the public `tinker` SDK.

The model learns to answer sums with the number alone, from problems whose answers are known. Afterwards the program
saves its state, publishes the weights under a name, and samples from them.

Nothing in here knows where the GPUs are: `sbatch --plexrl-pool=NAME` sets TINKER_BASE_URL and TINKER_API_KEY.
"""

import argparse
import json
import time

import reasoning_gym
import tinker
from tinker import types


def main() -> None:
    args = arguments()
    service = tinker.ServiceClient()
    if args.resume:
        trainer = service.create_training_client_from_state_with_optimizer(args.resume).result()
    else:
        trainer = service.create_lora_training_client(args.base_model, rank=args.rank, seed=args.seed).result()
    tokenizer = trainer.get_tokenizer()
    problems = draw_problems(args.steps * args.batch + args.test, args.seed)
    tests, lessons = problems[: args.test], problems[args.test :]

    for step in range(args.steps):
        began = time.time()
        batch = lessons[step * args.batch : (step + 1) * args.batch]
        data = [datum(tokenizer, problem) for problem in batch]
        backward = trainer.forward_backward(data, "cross_entropy")
        update = trainer.optim_step(types.AdamParams(learning_rate=args.lr))
        loss = backward.result().metrics["loss:sum"] / sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
        update.result()
        report(args.out, step=step, loss=loss, seconds=time.time() - began)

    state = trainer.save_state(args.name, overwrite=True).result()
    published = trainer.save_weights_for_sampler(args.name).result()
    print(f"saved {state.path}\npublished {published.path}", flush=True)

    sampler = service.create_sampling_client(model_path=published.path).result()
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    answers = [
        sampler.sample(types.ModelInput.from_ints(make_prompt(tokenizer, problem)), 1, params) for problem in tests
    ]
    texts = [
        tokenizer.decode(answer.result().sequences[0].tokens, skip_special_tokens=True).strip() for answer in answers
    ]
    right = sum(text == problem["answer"] for text, problem in zip(texts, tests, strict=True))
    print(f"{right} of {len(tests)} problems it has not seen are answered right", flush=True)
    service.close(status="success").result()


def draw_problems(count: int, seed: int) -> list[dict]:
    """Sums and differences of two one-digit numbers."""
    return list(
        reasoning_gym.create_dataset(
            "chain_sum", size=count, seed=100_000 * seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
    )


def make_prompt(tokenizer, problem: dict) -> list[int]:
    """The problem in the model's chat format."""
    messages = [{"role": "user", "content": problem["question"]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def datum(tokenizer, problem: dict) -> types.Datum:
    """Prompt and answer as training data: position i predicts token i + 1, only the answer is weighed."""
    prompt = make_prompt(tokenizer, problem)
    answer = tokenizer.encode(problem["answer"] + tokenizer.eos_token, add_special_tokens=False)
    tokens = prompt + answer
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
        },
    )


def report(out: str | None, **values: float) -> None:
    """One line for people, and one of JSON for programs."""
    print(f"step {values['step']:3d}   loss {values['loss']:.4f}   {values['seconds']:5.1f} s", flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="supervised fine-tuning on sums, through the tinker SDK")
    parser.add_argument("--base-model", default="smollm2-135m", help="a name from the pool's plexrl.yaml")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA; 0 trains all parameters")
    parser.add_argument("--resume", help="a tinker:// path that save_state returned, to go on from")
    parser.add_argument("--name", default="sft", help="of the checkpoint and the published weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="problems per step")
    parser.add_argument("--test", type=int, default=8, help="problems kept for the end")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file to append one JSON line per step to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
