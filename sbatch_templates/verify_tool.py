#!/usr/bin/env python3
"""A slow tool, as agentic training meets it: tests in a sandbox, a prover, a web service that answers when it likes.

Reads `{"answers": [{"text", "expected"}, ...]}` from standard input, waits, and writes `{"rewards": [...]}`: 1.0 where
the text is the expected number and nothing else, 0.0 otherwise. It waits and does not compute, so that the time that
it takes is time in which the training program needs no GPU and leaves the cores alone.
"""

import argparse
import json
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description="checks answers after a while")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long the check takes")
    args = parser.parse_args()
    answers = json.load(sys.stdin)["answers"]
    time.sleep(args.seconds)
    json.dump({"rewards": [check(answer["text"], answer["expected"]) for answer in answers]}, sys.stdout)


def check(text: str, expected: str) -> float:
    """Exact match; a full stop after the number is forgiven."""
    return float(text.strip().removesuffix(".") == expected)


if __name__ == "__main__":
    main()
