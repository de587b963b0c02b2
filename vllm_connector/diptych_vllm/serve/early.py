"""Fetches prompts for a decode engine while a prefill engine still computes them.

vLLM is asked for one token after such a prompt, which nobody gets, and so has its KV in its prefix
cache when the request comes. Whatever goes wrong meanwhile costs nobody anything: the request then
fetches the KV with the reference of prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_protocol import EngineCoreRequest, SamplingParams
from diptych_protocol.kv_transfer_params import PARAM

Key = tuple[bytes, str]
"""A client, and the id of the request that it will send."""


def early_id(request_id: str) -> str:
    """Return the id under which vLLM fetches the prompt of a request."""
    return f"{request_id}/early"


@dataclass(frozen=True, slots=True)
class EarlyPrompt:
    """A prompt that is being fetched or was fetched."""

    num_blocks: int
    """The number of blocks that it occupies here."""
    fetched: asyncio.Task[int | None]
    """How many of its tokens have KV that came from elsewhere; None if it was not fetched."""


class EarlyPrompts:
    """The early prompts of one engine whose requests have not come yet."""

    def __init__(
        self,
        fetch: Callable[[EngineCoreRequest], Awaitable[int | None]],
        announced_from: int | None,
        block_size: int,
        num_free: Callable[[], int],
    ) -> None:
        """
        Args:
            fetch: runs a request to its end, and returns what `EarlyPrompt.fetched` says.
            announced_from: shorter prompts are computed in one step, so it would bring nothing.
                None: it never does.
            num_free: how many blocks are free now.
        """
        self._fetch, self._announced_from = fetch, announced_from
        self._block_size, self._num_free = block_size, num_free
        self._prompts: dict[Key, EarlyPrompt] = {}

    def announced(self, client: bytes, request: EngineCoreRequest, asked: dict[str, Any]) -> None:
        """Fetch a prompt that another engine computes now, if that brings its request on.

        It takes blocks, so all of them together have half of the free ones.
        """
        num_tokens = asked.get("remote_num_tokens")
        if self._announced_from is None or not isinstance(num_tokens, int):
            return
        if num_tokens < self._announced_from or (client, request.request_id) in self._prompts:
            return
        num_blocks = -(-num_tokens // self._block_size)
        taken = sum(prompt.num_blocks for prompt in self._prompts.values())
        if taken + num_blocks > self._num_free() // 2:
            return
        task = asyncio.ensure_future(self._fetch(_first_token_of(request, asked)))
        self._prompts[client, request.request_id] = EarlyPrompt(num_blocks, task)

    async def take(self, key: Key) -> int | None:
        """Return how many tokens of the prompt were fetched, once its fetch has ended; None if its
        KV is not here."""
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return None
        try:
            return await prompt.fetched
        finally:
            prompt.fetched.cancel()

    def drop(self, key: Key) -> None:
        """Give up a prompt whose request will not come."""
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            prompt.fetched.cancel()

    def drop_of(self, client: bytes) -> None:
        """Give up the prompts of a client that is gone."""
        for key in [key for key in self._prompts if key[0] == client]:
            self.drop(key)


def _first_token_of(request: EngineCoreRequest, asked: dict[str, Any]) -> EngineCoreRequest:
    """Return a request for one token, under its own id, for which vLLM fetches this prompt's KV."""
    known = request.generated_token_ids or ()
    params = SamplingParams(
        temperature=0.0, max_tokens=len(known) + 1, ignore_eos=True, extra_args={PARAM: asked}
    )
    return msgspec.structs.replace(
        request, request_id=early_id(request.request_id), sampling_params=params, trace_headers=None
    )
