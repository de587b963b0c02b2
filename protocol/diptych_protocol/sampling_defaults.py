"""How a model wants its tokens to be sampled, where a request does not say."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Values for the fields of the same names that a request leaves out. None: nothing is said."""

    temperature: (
        Annotated[float, Meta(ge=0, le=100, description="0 takes the likeliest token each time.")]
        | None
    ) = None
    top_p: (
        Annotated[
            float,
            Meta(
                ge=0.001,
                le=1,
                description="Of the likeliest tokens as many as have this probability.",
            ),
        ]
        | None
    ) = None
    top_k: (
        Annotated[
            int,
            Meta(ge=0, le=2**31 - 1, description="So many of the likeliest tokens; 0: all."),
        ]
        | None
    ) = None
    min_p: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="Tokens whose probability is at least this part of the likeliest's.",
            ),
        ]
        | None
    ) = None
    repetition_penalty: (
        Annotated[
            float,
            Meta(
                ge=0.01,
                le=100,
                description="Above 1, tokens that were there before become less likely.",
            ),
        ]
        | None
    ) = None

    def over(self, others: SamplingDefaults) -> SamplingDefaults:
        """These, and the others' where these say nothing."""
        said = {name: getattr(self, name) for name in self.__struct_fields__}
        chosen = {name: value for name, value in said.items() if value is not None}
        return msgspec.structs.replace(others, **chosen)


UNSAID: Final = SamplingDefaults()
"""The whole distribution of the model, as OpenAI's API has it."""
