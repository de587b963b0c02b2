"""A model's tokenizer as the files that benchmark clients read."""

from __future__ import annotations

import json
from pathlib import Path

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer


def write_tokenizer(model: str, folder: Path) -> None:
    """The tokenizer of a GGUF file in Hugging Face's form. The clients tell models apart by a
    config.json, and read nothing else of it."""
    tokenizer = load_tokenizer(resolve_model(model, weights=False))
    assert tokenizer is not None
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    [eos, *_] = tokenizer.token_names(tokenizer.eos_token_ids)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": eos,
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
