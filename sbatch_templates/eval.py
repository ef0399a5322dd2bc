#!/usr/bin/env python3
"""Evaluation: how many sums does a model get right? One file, the public `openai` SDK.

Names one model or several: base models of the pool, and versions that save_weights_for_sampler published
(tinker://...), which can be asked while the job that trains them lives. All questions are asked at once; the pool
draws the answers together.

Nothing in here knows where the GPUs are: `sbatch --plexrl-pool=NAME` sets OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import argparse
import asyncio
import json
import re

import openai
import reasoning_gym


async def main() -> None:
    args = arguments()
    problems = list(
        reasoning_gym.create_dataset(
            "chain_sum", size=args.problems, seed=args.seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
    )
    # A pool may be busy or on its way to another node: an answer may take long, and is worth asking for again.
    async with openai.AsyncOpenAI(timeout=args.patience, max_retries=20) as client:
        room = asyncio.Semaphore(args.at_once)
        for model in args.model or [first.id async for first in client.models.list()][:1]:
            answers = await asyncio.gather(*(ask(client, room, model, problem, args) for problem in problems))
            report(args.out, model, answers)


async def ask(client: openai.AsyncOpenAI, room: asyncio.Semaphore, model: str, problem: dict, args) -> dict:
    """One question: whether the answer is right, how sure the model was of it, and the tokens that it took."""
    async with room:
        found = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": problem["question"]}],
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            logprobs=True,
        )
    choice = found.choices[0]
    return {
        "model": model,
        "question": problem["question"],
        "expected": problem["answer"],
        "answer": choice.message.content,
        "right": problem["answer"] in re.findall(r"-?\d+", choice.message.content),
        "logprob": sum(token.logprob for token in choice.logprobs.content),
        "tokens": found.usage.completion_tokens,
    }


def report(out: str | None, model: str, answers: list[dict]) -> None:
    """One line for people, and JSON lines for programs."""
    right, tokens = (sum(answer[name] for answer in answers) for name in ("right", "tokens"))
    print(f"{model}: {right} of {len(answers)} right, {tokens} tokens", flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(answer) + "\n" for answer in answers)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="sums, asked through the openai SDK")
    parser.add_argument("--model", action="append", help="a base model, or a version; may be given again")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--at-once", type=int, default=64, help="questions that are open at the same time")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds to wait for one answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file to append one JSON line per question to")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
