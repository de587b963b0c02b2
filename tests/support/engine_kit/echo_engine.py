"""A small engine that really tokenises, generates, stops and aborts.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np

from diptych_protocol import (
    Array,
    CompletionOutput,
    InvalidRequestError,
    JsonSchemas,
    Logprob,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    TokensPrompt,
    WithoutControl,
)

EOS = 256
"""Ids 0 to 255 are bytes."""


class ByteRenderer:
    chat_template: str | None = None

    def of(self, *asker: str | None) -> ByteRenderer:
        return self

    def render_prompt(self, prompt: Any) -> TokensPrompt:
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        if not all(0 <= i <= EOS for i in ids):
            raise InvalidRequestError("a token id is outside the vocabulary")
        return {"prompt_token_ids": ids}

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> TokensPrompt:
        if not all(isinstance(m["content"], str) for m in messages):
            raise InvalidRequestError("this model takes only text parts")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        if continue_final_message:
            return self.render_prompt(text.removesuffix("\n"))
        return self.render_prompt(text + ("assistant: " if add_generation_prompt else ""))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.render_prompt(text)["prompt_token_ids"]) + [EOS] * add_special_tokens

    def token_names(self, token_ids: list[int]) -> list[str]:
        return [f"<{token}>" for token in token_ids]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in token_ids if i < EOS).decode("utf-8", "replace")


class EchoEngine(WithoutControl):
    """Answers with the prompt over and over, the n-th choice starting n tokens in.

    `gate` holds every token back while it is cleared; `refusal` is raised at admission and
    `failure` after the first token. What the server asks of it is kept for the test to see.
    """

    def __init__(self) -> None:
        self.renderer = ByteRenderer()
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: Exception | None = None
        self.failure: Exception | str | None = None
        self.illness: Exception | None = None
        self.facts: dict[str, Any] = {}
        self.answer_kv_params: dict[str, Any] | None = None
        self.seen: list[tuple[str, SamplingParams, int, Any]] = []
        self.encoded: list[tuple[str, int, Any]] = []
        self.running: set[str] = set()
        self.kept: list[int] = []
        """For how many seconds each request expects a next turn."""
        self.sessions: list[str] = []
        self.prefetches: list[bool] = []
        self.left_early: list[str] = []
        self.rejected: list[tuple[str, dict[str, Any]]] = []

    model_name = "echo"
    model_config = SimpleNamespace(vocab_size=EOS + 1)
    reasoning_parser = "none"
    tool_call_parser = "auto"
    json_schemas: JsonSchemas = "exact"
    max_model_len = 2048
    is_running = True
    is_stopped = errored = False
    dead_error = RuntimeError("alive")

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        pin_s: int = 0,
        session: str = "",
        prefetches: bool = False,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.prefetches.append(prefetches)
        self.kept.append(pin_s)
        self.sessions.append(session)
        self.seen.append((request_id, sampling_params, priority, prompt))
        if self.refusal is not None:
            raise self.refusal
        self.running.add(request_id)
        finished = False
        try:
            async for output in self._outputs(prompt["prompt_token_ids"], sampling_params):
                finished = output.finished
                output.request_id = request_id
                yield output
        except Exception:
            finished = True
            raise
        finally:
            self.running.discard(request_id)
            if not finished:
                self.left_early.append(request_id)

    async def _outputs(
        self, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        sequences = [Sequence(self.renderer, prompt, params, i) for i in range(params.n)]  # type: ignore[arg-type]
        delta = params.output_kind is RequestOutputKind.DELTA
        steps = 0
        while not all(s.finish_reason for s in sequences):
            await self.gate.wait()
            await asyncio.sleep(0)
            if steps == 1 and isinstance(self.failure, Exception):
                raise self.failure
            live = [s for s in sequences if s.finish_reason is None]
            for sequence in live:
                sequence.step()
                if steps == 1 and isinstance(self.failure, str):
                    sequence.finish_reason = self.failure
                elif steps + 1 >= self.max_model_len - len(prompt):
                    sequence.finish_reason = sequence.finish_reason or "length"
            steps += 1
            finished = all(s.finish_reason for s in sequences)
            if delta or finished:
                shown = live if delta else sequences
                yield RequestOutput(
                    request_id="",
                    prompt=None,
                    prompt_token_ids=prompt,
                    outputs=[s.output(delta) for s in shown],
                    finished=finished,
                    num_cached_tokens=len(prompt) // 2,
                    kv_transfer_params=self.answer_kv_params if finished else None,
                    metrics=self.facts,
                )

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
        *,
        tenant: str = "",
        kept_as: str = "",
        kept: Any = None,
        pin_s: int = 0,
        session: str = "",
        prefetches: bool = False,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """How often each byte is in the prompt, as a vector of length 1."""
        self.encoded.append((request_id, priority, prompt))
        if self.refusal is not None:
            raise self.refusal
        ids = prompt["prompt_token_ids"]
        counts = np.bincount(ids, minlength=EOS + 1).astype(np.float32)
        counts /= np.linalg.norm(counts)
        data = Array("float32", counts.shape, counts.tobytes())
        yield PoolingRequestOutput(request_id, PoolingOutput(data), ids, finished=True)

    async def abort(self, request_id: Any) -> None:
        return None

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        self.rejected.append((request_id, kv_transfer_params))

    async def check_health(self) -> None:
        if self.illness is not None:
            raise self.illness

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        return None

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        return None

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        return {"engine-0": SchedulerStats(num_running=3, blocks_total=10, blocks_free=4, steps=7)}


class Sequence:
    """One choice of a request as it grows."""

    def __init__(
        self, renderer: ByteRenderer, prompt: list[int], params: SamplingParams, index: int
    ) -> None:
        self._renderer = renderer
        self._source = prompt[index % len(prompt) :] + prompt[: index % len(prompt)]
        self._params = params
        self._index = index
        self._ids: list[int] = []
        self._shown_ids = 0
        self._shown_chars = 0
        self._text = ""
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def step(self) -> None:
        params = self._params
        token = self._source[len(self._ids) % len(self._source)]
        self._ids.append(token)
        self._text = self._renderer.decode(self._ids)
        if token in params.stop_token_ids:
            self.finish_reason, self._stop_reason = "stop", token
        for stop in params.stop:
            at = self._text.find(stop)
            if at >= 0:
                end = at + len(stop) if params.include_stop_str_in_output else at
                self._text = self._text[:end]
                self.finish_reason, self._stop_reason = "stop", stop
        if token == EOS and not params.ignore_eos:
            self.finish_reason = "stop"
        elif self.finish_reason is None and len(self._ids) == (params.max_tokens or 100):
            self.finish_reason = "length"

    def output(self, delta: bool) -> CompletionOutput:
        ids, text = self._ids, self._text
        if delta:
            # What may still turn out to be the beginning of a stop string is held back.
            held = (
                0 if self.finish_reason else max((len(s) - 1 for s in self._params.stop), default=0)
            )
            end = max(self._shown_chars, len(text) - held)
            ids, text = ids[self._shown_ids :], text[self._shown_chars : end]
            self._shown_ids, self._shown_chars = len(self._ids), end
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=ids,
            logprobs=None if self._params.logprobs is None else [self._logprobs(i) for i in ids],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            text_ends=None if self._params.logprobs is None else self._ends(len(ids)),
        )

    def _ends(self, count: int) -> list[int]:
        """How long the text was after each of the last tokens."""
        numbers = range(len(self._ids) - count + 1, len(self._ids) + 1)
        return [len(self._renderer.decode(self._ids[:number])) for number in numbers]

    def _logprobs(self, token: int) -> dict[int, Logprob]:
        """The sampled token, said to be the second likeliest, and the likeliest others."""
        found = {token: self._candidate(token, -1.0, 2)}
        for rank in range(1, (self._params.logprobs or 0) + 1):
            other = (token + rank) % 128
            if rank == 2:
                continue
            value = -0.5 if rank == 1 else float("-inf")
            found[other] = self._candidate(other, value, rank)
        return found

    def _candidate(self, token: int, value: float, rank: int) -> Logprob:
        text = self._renderer.decode([token])
        return Logprob(value, rank, text, text.encode())
