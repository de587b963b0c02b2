"""The real model with a chat template that has a place for tools, as agents need one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer

TOOLS: Final = """{# Shows no tool_calls, which so small a model would repeat. #}\
{% if tools %}<|im_start|>system
Functions: {{ tools | tojson }}
A call is <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>
{% endif %}"""


def write_calling_model(model: str, path: Path) -> str:
    """Copy a GGUF file, and let its template begin with the tools of a chat. Chats without tools
    stay as they were. Returns the URI of the copy."""
    source = resolve_model(model, weights=False)
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    copying = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"]
    template = ["--chat-template", TOOLS + tokenizer.chat_template]
    subprocess.run([*copying, *template, str(source.path), str(path)], check=True)
    return str(path)
