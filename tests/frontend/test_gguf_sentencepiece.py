"""SentencePiece vocabularies in GGUF files against the `sentencepiece` library."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import pytest
import sentencepiece
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit.texts import TEXTS

from diptych_frontend.text.gguf_tokenizer import tokenizer_from_gguf
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import InvalidRequestError

CONTROL: Final = "<|turn|>"
USER_DEFINED: Final = "<tool>"
CORPUS: Final = [
    line
    for path in sorted(Path(__file__).parent.glob("test_*.py"))[:12]
    for line in path.read_text().splitlines()
    if line
]


def is_plain(text: str) -> bool:
    """Whether it holds nothing that only one side treats as a token of its own: the library finds
    no control tokens in a text, and puts no space after a token that a user defined."""
    return not any(mark in text for mark in (CONTROL, USER_DEFINED, "<s>", "</s>", "<unk>"))


PLAIN: Final = [text for text in TEXTS if is_plain(text)]


def trained(*, prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary like Llama 2's: BPE, bytes for what it lacks, nothing normalised."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, *(text.replace("\0", "") for text in TEXTS if text)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        control_symbols=[CONTROL],
        user_defined_symbols=[USER_DEFINED],
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(spm: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""

    def kind(token_id: int) -> int:
        if spm.IsUnknown(token_id):
            return 2
        if spm.IsControl(token_id):
            return 3
        if spm.IsByte(token_id):
            return 6
        return 4 if spm.IdToPiece(token_id) == USER_DEFINED else 1

    ids = range(spm.GetPieceSize())
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": [spm.IdToPiece(token_id) for token_id in ids],
        "scores": [spm.GetScore(token_id) for token_id in ids],
        "token_type": [kind(token_id) for token_id in ids],
        "unknown_token_id": spm.unk_id(),
        "bos_token_id": spm.bos_id(),
        "eos_token_id": spm.eos_id(),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_a_file_tells_the_same_vocabulary_as_what_is_built_of_it() -> None:
    told = built(trained(prefix=True))
    assert told.vocabulary == Tokenizer(told.backend).vocabulary


def built(spm: sentencepiece.SentencePieceProcessor, **changes: Any) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(metadata_of(spm, **changes))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def spm() -> sentencepiece.SentencePieceProcessor:
    return trained(prefix=True)


@pytest.fixture(scope="module")
def tokenizer(spm: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    return built(spm)


@each("text", PLAIN)
def test_ids_and_text_equal_those_of_the_library(
    spm: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == spm.EncodeAsIds(text)
    assert tokenizer.decode(ids) == spm.DecodeIds(ids) == text
    assert tokenizer.encode(text) == [spm.bos_id(), *ids]


@settings(max_examples=300)
@given(
    text=st.lists(
        st.one_of(
            st.text(
                st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581"), max_size=12
            ),
            st.text(st.characters(max_codepoint=127, min_codepoint=1), max_size=12),
            st.sampled_from([*PLAIN, "  \n ", "     ", " assert x", "<0x41>"]),
        ),
        max_size=4,
    ).map("".join)
)
def test_any_text_is_cut_as_the_library_does_and_comes_back(
    spm: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer, text: str
) -> None:
    text = text.replace("\0", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == spm.EncodeAsIds(text)
    assert tokenizer.decode(ids) == text


def test_without_a_space_before_the_text() -> None:
    spm = trained(prefix=False)
    tokenizer = built(spm, add_space_prefix=False)
    for text in PLAIN:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == spm.EncodeAsIds(text)
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_found_and_a_space_follows_them_as_in_llama_cpp(
    spm: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(
        f"<s>Hello{CONTROL}return x{USER_DEFINED}1</s>", add_special_tokens=False
    )
    assert ids == [
        spm.bos_id(),
        *spm.EncodeAsIds("Hello"),
        spm.PieceToId(CONTROL),
        *spm.EncodeAsIds("return x"),
        spm.PieceToId(USER_DEFINED),
        *spm.EncodeAsIds("1"),
        spm.eos_id(),
    ]
    assert tokenizer.decode(ids) == f"Hello return x{USER_DEFINED} 1"
    assert tokenizer.all_special_ids == {0, 1, 2, spm.PieceToId(CONTROL)}
    assert tokenizer.eos_token_ids == (2,)


def test_bos_and_eos_stand_where_the_file_says(spm: sentencepiece.SentencePieceProcessor) -> None:
    bare = spm.EncodeAsIds("Hello")
    assert built(spm, add_bos_token=False).encode("Hello") == bare
    assert built(spm, add_eos_token=True).encode("Hello") == [1, *bare, 2]


def test_a_chat_is_rendered_and_cut(spm: sentencepiece.SentencePieceProcessor) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    values = metadata_of(spm) | {"tokenizer.chat_template": template}
    tokenizer = tokenizer_from_gguf(values)
    assert tokenizer is not None
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    assert prompt == "<s><|turn|>Hello</s>"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids == [1, spm.PieceToId(CONTROL), *spm.EncodeAsIds("Hello"), 2]


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_lists_that_differ_in_length_are_refused(
    spm: sentencepiece.SentencePieceProcessor, key: str
) -> None:
    with pytest.raises(InvalidRequestError, match="tokens, scores and token types"):
        built(spm, **{key: [1]})


def test_a_small_file_with_millions_of_ways_to_merge_is_refused(
    spm: sentencepiece.SentencePieceProcessor,
) -> None:
    tokens = ["a" * min(length, 128) for length in range(1, 20_000)]
    count = len(tokens)
    with pytest.raises(InvalidRequestError, match="more than 1048576 merges"):
        built(spm, tokens=tokens, scores=[0.0] * count, token_type=[1] * count)
