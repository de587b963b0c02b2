"""P5: through a prefill and a decode engine comes what one engine says alone, token for token.

Features meet by twos: for any two settings of any two of them there is a case that has both.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from engine_kit.handoff import Engine, LocalRouter, engines, prompt_of, request, save_toy
from model_kit.checkpoints import SIZES, save_adapter

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    Array,
    EngineCoreRequest,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    StructuredOutputsParams,
)

CHUNK = 16
"""Tokens that prefill computes in a step: a long prompt takes three."""
MOVE_AFTER = 5
SEEDED = {"temperature": 1.1, "top_p": 0.95, "seed": 11}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = {
    "json": {"json": json.dumps(SCHEMA)},
    "regex": {"regex": "[a-f]{3,8}-[0-9]{2}"},
    "choice": {"choice": ["crimson", "cobalt", "cyan"]},
    "grammar": {"grammar": 'start: NUMBER (("+" | "-") NUMBER){2}\nNUMBER: /[0-9]{1,3}/'},
}
CHANGES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {0: 3.0, 5: 4.0, 30: -100.0}},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.2, "presence_penalty": 0.7},
    "min_tokens": {"min_tokens": 7, "logit_bias": {0: 8.0}},
    "top_k": {"top_k": 4, "min_p": 0.01},
}
FEATURES: dict[str, list[Any]] = {
    "prompt": [38, 9, 16, 17],
    "sampling": ["greedy", "seeded"],
    "remembered": ["nowhere", "prefill", "decode", "both"],
    "n": [1, 3],
    "adapter": [None, "one"],
    "salt": [None, "salt"],
    "embeds": [False, True],
    "logprobs": [None, 0, 3],
    "prompt_logprobs": [None, 2],
    "form": [None, *FORMS],
    "stop": [None, "P's first letter", "across the hand-off", "later"],
    "changes": [None, *CHANGES],
    "bad_words": [False, True],
    "max_tokens": [20, 1, 2],
    "kind": list(RequestOutputKind),
    "moved": [False, True],
    "fetched": [False, True],
}
Case = dict[str, Any]


def cover_pairs(features: dict[str, list[Any]], seed: int) -> list[Case]:
    """Few cases in which any two settings of different features meet."""
    rng = random.Random(seed)
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(features, 2)
        for x in range(len(features[a]))
        for y in range(len(features[b]))
    }
    cases: list[Case] = []
    while missing:
        first = sorted(rng.choice(sorted(missing, key=sorted)))
        chosen = dict(first)
        for name in rng.sample(sorted(features), len(features)):
            if name not in chosen:
                settings = range(len(features[name]))
                chosen[name] = max(settings, key=lambda x: gain(missing, chosen, (name, x), rng))
        met = {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        missing -= met
        cases.append({name: features[name][chosen[name]] for name in features})
    return cases


def gain(
    missing: set[frozenset[Any]], chosen: dict[str, int], new: tuple[str, int], rng: random.Random
) -> tuple[int, float]:
    """How many missing pairs a setting adds to those that are chosen; ties are drawn."""
    return sum(frozenset((old, new)) in missing for old in chosen.items()), rng.random()


CASES = cover_pairs(FEATURES, seed=5)


@dataclass
class Panels:
    """Two ways to the same answer: through the engines of a service, or of one engine alone."""

    tokenizer: Tokenizer
    adapter: LoRARequest
    alone: Engine
    prefill: Engine
    decode: Engine
    other: Engine

    def aggregated(self, message: EngineCoreRequest) -> Answer:
        self.alone.forget_prefixes()
        [outputs] = LocalRouter(self.tokenizer, decode=[self.alone]).run(message)
        return Answer.of(outputs, message.sampling.output_kind)

    def disaggregated(self, message: EngineCoreRequest, *, moved: bool, fetched: bool) -> Answer:
        """fetched: prefill gets what it lacks of the prompt from the engine alone."""
        route = LocalRouter(
            self.tokenizer,
            prefill=[self.prefill],
            decode=[self.decode, self.other],
            move_after=MOVE_AFTER if moved else None,
        )
        if fetched:
            route.fleet.fetch_from(self.alone)
        [outputs] = route.run(message)
        return Answer.of(outputs, message.sampling.output_kind)


@pytest.fixture(scope="module")
def panels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panels]:
    root = tmp_path_factory.mktemp("toy")
    model = save_toy(root / "model")
    adapter = LoRARequest("one", 1, save_adapter(root / "one", 1, rank=2))
    tokenizer = load_tokenizer(resolve_model(model))
    assert tokenizer is not None
    chunked = {"max_num_batched_tokens": CHUNK}
    with engines(model, alone={}, prefill=chunked, decode={}, other={}) as made:
        yield Panels(tokenizer, adapter, *made)


@dataclass
class Answer:
    """All that a consumer was told."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)
    """The tokens whose log-probabilities were told, of outputs and of the prompt."""
    numbers: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, outputs: list[RequestOutput], kind: RequestOutputKind) -> Answer:
        """Deltas put together; of other kinds the last word counts."""
        answer = cls()
        logprobs: dict[int, list[Any]] = {}
        prompt: list[Any] = []
        for output in outputs:
            prompt = output.prompt_logprobs or prompt  # type: ignore[assignment]
            for part in output.outputs:
                index = part.index
                if kind is not RequestOutputKind.DELTA:
                    answer.texts[index], answer.token_ids[index], logprobs[index] = "", [], []
                answer.texts[index] = answer.texts.get(index, "") + part.text
                answer.token_ids.setdefault(index, []).extend(part.token_ids)
                logprobs.setdefault(index, []).extend(part.logprobs or [])
                answer.ends[index] = (part.finish_reason, part.stop_reason)
        for row in [*itertools.chain(*(logprobs[i] for i in sorted(logprobs))), *prompt]:
            entries = sorted((row or {}).items())
            answer.rows.append([(token, entry.decoded_token) for token, entry in entries])
            answer.numbers += [entry.logprob for _, entry in entries]
        return answer


def message_of(case: Case, panels: Panels) -> EngineCoreRequest:
    """The request that a case describes, but for its stop string."""
    prompt = prompt_of(3, case["prompt"])
    fields: dict[str, Any] = {"max_tokens": case["max_tokens"], "n": case["n"]}
    if case["sampling"] == "seeded":
        fields |= SEEDED
    fields |= CHANGES.get(case["changes"], {})
    fields["min_tokens"] = min(fields.get("min_tokens", 0), case["max_tokens"])
    if case["form"] is not None:
        fields["structured_outputs"] = StructuredOutputsParams(**FORMS[case["form"]])  # type: ignore[arg-type]
    if case["embeds"]:
        values = torch.randn(
            len(prompt), SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)
        )
        fields["prompt_embeds"] = Array("float32", tuple(values.shape), values.numpy().tobytes())
    else:
        fields["prompt_logprobs"] = case["prompt_logprobs"]  # which are of tokens
    return request(
        "r",
        prompt,
        lora_request=panels.adapter if case["adapter"] else None,
        cache_salt=case["salt"],
        logprobs=case["logprobs"],
        output_kind=case["kind"],
        **fields,
    )


def with_details(case: Case, message: EngineCoreRequest, panels: Panels) -> EngineCoreRequest:
    """Stop strings and bad words that do occur in the answer."""
    if case["bad_words"]:
        made = panels.aggregated(message).token_ids[0]
        words = [made[:1], made[1:3]] if len(made) > 2 else [made[:2]]
        message = changed(message, bad_words_token_ids=words)
    text = panels.aggregated(message).texts[0]
    begin, end = {"P's first letter": (0, 1), "across the hand-off": (0, 2), "later": (3, 5)}.get(
        case["stop"], (0, 0)
    )
    return changed(message, stop=[text[begin:end]]) if text[begin:end] else message


def changed(message: EngineCoreRequest, **params: Any) -> EngineCoreRequest:
    sampling = msgspec.structs.replace(message.sampling, **params)
    return msgspec.structs.replace(message, sampling_params=sampling)


def warm(engine: Engine, message: EngineCoreRequest) -> None:
    """Let an engine compute the prompt, and remember it."""
    single = changed(message, n=1, max_tokens=1, min_tokens=0, stop=[], structured_outputs=None)
    LocalRouter(None, decode=[engine]).run(single)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_P5_what_crosses_the_hinge_equals_what_one_engine_says(panels: Panels, case: Case) -> None:
    message = with_details(case, message_of(case, panels), panels)
    expected = panels.aggregated(message)
    for engine in (panels.prefill, panels.decode, panels.other):
        engine.forget_prefixes()
        if case["remembered"] in (engine.name, "both") and engine is not panels.other:
            warm(engine, message)
    computed, fetches = panels.decode.prompt_tokens_computed, panels.prefill.hinge.prefix_fetches
    answer = panels.disaggregated(message, moved=case["moved"], fetched=case["fetched"])
    assert answer.texts == expected.texts
    assert answer.token_ids == expected.token_ids
    assert answer.ends == expected.ends
    assert answer.rows == expected.rows
    assert answer.numbers == pytest.approx(expected.numbers, abs=1e-4)
    assert panels.decode.prompt_tokens_computed == computed, "decode computes nothing of a prompt"
    may_fetch = case["fetched"] and message.sampling.prompt_logprobs is None
    if may_fetch and case["remembered"] in ("nowhere", "decode"):
        assert panels.prefill.hinge.prefix_fetches > fetches
        assert panels.prefill.hinge.prefix_fetches_failed == 0


def test_the_cases_bring_every_two_features_together() -> None:
    for a, b in itertools.combinations(FEATURES, 2):
        met = {(str(case[a]), str(case[b])) for case in CASES}
        assert len(met) == len(FEATURES[a]) * len(FEATURES[b])
