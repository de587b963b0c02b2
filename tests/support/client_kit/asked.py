"""What agents are asked in the scripts of clients, in whose environments these run."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

WILL_IT_RAIN: Final = "Will it rain?"
OF_PARIS: Final = "What is the weather in Paris?"


class Rain(BaseModel):
    """Whether it rains."""

    model_config = ConfigDict(extra="forbid")
    rain: bool


def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."
