"""Answers one prompt with the default model in a given situation, as a process of its own.

Takes a JSON text {"llm": arguments of LLM, "situations": [...], "length": tokens of the prompt} and prints, for each
situation, the tokens and the bits of the logprobs. See test_batch_invariance.py.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from typing import Any

from pagetable import LLM, SamplingParams

OUTPUT_TOKENS, LOGPROBS = 24, 5


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Tokens that a tokenizer could have made."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def answer(llm: LLM, length: int, situation: str) -> dict[str, Any]:
    """Tokens and logprobs of the prompt: "cold", "warm", "among N" others, or "crowded" (preempted by others)."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=LOGPROBS)
    prompt, others = prompt_of(length), []
    if situation == "warm":
        llm.generate([prompt], params)
    if situation.startswith("among"):
        others = [prompt_of(5 + 37 * seed % 90, seed) for seed in range(2, 2 + int(situation.split()[1]))]
        others[0] = prompt[: length // 2] + others[0]  # and one that shares a prefix
    if situation == "crowded":
        others = [prompt_of(length, seed) for seed in (2, 3)]
    middle = len(others) // 2
    outputs = llm.generate([*others[:middle], prompt, *others[middle:]], params)
    llm.block_manager.check()
    (mine,) = outputs[middle].outputs
    assert len(mine.token_ids) == OUTPUT_TOKENS, mine
    return {
        "tokens": mine.token_ids,
        "logprobs": [{token: entry.logprob.hex() for token, entry in step.items()} for step in mine.logprobs or []],
        "cached": outputs[middle].num_cached_tokens,
        "preemptions": llm.stats().preemptions,
    }


def main() -> None:
    order = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore", message="the KV cache holds")
    with LLM("smollm2", **order["llm"]) as llm:
        print(json.dumps([answer(llm, order["length"], situation) for situation in order["situations"]]))


if __name__ == "__main__":
    main()
