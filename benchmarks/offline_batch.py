"""Batches through an `LLM` class, ours or vLLM's, which have the same shape.

`python offline_batch.py ENGINE MODEL OPTIONS` with ENGINE `diptych` or `vllm` and OPTIONS as JSON;
prints `ready`. Then for each line of JSON, `{"prompts": [[1, 2], ...], "output_tokens": 8}`, it
prints one with `seconds`. Runs in a peer's environment too, so it imports nothing of the project's
own but that class.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

CLASSES = {
    "diptych": ("diptych_engine", "diptych_protocol"),
    "vllm": ("vllm", "vllm"),
}


def main(engine: str, model: str, options: str) -> None:
    # Libraries, and the processes that they start, print what they like.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    of_llm, of_params = CLASSES[engine]
    llm = importlib.import_module(of_llm).LLM(model, **json.loads(options))
    params_class = importlib.import_module(of_params).SamplingParams
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        tokens = task["output_tokens"]
        params = params_class(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        if any(len(output.outputs[0].token_ids) != tokens for output in outputs):
            raise RuntimeError("an answer is too short")
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
