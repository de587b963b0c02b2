"""Loads a tokenizer from the files of a model: tokenizer.json, or the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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

from diptych_frontend.model_files.gguf_header import read_header
from diptych_frontend.model_files.model_source import ModelSource, readable
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import UNREADABLE, InvalidRequestError

TOKEN_TYPE_CONTROL: Final = 3
TOKEN_TYPE_USER_DEFINED: Final = 4

WORD_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The patterns by which Llama 3 and Qwen 2 split words; they differ in how many digits stay
together."""
DIGITS_TOGETHER: Final = {"qwen2": 1, "llama-bpe": 3}


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """Load the model's own tokenizer; None if it has none. It takes about 0.1 s."""
    if source.path is None:
        return None
    with readable(source.path):
        if source.format == "gguf":
            return tokenizer_from_gguf(read_header(source.path).metadata)
        return tokenizer_from_hf(source.path, source.config.eos_token_ids)


def tokenizer_from_hf(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer | None:
    """Load a tokenizer from tokenizer.json and tokenizer_config.json; None without
    tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        # The library raises nothing narrower than Exception.
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as exc:
        raise _refuse(f"{folder / 'tokenizer.json'}: {exc}") from exc
    config = _read_config(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    return Tokenizer(
        backend,
        eos_token_ids=eos_token_ids,
        bos_token=_token_text(config.bos_token),
        eos_token=_token_text(config.eos_token),
        chat_template=_read_template(template)
        if template.is_file()
        else _default_template(config.chat_template),
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise _refuse(f"{path}: {exc}") from exc


class NamedTemplate(msgspec.Struct):
    name: str
    template: str


class SpecialToken(msgspec.Struct):
    content: str


class HFTokenizerConfig(msgspec.Struct):
    """The part of tokenizer_config.json that is used."""

    chat_template: str | list[NamedTemplate] | None = None
    bos_token: str | SpecialToken | None = None
    eos_token: str | SpecialToken | None = None


def _read_config(path: Path) -> HFTokenizerConfig:
    if not path.is_file():
        return HFTokenizerConfig()
    try:
        return msgspec.json.decode(path.read_bytes(), type=HFTokenizerConfig)
    except UNREADABLE as exc:
        raise _refuse(f"{path}: {exc}") from exc


def _token_text(token: str | SpecialToken | None) -> str:
    return token.content if isinstance(token, SpecialToken) else token or ""


def _default_template(template: str | list[NamedTemplate] | None) -> str | None:
    if isinstance(template, list):
        return next((named.template for named in template if named.name == "default"), None)
    return template


class GGUFTokenizer(msgspec.Struct, rename=lambda field: "tokenizer." + field.replace("__", ".")):
    """The metadata that describes a tokenizer; `ggml__tokens` stands for `ggml.tokens`."""

    ggml__model: str
    ggml__tokens: list[str]
    ggml__token_type: list[int] = []
    ggml__merges: list[str] = []
    ggml__pre: str = "default"
    ggml__bos_token_id: int | None = None
    ggml__eos_token_id: int | None = None
    ggml__eot_token_id: int | None = None
    ggml__add_bos_token: bool | None = None
    ggml__add_eos_token: bool = False
    chat_template: str | None = None

    def text_of(self, token_id: int | None) -> str:
        if token_id is None or not 0 <= token_id < len(self.ggml__tokens):
            return ""
        return self.ggml__tokens[token_id]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Load a tokenizer from GGUF metadata; None if the file has no vocabulary.

    Raises `InvalidRequestError` for a tokenizer other than byte-level BPE.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    try:
        keys = msgspec.convert(metadata, GGUFTokenizer)
    except msgspec.ValidationError as exc:
        raise _refuse(f"GGUF metadata: {exc}") from exc
    if keys.ggml__model != "gpt2":
        raise _refuse(
            f"the GGUF file has a {keys.ggml__model!r} tokenizer, which is not byte-level BPE; "
            "use the model's directory with its tokenizer.json"
        )
    ends = dict.fromkeys(
        token for token in (keys.ggml__eos_token_id, keys.ggml__eot_token_id) if token is not None
    )
    return Tokenizer(
        _byte_level_bpe(keys),
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
        raise _refuse(f"the GGUF file's merges do not fit its vocabulary: {exc}") from exc
    backend = Backend(model)
    backend.pre_tokenizer = _pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    for kind, special in ((TOKEN_TYPE_CONTROL, True), (TOKEN_TYPE_USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=special)
                for token, token_type in zip(keys.ggml__tokens, keys.ggml__token_type, strict=False)
                if token_type == kind
            ]
        )
    _add_post_processor(backend, keys)
    return backend


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
            raise _refuse(
                f"the GGUF file's pre-tokenizer {family!r} is not known; "
                "use the model's directory with its tokenizer.json"
            )


def _add_post_processor(backend: Backend, keys: GGUFTokenizer) -> None:
    """Put BOS before and EOS after a text where the model was trained that way."""
    add_bos = keys.ggml__add_bos_token
    if add_bos is None:
        add_bos = keys.ggml__pre == "llama-bpe"
    bos, eos = keys.text_of(keys.ggml__bos_token_id), keys.text_of(keys.ggml__eos_token_id)
    before = [bos] if add_bos and bos else []
    after = [eos] if keys.ggml__add_eos_token and eos else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(text, keys.ggml__tokens.index(text)) for text in {*before, *after}],
        )


def _refuse(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"tokenizer: {message}", param="model")
