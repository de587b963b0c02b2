"""The tokens of an answer are bytes that make up its text, however it is cut and streamed."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from diptych_frontend.openai.chat import AnswerParts, ChatWriter
from diptych_frontend.openai.completions import CompletionWriter
from diptych_frontend.openai.responses import Envelope, Tally
from diptych_frontend.text.output_processor import Collector, OutputProcessor
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

SCRIPTS = (
    "🦄 ok", "👩‍👩‍👧‍👦🇩🇪", "你好，世界", "नमस्ते दुनिया", "مرحبا بالعالم", "שלום",
    "สวัสดีชาวโลก", "Привет", "ქართული", "안녕하세요", "አማርኛ", "ünïcödé", "𒀀𒁀 𐍈",
    "a\u0301 \u200b\u202e", "real \ufffd mark", "tab\t\nline  ", "plain words",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(SCRIPTS) | st.text(max_size=6), min_size=1, max_size=4).map(
    "".join
)
END = 2
"""The token that ends the real model's answers."""


def sentence_pieces() -> Tokenizer:
    """A vocabulary as SentencePiece makes it: pieces of words, and bytes for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdeklnoprst", "▁o", "▁ok", "lain", "▁p", "▁你", "你", "ü"]
    backend = Backend(
        models.BPE(
            {piece: at for at, piece in enumerate(pieces)},
            [("▁", "o"), ("▁o", "k"), ("▁", "p"), ("▁", "你")],
            unk_token="<unk>", byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=["byte-level BPE", "bytes beside pieces"])
def vocabulary(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer if request.param == "byte-level BPE" else sentence_pieces()


def answered(
    tokenizer: Tokenizer, ids: list[int], *, stop: list[str], streamed: bool, ends: bool, top: int
) -> list[RequestOutput]:
    """The outputs of an engine that samples these tokens."""
    processor = OutputProcessor(tokenizer)
    kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(logprobs=top, max_tokens=999, stop=stop, output_kind=kind)
    collector = Collector[RequestOutput]()
    made = EngineCoreRequest(
        request_id="r-1", prompt_token_ids=[5], mm_features=None, sampling_params=params,
        pooling_params=None, eos_token_id=END, arrival_time=0.0, lora_request=None,
        cache_salt=None, data_parallel_rank=None, external_req_id="r",
    )  # fmt: skip
    processor.add(made, None, collector)
    outputs: list[RequestOutput] = []
    for number, token in enumerate(ids, 1):
        row = [token, *((token + other) % tokenizer.vocab_size for other in range(1, top + 1))]
        rated = LogprobsLists([row], [[-float(at) for at in range(1, len(row) + 1)]], [1])
        finish = None
        if number == len(ids):
            finish = FinishReason.STOP if ends else FinishReason.LENGTH
        step = EngineCoreOutput("r-1", [token], new_logprobs=rated, finish_reason=finish)
        over = processor.process([step])
        output = collector.take()
        if output is not None:
            outputs.append(output)
        if over:  # a stop string
            break
    return outputs


def told(outputs: list[RequestOutput], *, streamed: bool, chat: bool) -> tuple[str, list[Any]]:
    """The text that a client gets, and the `logprobs` of the answer or of its pieces."""
    envelope = Envelope("1", 5, "m", 1, None)
    writer = (
        ChatWriter(envelope, 9, AnswerParts(None, None)) if chat else CompletionWriter(envelope)
    )
    if streamed:
        events = [writer.events(0, output, Tally(1)) for output in outputs]
        bodies = [json.loads(event.removeprefix(b"data: ")) for event in events]
    else:
        bodies = [json.loads(writer.answer([outputs], Tally(1)))]
    text, logprobs = "", []
    for body in bodies:
        [choice] = body["choices"]
        text += choice[("delta" if streamed else "message")]["content"] if chat else choice["text"]
        logprobs += [choice["logprobs"]] if choice["logprobs"] else []
    return text, logprobs


def named_bytes(name: str) -> bytes:
    """What the name of a token in a completion stands for."""
    if not name.startswith("bytes:"):
        return name.encode()
    return codecs.escape_decode(name.removeprefix("bytes:").encode())[0]


def shown(joined: bytes) -> str:
    """Bytes as an answer shows them, without the character that is not finished."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(joined)


@pytest.mark.parametrize("streamed", [False, True])
@settings(max_examples=60)
@given(text=TEXTS, cut=st.integers(0, 5), stop=st.sampled_from([None, "ok", "🦄", "世", "l", "न"]))
@example(text="🦄🦄 a", cut=1, stop="🦄")
@example(text="\U00040000l", cut=0, stop="l")
@example(text="你好，世界", cut=0, stop="世")
def test_joined_bytes_are_the_answer(
    vocabulary: Tokenizer, streamed: bool, text: str, cut: int, stop: str | None
) -> None:
    ids = vocabulary.encode(text)
    ids = ids[: max(len(ids) - cut, 1)] if cut and ids else [*ids, END]
    given: dict[str, Any] = {
        "stop": [stop] if stop else [],
        "streamed": streamed,
        "ends": ids[-1] == END,
        "top": 1,
    }
    outputs = answered(vocabulary, ids, **given)
    answer, logprobs = told(outputs, streamed=streamed, chat=True)
    entries = [entry for piece in logprobs for entry in piece["content"]]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    # The real vocabulary lacks a few bytes, so that others are left alone.
    assert joined == answer.encode() or ("\ufffd" in answer and shown(joined) == answer)
    assert len(entries) == sum(len(output.outputs[0].token_ids) for output in outputs)
    for entry in entries:
        assert entry["top_logprobs"][0] == {
            key: entry[key] for key in ("token", "logprob", "bytes")
        }

    answer, logprobs = told(
        answered(vocabulary, ids, **given),
        streamed=streamed,
        chat=False,
    )
    offsets = [offset for piece in logprobs for offset in piece["text_offset"]]
    assert offsets == sorted(offsets)
    assert not offsets or (offsets[0], offsets[-1] <= len(answer)) == (0, True)
    if stop is None and ids[-1] != END:
        joined = b"".join(named_bytes(name) for piece in logprobs for name in piece["tokens"])
        # An answer that ends in U+FFFD is taken for one that ends inside a character.
        named, known = shown(joined).rstrip("\ufffd"), answer.rstrip("\ufffd")
        assert named in (known, f" {known}")
