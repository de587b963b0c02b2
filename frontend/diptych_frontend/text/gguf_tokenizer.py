"""Builds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import InvalidRequestError

TOKEN_TYPE_NORMAL: Final = 1
TOKEN_TYPE_UNKNOWN: Final = 2
TOKEN_TYPE_CONTROL: Final = 3
TOKEN_TYPE_USER_DEFINED: Final = 4
SPACE: Final = "\u2581"
"""How SentencePiece writes a space."""
LONGEST_PIECE: Final = 128
"""The most characters of a token that is merged out of others; real ones have at most 64."""

WORD_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The patterns by which Llama 3 and Qwen 2 split words; they differ in how many digits stay
together."""
DIGITS_TOGETHER: Final = {"qwen2": 1, "llama-bpe": 3}


class GGUFTokenizer(msgspec.Struct, rename=lambda field: "tokenizer." + field.replace("__", ".")):
    """The metadata that describes a tokenizer; `ggml__tokens` stands for `ggml.tokens`."""

    ggml__model: str
    ggml__tokens: list[str]
    ggml__token_type: list[int] = []
    ggml__merges: list[str] = []
    ggml__scores: list[float] = []
    ggml__pre: str = "default"
    ggml__bos_token_id: int | None = None
    ggml__eos_token_id: int | None = None
    ggml__eot_token_id: int | None = None
    ggml__unknown_token_id: int = 0
    ggml__add_space_prefix: bool = True
    ggml__add_bos_token: bool | None = None
    ggml__add_eos_token: bool = False
    chat_template: str | None = None

    def text_of(self, token_id: int | None) -> str:
        if token_id is None or not 0 <= token_id < len(self.ggml__tokens):
            return ""
        return self.ggml__tokens[token_id]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Load a tokenizer from GGUF metadata; None if the file has no vocabulary.

    Raises `InvalidRequestError` for a tokenizer other than byte-level BPE and SentencePiece's BPE.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    try:
        keys = msgspec.convert(metadata, GGUFTokenizer)
    except msgspec.ValidationError as exc:
        raise unusable_tokenizer(f"GGUF metadata: {exc}") from exc
    build = BUILDERS.get(keys.ggml__model)
    if build is None:
        raise unusable_tokenizer(
            f"the GGUF file has a {keys.ggml__model!r} tokenizer, not one of "
            f"{', '.join(BUILDERS)}; use the model's directory with its tokenizer.json"
        )
    ends = dict.fromkeys(
        token for token in (keys.ggml__eos_token_id, keys.ggml__eot_token_id) if token is not None
    )
    return Tokenizer(
        _with_special_tokens(build(keys), keys),
        eos_token_ids=tuple(ends),
        bos_token=keys.text_of(keys.ggml__bos_token_id),
        eos_token=keys.text_of(keys.ggml__eos_token_id),
        chat_template=keys.chat_template,
    )


def _byte_level_bpe(keys: GGUFTokenizer) -> Backend:
    family = keys.ggml__pre
    vocabulary = {token: token_id for token_id, token in enumerate(keys.ggml__tokens)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in keys.ggml__merges)]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family == "llama-bpe")
    except Exception as exc:
        raise unusable_tokenizer(
            f"the GGUF file's merges do not fit its vocabulary: {exc}"
        ) from exc
    backend = Backend(model)
    backend.pre_tokenizer = _pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(keys: GGUFTokenizer) -> Backend:
    """SentencePiece's BPE: spaces are visible, characters that it lacks are bytes, and a text is
    one word. The vocabulary's scores say in which order pieces are merged."""
    vocabulary = {token: token_id for token_id, token in enumerate(keys.ggml__tokens)}
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_by_score(keys, vocabulary),
            unk_token=keys.text_of(keys.ggml__unknown_token_id) or None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    visible: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    readable: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if keys.ggml__add_space_prefix:
        # As llama.cpp does: before the text, and before each part that follows a special token.
        visible.insert(0, normalizers.Prepend(SPACE))
        readable.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(visible)
    backend.decoder = decoders.Sequence(readable)
    return backend


def _merges_by_score(keys: GGUFTokenizer, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token out of two others, the best token first. Of several ways to make
    one, the longest left part is first: SentencePiece takes the leftmost pair."""
    if not len(keys.ggml__scores) == len(keys.ggml__token_type) == len(keys.ggml__tokens):
        raise unusable_tokenizer("the GGUF file's tokens, scores and token types differ in number")
    merges = [
        (score, at, token)
        for token, score, kind in zip(
            keys.ggml__tokens, keys.ggml__scores, keys.ggml__token_type, strict=True
        )
        if kind == TOKEN_TYPE_NORMAL and len(token) <= LONGEST_PIECE
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    merges.sort(reverse=True)
    return [(token[:at], token[at:]) for _, at, token in merges]


def _with_special_tokens(backend: Backend, keys: GGUFTokenizer) -> Backend:
    """Find special tokens in a text before anything else, and add those at its ends."""
    for kind, special in (
        (TOKEN_TYPE_UNKNOWN, True),
        (TOKEN_TYPE_CONTROL, True),
        (TOKEN_TYPE_USER_DEFINED, False),
    ):
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=special)
                for token, token_type in zip(keys.ggml__tokens, keys.ggml__token_type, strict=False)
                if token_type == kind
            ]
        )
    _add_post_processor(backend, keys)
    return backend


BUILDERS: Final = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
"""`tokenizer.ggml.model` -> how such a tokenizer is built."""


def _pre_tokenizer(family: str) -> pre_tokenizers.PreTokenizer:
    """How a text is cut into words before BPE; the names are those of GGUF's `pre`."""
    match family:
        case "gpt-2" | "default":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        case "qwen2" | "llama-bpe":
            pattern = WORD_SPLIT % DIGITS_TOGETHER[family]
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case _:
            raise unusable_tokenizer(
                f"the GGUF file's pre-tokenizer {family!r} is not known; "
                "use the model's directory with its tokenizer.json"
            )


def _add_post_processor(backend: Backend, keys: GGUFTokenizer) -> None:
    """Put BOS before and EOS after a text where the model was trained that way."""
    add_bos = keys.ggml__add_bos_token
    if add_bos is None:
        add_bos = keys.ggml__model == "llama" or keys.ggml__pre == "llama-bpe"
    bos, eos = keys.text_of(keys.ggml__bos_token_id), keys.text_of(keys.ggml__eos_token_id)
    before = [bos] if add_bos and bos else []
    after = [eos] if keys.ggml__add_eos_token and eos else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(text, keys.ggml__tokens.index(text)) for text in {*before, *after}],
        )


def unusable_tokenizer(message: str) -> InvalidRequestError:
    """Return the error of a model whose tokenizer cannot be had."""
    return InvalidRequestError(f"tokenizer: {message}", param="model")
