"""A request for several answers to one prompt, and the core's requests for each of them."""

from __future__ import annotations

import msgspec

from diptych_frontend.text.logprobs import PromptLogprobs
from diptych_protocol import CompletionOutput, EngineCoreRequest


class ParentRequest:
    """A request for n > 1 answers. It makes its children, and knows when all of them have ended."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.open_children: set[str] = set()
        self.prompt_logprobs: PromptLogprobs | None = None
        """Log-probabilities of the prompt, from the first child, which alone asks for them."""
        self.num_cached_tokens: int | None = None
        """Number of cached prompt tokens, as reported for the child whose output came first: the
        other children find in the cache what that one computed."""
        self._unfinished = request.sampling.n
        self._answers: list[CompletionOutput] = []

    def child(self, index: int) -> EngineCoreRequest:
        """Return the request for one answer; with a seed, answer i has that seed plus i."""
        params = self.request.sampling
        seed = None if params.seed is None else _wrap_int64(params.seed + index)
        return msgspec.structs.replace(
            self.request,
            request_id=f"{index}_{self.request.request_id}",
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=seed,
                # One of them suffices: the prompt is the same, and cannot come from the cache.
                prompt_logprobs=None if index else params.prompt_logprobs,
            ),
        )

    def finish_child(self) -> bool:
        """Count a finished child; True for the last one."""
        self._unfinished -= 1
        return self._unfinished == 0

    def gather(self, answer: CompletionOutput) -> list[CompletionOutput]:
        """Add a final answer, and return all of them so far, in the order of their indices."""
        self._answers.append(answer)
        return sorted(self._answers, key=lambda known: known.index)


def fan_out(request: EngineCoreRequest) -> tuple[ParentRequest | None, list[EngineCoreRequest]]:
    """Return the core's requests: the request itself, or a parent's n children."""
    if request.sampling_params is None or request.sampling_params.n == 1:
        return None, [request]
    parent = ParentRequest(request)
    return parent, [parent.child(index) for index in range(request.sampling_params.n)]


def _wrap_int64(value: int) -> int:
    """Seeds are 64-bit integers: after the largest comes the smallest."""
    return (value + 2**63) % 2**64 - 2**63
