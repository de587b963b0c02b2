"""Markers that are special tokens stay in the text of whoever parses it, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from diptych_frontend.text.detokenizer import TextStream
from diptych_frontend.text.output_processor import Collector, OutputProcessor
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

MARKED = "<|channel|>analysis<|constrain|>x<|message|>hm<|end|><|other|><|start|>assistant"
KWARGS: dict[str, Any] = {"chat_template_kwargs": {}}


def harmonious() -> Tokenizer:
    """A tokenizer of single letters, in which markers are special tokens, as those of gpt-oss."""
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    backend = Backend(models.BPE(letters, [], unk_token="?"))
    backend.decoder = decoders.Fuse()
    names = ("channel", "message", "end", "start", "return", "call", "constrain", "other")
    backend.add_special_tokens([f"<|{name}|>" for name in names])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("parser", "kwargs", "text"),
    [
        ("harmony", KWARGS, MARKED.replace("<|other|>", "")),
        ("harmony", None, "analysisxhmassistant"),
        ("think", KWARGS, "analysisxhmassistant"),
        ("none", None, "analysisxhmassistant"),
    ],
)
@pytest.mark.parametrize("skip", [True, False])
def test_contract_C05_markers_stay_where_reasoning_is_parsed(
    parser: Any, kwargs: dict[str, Any] | None, text: str, skip: bool
) -> None:
    tokenizer = harmonious()
    processor = OutputProcessor(tokenizer, reasoning_parser=parser)
    collector = Collector[RequestOutput]()
    params = SamplingParams(skip_special_tokens=skip, output_kind=RequestOutputKind.FINAL_ONLY)
    request = EngineCoreRequest(
        "r", [0], None, params, None, None, 0.0, None, None, None, reasoning_parser_kwargs=kwargs
    )
    processor.add(request, None, collector)
    for token_id in tokenizer.encode(MARKED):
        processor.process([EngineCoreOutput("r", [token_id])])
    processor.process([EngineCoreOutput("r", [], finish_reason=FinishReason.LENGTH)])
    output = collector.take()
    assert output is not None
    assert output.outputs[0].text == (text if skip else MARKED)


@given(parts=st.lists(st.sampled_from(["é", "😀", " a", "x", "<|im_end|>", "<|im_start|>"])))
def test_a_kept_token_parts_the_text_and_changes_nothing_else(
    tokenizer: Tokenizer, parts: list[str]
) -> None:
    kept = tokenizer.special_ids_of(["<|im_end|>", "no token", "x"])
    assert len(kept) == 1
    stream = TextStream(tokenizer, [], skip_special_tokens=True, kept_token_ids=kept)
    ids = tokenizer.encode("".join(parts))
    text = "".join([*map(stream.push, ids), stream.flush()])
    assert text == "".join(parts).replace("<|im_start|>", "")
