"""Loads a tokenizer from the files of a model: tokenizer.json, or the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tokenizers import Tokenizer as Backend

from diptych_frontend.model_files.model_source import ModelSource, readable
from diptych_frontend.text.gguf_tokenizer import tokenizer_from_gguf, unusable_tokenizer
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import UNREADABLE


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """Load the model's own tokenizer; None if it has none. It takes about 0.1 s."""
    if source.path is None:
        return None
    with readable(source.path):
        if source.format == "gguf":
            return tokenizer_from_gguf(source.metadata(source.path))
        return tokenizer_from_hf(source.path, source.config.eos_token_ids)


def tokenizer_from_hf(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer | None:
    """Load a tokenizer from its two JSON files; None without tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        # The library raises nothing narrower than Exception.
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as exc:
        raise unusable_tokenizer(f"{folder / 'tokenizer.json'}: {exc}") from exc
    config = _read_config(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    return Tokenizer(
        backend,
        eos_token_ids=eos_token_ids,
        bos_token=_token_text(config.bos_token),
        eos_token=_token_text(config.eos_token),
        chat_template=_read_template(template)
        if template.is_file()
        else _only_template(config.chat_template),
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise unusable_tokenizer(f"{path}: {exc}") from exc


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
        raise unusable_tokenizer(f"{path}: {exc}") from exc


def _token_text(token: str | SpecialToken | None) -> str:
    return token.content if isinstance(token, SpecialToken) else token or ""


def _only_template(template: str | list[NamedTemplate] | None) -> str | None:
    """Return the default template, or one that chooses between it and that for tools."""
    if not isinstance(template, list):
        return template
    # Each has lines of its own, without the last line break, as when Jinja loads it alone.
    named = {each.name: each.template.removesuffix("\n").removesuffix("\r") for each in template}
    default, with_tools = named.get("default"), named.get("tool_use")
    if default is None or with_tools is None:
        return default
    return f"{{% if tools %}}\n{with_tools}{{%+ else %}}\n{default}{{%+ endif %}}"
