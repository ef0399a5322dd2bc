#!/usr/bin/env python3
"""Reinforcement learning with verifiable rewards: GRPO, LoRA, one file, the public `tinker` SDK.

The model learns to do sums. Each step draws a few problems from reasoning_gym, samples several answers to each, lets
reasoning_gym's own scorer check them, and moves the weights towards the answers that did better than their group.

Nothing in here knows where the GPUs are: the SDK reads TINKER_BASE_URL and TINKER_API_KEY, which a job submitted with
`sbatch --plexrl-pool=NAME` finds in its environment.
"""

import argparse
import json
import statistics
import time

import reasoning_gym
import tinker
from tinker import types


def main() -> None:
    args = arguments()
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(args.base_model, rank=args.rank, seed=args.seed).result()
    tokenizer = trainer.get_tokenizer()
    problems = draw_problems(args)

    for step in range(args.steps):
        began = time.time()
        batch = problems[step * args.groups : (step + 1) * args.groups]

        # 1. Publish the weights and sample a group of answers to every problem, all at once.
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompts = [make_prompt(tokenizer, problem) for problem in batch]
        futures = []
        for index, prompt in enumerate(prompts, start=step * args.groups):
            seed = args.seed * 1_000_000 + index
            params = types.SamplingParams(max_tokens=args.max_tokens, temperature=1.0, seed=seed)
            futures.append(sampler.sample(types.ModelInput.from_ints(prompt), args.samples, params))
        groups = [future.result().sequences for future in futures]

        # 2. Check the answers.
        rewards = [
            [score(tokenizer, problem, answer) for answer in group]
            for problem, group in zip(batch, groups, strict=True)
        ]

        # 3. Learn from every group whose answers differ in worth. The two calls travel together.
        data = [
            datum(prompt, answer, advantage)
            for prompt, group, worth in zip(prompts, groups, rewards, strict=True)
            for answer, advantage in zip(group, advantages(worth), strict=True)
            if advantage
        ]
        if data:
            backward = trainer.forward_backward(data, "importance_sampling")
            update = trainer.optim_step(types.AdamParams(learning_rate=args.lr))
            backward.result()
            update.result()

        reward = statistics.mean(value for group in rewards for value in group)
        report(args.out, step=step, reward=reward, seconds=time.time() - began)

    saved = trainer.save_state("final", overwrite=True).result()
    print(f"saved {saved.path}", flush=True)
    service.close(status="success").result()


def draw_problems(args: argparse.Namespace) -> list[dict]:
    """Sums and differences of two one-digit numbers whose result is not negative."""
    wanted = args.steps * args.groups
    drawn = reasoning_gym.create_dataset(
        "chain_sum", size=4 * wanted, seed=100_000 * args.seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    return [problem | {"score": drawn.score_answer} for problem in drawn if not problem["answer"].startswith("-")][
        :wanted
    ]


def make_prompt(tokenizer, problem: dict) -> list[int]:
    """The problem in the model's chat format, with the answer begun for it, so that few tokens are enough."""
    expression = problem["metadata"]["expression"] + " ="
    messages = [{"role": "system", "content": "You are a calculator."}, {"role": "user", "content": expression}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + expression
    return tokenizer.encode(text, add_special_tokens=False)


def score(tokenizer, problem: dict, answer: types.SampledSequence) -> float:
    """reasoning_gym's score: 1 for the number alone, less when there is talk around it, 0 when it is wrong."""
    return problem["score"](tokenizer.decode(answer.tokens, skip_special_tokens=True).strip(), problem)


def advantages(rewards: list[float]) -> list[float]:
    """GRPO: how much better than its group each answer is, in standard deviations. All zero when all are equal."""
    spread = statistics.pstdev(rewards)
    mean = statistics.mean(rewards)
    return [(reward - mean) / spread if spread > 1e-6 else 0.0 for reward in rewards]


def datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """One answer as training data: position i predicts token i + 1; the prompt itself carries no advantage."""
    tokens = prompt + list(answer.tokens)
    skipped = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * skipped + list(answer.logprobs),
            "advantages": [0.0] * skipped + [advantage] * len(answer.tokens),
        },
    )


def report(out: str | None, **values: float) -> None:
    """One line for people, and one of JSON for programs."""
    print(f"step {values['step']:3d}   reward {values['reward']:.3f}   {values['seconds']:5.1f} s", flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with LoRA on sums, through the tinker SDK")
    parser.add_argument("--base-model", default="smollm2-135m", help="a name from the pool's plexrl.yaml")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--groups", type=int, default=8, help="problems per step")
    parser.add_argument("--samples", type=int, default=4, help="answers per problem")
    parser.add_argument("--max-tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file to append one JSON line per step to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
