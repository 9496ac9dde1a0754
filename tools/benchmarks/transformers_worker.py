"""transformers' `generate`, in bf16, with a stopping criterion that notes the times. Several prompts are one batch."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList


class Times(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that stops nothing and notes when each token is there."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.began = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.at_s.append(time.perf_counter() - self.began)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> None:
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        count = question["max_tokens"]
        inputs = tokenizer(question["prompts"], return_tensors="pt", padding=True, add_special_tokens=False)
        times = Times()
        with torch.inference_mode():
            model.generate(
                **inputs,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([times]),
            )
        lengths = inputs["attention_mask"].sum(-1).tolist()
        print(json.dumps([{"prompt_tokens": length, "at_s": times.at_s} for length in lengths]), flush=True)


main()
