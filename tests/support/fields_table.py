"""Writes the table of docs/apis.md: the fields of requests that are ignored or refused.

Run `python tests/support/fields_table.py` after changing a request or its `RULES`. The table's own
test fails when it is old.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from diptych_frontend.anthropic.api_types import MessagesRequest
from diptych_frontend.openai.api_types import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    VllmRequest,
)
from diptych_frontend.openai.embeddings import EmbeddingRequest
from diptych_frontend.openai.field_rules import Rules
from diptych_frontend.responses_api.api_types import ResponsesRequest

PAGE = Path(__file__).parents[2] / "docs" / "apis.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->\n"
REQUESTS: Final[Mapping[str, tuple[type[msgspec.Struct], type[msgspec.Struct] | None]]] = {
    "all but embeddings": (VllmRequest, None),
    "chats, completions": (GenerationRequest, VllmRequest),
    "chats": (ChatCompletionRequest, GenerationRequest),
    "completions": (CompletionRequest, GenerationRequest),
    "embeddings": (EmbeddingRequest, None),
    "responses": (ResponsesRequest, VllmRequest),
    "messages": (MessagesRequest, VllmRequest),
}
"""Requests, and the ones whose fields they share."""


def rules_of(kind: type[msgspec.Struct] | None) -> Rules:
    return getattr(kind, "RULES", {})


def known_fields(kind: type[msgspec.Struct]) -> set[str]:
    return {*kind.__struct_fields__, *rules_of(kind)}


def table() -> str:
    rows = [
        "| fields of | no effect | ignored, with a warning | refused |",
        "|---" * 4 + "|",
    ]
    for name, (kind, base) in REQUESTS.items():
        shared = known_fields(base) if base else set()
        rules = {field: rule for field, rule in rules_of(kind).items() if field not in shared}
        cells = [_with_reasons(rules, outcome) for outcome in ("taken", "ignored", "refused")]
        rows.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(rows) + "\n"


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{field}`" for field in fields)


def _with_reasons(rules: Rules, outcome: str) -> str:
    fields = defaultdict[str, list[str]](list)
    for field, rule in rules.items():
        if rule.outcome == outcome:
            fields[rule.why].append(field)
    return "; ".join(f"{_names(names)}: {why}" for why, names in fields.items())


def page() -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
