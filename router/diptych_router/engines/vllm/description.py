"""Who a vLLM server is, from what it says of itself. Pure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import msgspec

from diptych_protocol import UNREADABLE, EngineDescription, UtilityError
from diptych_protocol.config import SERVED_REVISION
from diptych_protocol.wire import Abilities
from diptych_router.engines.vllm.messages import GENERATE
from diptych_router.engines.vllm.metrics import ServerFigures

_EXISTS: Final = 405
"""The answer to GET where only POST is served."""
ABILITIES: Final = Abilities(
    tells_received=False,
    prompt_embeds=False,
    images=False,
    adapters=False,
    prompt_logprobs=False,
    logits_processors=False,
)
"""What the endpoint takes."""
MAX_MODEL_LEN: Final = 1 << 24


class UnfitServerError(UtilityError):
    """A server answers that cannot serve here; says what to change."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router serves, so what its engines must."""

    name: str
    vocab_size: int


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


def check_generate(status: int) -> None:
    """Raise `UnfitServerError` unless a GET of the endpoint says that it is served."""
    if status != _EXISTS:
        raise UnfitServerError(
            f"{GENERATE} is not served (status {status}): vLLM 0.32 or newer serves it if it is "
            "started with --enable-scale-out"
        )


def description_of(
    models: bytes, version: bytes, figures: ServerFigures, served: ServedModel, address: str
) -> EngineDescription:
    """From the bodies of `/v1/models` and `/version`. Raises `UnfitServerError`."""
    try:
        listed = msgspec.json.decode(models, type=_Models).data
        release = msgspec.json.decode(version, type=_Version).version
    except UNREADABLE as exc:
        raise UnfitServerError(f"it does not speak as vLLM does: {exc}") from exc
    mine = next((model for model in listed if model.id == served.name), None)
    if mine is None:
        names = ", ".join(model.id for model in listed[:8])
        raise UnfitServerError(
            f"it serves {names or 'no model'}, and not {served.name}: name that first in its "
            "--served-model-name"
        )
    if mine.max_model_len is None or not 1 < mine.max_model_len <= MAX_MODEL_LEN:
        raise UnfitServerError(f"it says that max_model_len is {mine.max_model_len}")
    revision = next(
        (m.id.removeprefix(SERVED_REVISION) for m in listed if m.id.startswith(SERVED_REVISION)), ""
    )
    model = mine.root or mine.id
    return EngineDescription(
        engine_id=address,
        epoch=secrets.token_hex(8),  # whoever answers after a loss counts as somebody else
        model=model,
        max_model_len=mine.max_model_len,
        vocab_size=served.vocab_size,
        block_size=figures.block_size,
        num_blocks=figures.num_blocks,
        dtype="",
        compat={"runtime": "vllm", "version": release, "model": model, "revision": revision},
        max_num_seqs=0,
        pid=0,
        revision=revision,
        runtime="vllm",
        abilities=ABILITIES,
    )
