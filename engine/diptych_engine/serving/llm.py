"""LLM: generates for whole batches of prompts, offline."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import msgspec
from tqdm import tqdm

from diptych_engine.serving.llm_engine import LLMEngine
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_frontend.observability.metric_snapshot import Metric
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.tool_calls.formats import check_takes_tools
from diptych_protocol import (
    ControlCall,
    EngineGenerateError,
    InvalidRequestError,
    PoolingParams,
    PoolingRequestOutput,
    PromptOptions,
    PromptType,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from diptych_protocol.as_sent import params_as_sent
from diptych_protocol.control_calls import BlockingCalls
from diptych_protocol.engine_client import spelled_out

if TYPE_CHECKING:
    from diptych_engine.models import CausalLM

Conversation = list[dict[str, Any]]
T = TypeVar("T")
Params = TypeVar("Params", SamplingParams, PoolingParams)


class LLM(BlockingCalls):
    """A model that answers prompts. Use it in a `with` block, or end it with `shutdown()`.

    Calls of several threads take turns, and so do control calls, such as `sleep`.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        """`engine_args` are the fields of `EngineArgs`.

        Raises `InvalidRequestError` for a configuration or a model that cannot work, `TypeError`
        for a field that does not exist.
        """
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model, **engine_args))
        self._ids = itertools.count()
        self._turn = threading.Lock()

    @spelled_out(PromptOptions)
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[RequestOutput]:
        """Return answers to the prompts, in their order.

        A list of integers is one prompt of token ids. The parameters are for all prompts, or one
        for each. `use_tqdm` shows a progress bar; None shows it on a terminal. The options are for
        all prompts.

        An answer that failed in the engine has the finish reason "error". Raises
        `InvalidRequestError` for a prompt or a parameter that can never succeed.
        """
        each = _as_list(prompts)
        params = _one_each(sampling_params, SamplingParams, len(each))
        whole = [
            msgspec.structs.replace(one, output_kind=RequestOutputKind.FINAL_ONLY) for one in params
        ]
        return cast(list[RequestOutput], self._run(each, whole, use_tqdm, options))

    @spelled_out(PromptOptions)
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[RequestOutput]:
        """Return answers to one conversation or several; otherwise as `generate`.

        continue_final_message: go on with the last message, the assistant's.

        tools: what the chat template shows the model. Calls stay in the text. Refused for a
        template that would not show them.

        chat_template_kwargs: further variables of the model's chat template.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError("messages must be a list that is not empty", param="messages")
        several = cast(
            Sequence[Conversation], [messages] if isinstance(messages[0], dict) else messages
        )
        renderer = self.llm_engine.renderer
        if tools:
            check_takes_tools(renderer.chat_template, "this model", "leave tools out")
        prompts = [
            renderer.render_chat(
                one,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for one in several
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **options)

    @spelled_out(PromptOptions)
    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[PoolingRequestOutput]:
        """Return a vector for each prompt; otherwise as `generate`.

        Raises `EngineGenerateError` if one of them failed in the engine.
        """
        each = _as_list(prompts)
        params = _one_each(pooling_params, PoolingParams, len(each))
        vectors: list[PoolingRequestOutput] = []
        for output in self._run(each, params, use_tqdm, options):
            if isinstance(output, RequestOutput):
                raise EngineGenerateError(str(output.outputs[0].stop_reason))
            vectors.append(output)
        return vectors

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidRequestError` if there is none."""
        return self.llm_engine.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Return the present values of all metrics. Raises `UnsupportedFeatureError` without
        `log_stats`."""
        return self.llm_engine.get_metrics()

    def control(self, call: ControlCall[Any]) -> Any:
        with self._turn:
            return self.llm_engine.control(call)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method or a function of every worker, as `LLMEngine.collective_rpc`."""
        with self._turn:
            return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[CausalLM], T]) -> list[T]:
        """Call a function with every worker's model, as `LLMEngine.apply_model`."""
        with self._turn:
            return self.llm_engine.apply_model(func)

    def _run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: bool | None,
        options: PromptOptions,
    ) -> list[RequestOutput | PoolingRequestOutput]:
        """Keep the engine filled, but not over, until every prompt has its answer."""
        engine = self.llm_engine
        room = engine.vllm_config.max_num_waiting
        ids = [str(next(self._ids)) for _ in prompts]
        answers: dict[str, RequestOutput | PoolingRequestOutput] = {}
        own = {*ids}
        to_send = list(zip(ids, prompts, params, strict=True))[::-1]
        shown = sys.stderr.isatty() if use_tqdm is None else use_tqdm
        with self._own_turn(ids), tqdm(total=len(ids), desc="prompts", disable=not shown) as bar:
            while len(answers) < len(ids):
                while to_send and self._open_with(to_send[-1][2]) <= room:
                    request_id, prompt, wanted = to_send.pop()
                    engine.add_request(request_id, prompt, wanted, **options)
                for output in engine.step():
                    if output.finished and output.request_id in own:
                        answers[output.request_id] = output
                        bar.update()
        return [answers[request_id] for request_id in ids]

    @contextlib.contextmanager
    def _own_turn(self, ids: Sequence[str]) -> Iterator[None]:
        """What is left of the requests of a call ends with it."""
        engine = self.llm_engine
        with self._turn:
            if ids and engine.is_paused():  # nobody could end that meanwhile
                raise InvalidRequestError(
                    "the engine is asleep or paused: call wake_up() or resume_generation() first",
                    status=409,
                )
            try:
                yield
            finally:
                engine.abort_request(ids)

    def _open_with(self, params: SamplingParams | PoolingParams) -> int:
        """Sequences in the engine if a request with these parameters came to them."""
        n = params.n if isinstance(params, SamplingParams) else 1
        open_now = self.llm_engine.get_num_unfinished_requests()
        return open_now + n if open_now else 1  # alone, any request may try

    def shutdown(self) -> None:
        """Release the model's memory. Safe to call twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """A text, a dict or a list of integers is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}",
            param="prompts",
        )
    several = list(prompts)
    if several and isinstance(several[0], int):
        return [cast(list[int], several)]
    return cast(list[PromptType], several)


def _one_each(
    params: Params | Sequence[Params] | None, kind: type[Params], count: int
) -> list[Params]:
    """Parameters for each of the prompts, with the types that they declare."""
    if not isinstance(params, (list, tuple)):
        return [params_as_sent(kind() if params is None else params, kind)] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sets of parameters for {count} prompts")
    return [params_as_sent(one, kind) for one in params]
