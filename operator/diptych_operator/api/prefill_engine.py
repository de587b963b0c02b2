"""`spec.prefill.engine`: in what prefill pods may differ from decode pods, where both run vLLM.

What decides how KV lies in memory must be equal, so it cannot be given here. What is given comes
after `spec.engine.args`, and vLLM takes the last of an argument that is there twice.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from diptych_operator.api.base import SpecPart, ruled
from diptych_operator.api.vllm_arguments import (
    ARGUMENT_RULES,
    EQUAL_IN_BOTH,
    OFFLOADING,
    Argument,
)
from diptych_protocol.engine_settings import MAX_RANKS


class PrefillEngine(SpecPart, frozen=True):
    image: Annotated[
        str,
        Meta(
            pattern=r"^\S*$",
            max_length=512,
            title="an image reference",
            description="Container image of prefill pods, such as one for other processors; left "
            "out, spec.engine.image. It must be the same build of vLLM: only the engines' own "
            "handshake can tell.",
        ),
    ] = ""
    args: Annotated[
        list[Argument],
        Meta(
            max_length=64,
            title="a list of arguments",
            description="Arguments of `vllm serve` for prefill pods; they come after "
            "spec.engine.args, and the last of the same name counts. Those on which KV depends "
            "are refused.",
            **ruled(*ARGUMENT_RULES, *EQUAL_IN_BOTH, OFFLOADING),
        ),
    ] = []
    tensor_parallel_size: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_RANKS,
                description="Ranks of each prefill engine; left out, as many as decode engines "
                "have (spec.engine.tensorParallelSize). With the connector nixl those are a "
                "multiple of it.",
            ),
        ]
        | None
    ) = None
