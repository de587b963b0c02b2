"""Builds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from diptych_frontend.text.tokenizer import Tokenizer, vocabulary_of
from diptych_protocol import InvalidRequestError

T = TypeVar("T")

TOKEN_TYPE_NORMAL: Final = 1
TOKEN_TYPE_UNKNOWN: Final = 2
TOKEN_TYPE_CONTROL: Final = 3
TOKEN_TYPE_USER_DEFINED: Final = 4
SPACE: Final = "\u2581"
"""How SentencePiece writes a space."""
LONGEST_PIECE: Final = 128
"""The most characters of a token that is merged out of others; real ones have at most 64."""
MAX_MERGES: Final = 1 << 20
"""Each takes half a kilobyte of memory, and a small file may have many; Gemma's has 580 000."""

CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*"
SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_SPLIT: Final = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,%d}}|{SIGNS % ''}|{SPACES}"
)
"""Words of any case; %d is how many digits stay together."""
UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASE_SPLIT: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
    rf"|\p{{N}}{{1,%d}}|{SIGNS % '/'}|{SPACES}"
)
"""Words end where a capital follows a small letter; what follows a word is %s."""


@dataclass(frozen=True, slots=True)
class WordRule:
    """How a text is cut into words before BPE."""

    patterns: tuple[str, ...] = ()
    """Each cuts out what it finds of what those before it left whole."""
    as_gpt2: bool = False
    """What the patterns leave is cut as GPT-2 does."""
    keeps_whole: bool = False
    """A word that is a token is not made out of merges."""
    adds_bos: bool = False
    """Unless the file says otherwise."""
    composes: bool = False
    """Characters are composed (NFC) first."""


_QWEN: Final = WordRule((WORD_SPLIT % 1,))
_LLAMA3: Final = WordRule((WORD_SPLIT % 3,), keeps_whole=True, adds_bos=True)
_DIGITS_APART: Final = WordRule((r"\p{N}",), as_gpt2=True)
WORD_RULES: Final = {
    **dict.fromkeys(("default", "gpt-2", "a.x-4.0", "mellum", "trillion"), WordRule(as_gpt2=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGITS_APART),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), WordRule((WORD_SPLIT % 3,))),
    "qwen2": replace(_QWEN, composes=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), _QWEN),
    "tekken": WordRule((CASE_SPLIT % ("", "", 1),), keeps_whole=True, adds_bos=True),
    "gpt-4o": WordRule((CASE_SPLIT % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", 3),)),
    "seed-coder": WordRule(
        (
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "deepseek-coder": WordRule(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ),
}
"""GGUF's `tokenizer.ggml.pre` -> the rule, for vocabularies of the families that are served."""


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
    tokenizer = Tokenizer(
        _with_special_tokens(build(keys), keys),
        eos_token_ids=tuple(ends),
        bos_token=keys.text_of(keys.ggml__bos_token_id),
        eos_token=keys.text_of(keys.ggml__eos_token_id),
        chat_template=keys.chat_template,
    )
    tokens = keys.ggml__tokens
    if len(set(tokens)) == len(tokens):  # the backend would need ten times as long to tell
        tokenizer.vocabulary = vocabulary_of(len(tokens) - 1, tokens)
    return tokenizer


def _byte_level_bpe(keys: GGUFTokenizer) -> Backend:
    rule = _word_rule(keys.ggml__pre)
    vocabulary = {token: token_id for token_id, token in enumerate(keys.ggml__tokens)}
    parts = (merge.partition(" ") for merge in keys.ggml__merges)
    merges = _within_limit((left, right) for left, _, right in parts)
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.keeps_whole)
    except Exception as exc:
        raise unusable_tokenizer(
            f"the GGUF file's merges do not fit its vocabulary: {exc}"
        ) from exc
    backend = Backend(model)
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in rule.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.as_gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    backend.decoder = decoders.ByteLevel()
    if rule.composes:
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
    merges = _within_limit(
        (score, at, token)
        for token, score, kind in zip(
            keys.ggml__tokens, keys.ggml__scores, keys.ggml__token_type, strict=True
        )
        if kind == TOKEN_TYPE_NORMAL and len(token) <= LONGEST_PIECE
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    )
    merges.sort(reverse=True)
    return [(token[:at], token[at:]) for _, at, token in merges]


def _within_limit(found: Iterable[T]) -> list[T]:
    merges = list(islice(found, MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise unusable_tokenizer(f"the GGUF file's vocabulary has more than {MAX_MERGES} merges")
    return merges


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


def _word_rule(name: str) -> WordRule:
    rule = WORD_RULES.get(name)
    if rule is None:
        raise unusable_tokenizer(
            f"the GGUF file's pre-tokenizer {name!r} is not one of {', '.join(WORD_RULES)}; "
            "use the model's directory with its tokenizer.json"
        )
    return rule


def _add_post_processor(backend: Backend, keys: GGUFTokenizer) -> None:
    """Put BOS before and EOS after a text where the model was trained that way."""
    add_bos = keys.ggml__add_bos_token
    if add_bos is None:
        add_bos = keys.ggml__model == "llama" or _word_rule(keys.ggml__pre).adds_bos
    bos, eos = keys.text_of(keys.ggml__bos_token_id), keys.text_of(keys.ggml__eos_token_id)
    before = [bos] if add_bos and bos else []
    after = [eos] if keys.ggml__add_eos_token and eos else []
    for text in (*before, *after):
        if ":" in text or text.startswith("$"):  # the library's own signs
            raise unusable_tokenizer(f"the GGUF file's token {text!r} cannot be put around a text")
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(text, keys.ggml__tokens.index(text)) for text in {*before, *after}],
        )


def unusable_tokenizer(message: str) -> InvalidRequestError:
    """Return the error of a model whose tokenizer cannot be had."""
    return InvalidRequestError(f"tokenizer: {message}", param="model")
