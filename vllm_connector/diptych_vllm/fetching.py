"""The decode engine's part of the scheduler half: prompts that other engines have computed.

    arrived ──▶ HELD ──blocks allocated──▶ LOADING ──worker reports it received──▶ DONE
       │          └──no tokens to load, or finished: the lease is given back──▶ DONE
       └────▶ REFUSED ──blocks allocated──▶ LOADING, as a load that fails

A reference is for the first tokens of a prompt, or for all. vLLM computes the others here.

An *announcement* comes before the prefill engine has answered, and names a lease that it will
promise. Its signature proves only which engine owns the lease, but not which lease it is. That is
enough, because the prefill engine lends only for the digest of the tokens, which is computed here,
and confirms it. Until then the lease does not belong to this engine: if the fetch fails, or the
request ends, the lease stays for the request that comes with the reference.

A request with an invalid reference must fail, instead of being computed as if it had none. vLLM
fails a request only through a load, so the worker reports a load that was never begun.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field

from diptych_kv_transfer.parameters import lease_of
from diptych_kv_transfer.signing.references import References, UnprovenReferenceError
from diptych_protocol import InvalidRequestError, KVTransferParams
from diptych_vllm.kv_groups import BlockIds, VllmKVGroups
from diptych_vllm.orders import Cancel, Fail, Fetch, Hold, Order, Release, Revoke
from diptych_vllm.request import Arrival

log = logging.getLogger(__name__)

LACKS_A_TOKEN = (
    "its prompt is computed here, because the prefill engine has dropped a token to which the last "
    "one attends; send its token with the prompt, and nothing is computed twice"
)


class State(enum.Enum):
    HELD = "held"
    REFUSED = "refused"
    LOADING = "loading"
    DONE = "done"


@dataclass(slots=True)
class Fetched:
    """A request with a reference."""

    load: str
    """The name of its load, which is unique."""
    num_tokens: int
    """How many tokens of its prompt, from the first one on, come from another engine or not at all:
    those of the reference or, if it is invalid, all."""
    state: State
    params: KVTransferParams | None
    """None if they could not be parsed."""
    digest: str = ""
    """The digest of the tokens that the lease is for."""
    offered_from: int = 0
    """How many tokens of the prompt were here at vLLM's last question how many are elsewhere."""


@dataclass(slots=True)
class Fetching:
    """The requests with references that vLLM knows, by their ids."""

    references: References
    groups: VllmKVGroups
    lease_seconds: float
    _requests: dict[str, Fetched] = field(default_factory=dict)
    _awaited: set[str] = field(default_factory=set)
    """Requests whose loads the worker has to report: until then vLLM keeps their blocks."""
    _num_loads: int = 0
    num_refused: int = 0
    """Requests with references that they must not use."""

    def __len__(self) -> int:
        return len(self._requests) + len(self._awaited)

    def arrived(self, request: Arrival, params: KVTransferParams) -> list[Order]:
        """Check a reference, and keep its lease alive if it is valid."""
        num_tokens = params.remote_num_tokens or 0
        digest = request.digest_of_first(num_tokens)
        try:
            self._check(request, params, digest)
        except UnprovenReferenceError as exc:
            self.refused(request, str(exc), params)
            return []
        announced, lease = is_announcement(params), lease_of(params, self.lease_seconds)
        if not announced:
            self.references.take(params)
        if num_tokens == request.num_tokens and not self.groups.serves_last(num_tokens):
            log.info("request %s: %s", request.request_id, LACKS_A_TOKEN)
            return [] if announced else [Release(lease)]
        fetched = self._enter(request, State.HELD, params, num_tokens, digest)
        return [] if announced else [Hold(fetched.load, lease)]

    def _check(self, request: Arrival, params: KVTransferParams, digest: str) -> None:
        if not is_announcement(params):
            self.references.check_use(params, digest)
            return
        self.references.check_engine(params)
        if (params.remote_num_tokens or 0) > request.num_tokens:
            raise UnprovenReferenceError("more tokens are announced than the prompt has")

    def refused(self, request: Arrival, reason: str, params: KVTransferParams | None) -> None:
        """Record a request with a reference that it must not use."""
        self._enter(request, State.REFUSED, params, request.num_tokens)
        self.num_refused += 1
        log.warning("request %s: its KV is not fetched: %s", request.request_id, reason)

    def _enter(
        self,
        request: Arrival,
        state: State,
        params: KVTransferParams | None,
        num_tokens: int,
        digest: str = "",
    ) -> Fetched:
        self._num_loads += 1
        load = f"{request.request_id}/{self._num_loads}"
        fetched = Fetched(load, num_tokens, state, params, digest)
        self._requests[request.request_id] = fetched
        return fetched

    def num_elsewhere(self, request_id: str, num_here: int) -> int:
        """Return how many tokens can be loaded after the first `num_here` ones."""
        fetched = self._requests.get(request_id)
        if fetched is None or fetched.state not in (State.HELD, State.REFUSED):
            return 0
        fetched.offered_from = num_here
        return max(0, fetched.num_tokens - num_here)

    def allocated(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> list[Order]:
        """Record that vLLM has allocated blocks to a request, which waits for a load of
        `num_tokens` tokens, or for none.

        block_ids: all blocks of the request.
        """
        fetched = self._requests.get(request_id)
        if fetched is None or fetched.state in (State.LOADING, State.DONE):
            return []
        state = fetched.state
        if not num_tokens:
            fetched.state = State.DONE
            log.info("request %s: its prompt is computed here after all", request_id)
            return self._not_wanted(fetched) if state is State.HELD else []
        fetched.state = State.LOADING
        self._awaited.add(request_id)
        if state is State.REFUSED or fetched.params is None:
            return [Fail(request_id)]
        wanted = self.groups.wanted(fetched.num_tokens, fetched.offered_from, block_ids)
        if wanted is None or fetched.offered_from + num_tokens != fetched.num_tokens:
            log.error("request %s: vLLM asks for a part of its KV that is not whole", request_id)
            return [Cancel(fetched.load), Fail(request_id)]
        early = is_announcement(fetched.params)
        if early:
            log.info("request %s: fetches its KV before prefill has answered", request_id)
        return [
            Fetch(
                fetched.load,
                request_id,
                lease_of(fetched.params, self.lease_seconds),
                fetched.digest,
                wanted,
                fetched.num_tokens,
                early,
            )
        ]

    def _not_wanted(self, fetched: Fetched) -> list[Order]:
        """All of a prompt is here, so nobody will read the lease."""
        if fetched.params is not None and is_announcement(fetched.params):
            return [Release(lease_of(fetched.params, self.lease_seconds))]
        return [Cancel(fetched.load)]

    def finished(self, request_id: str) -> list[Order]:
        """Record that a request has finished, for any reason."""
        fetched = self._requests.pop(request_id, None)
        if fetched is None or fetched.state in (State.REFUSED, State.DONE):
            return []
        return [Cancel(fetched.load)]

    def rejected(self, request: Arrival, engine_id: str) -> list[Order]:
        """Release a lease that nobody wants, by news of a lost request. `engine_id` is our own.

        Repeating it is harmless. If a request has arrived with the lease's reference, that request
        owns the lease.
        """
        try:
            params = KVTransferParams.naming_lease(request.params)
            self.references.check_lease(params)
        except InvalidRequestError as exc:
            log.info("request %s: nothing to release: %s", request.request_id, exc)
            return []
        if self.references.is_taken(params):
            return []
        log.info("request %s was rejected; its lease is released", request.request_id)
        if params.remote_engine_id == engine_id:
            return [Revoke(params.lease_id or "")]
        return [Release(lease_of(params, self.lease_seconds))]

    def received(self, request_id: str) -> bool:
        """Record the worker's report that a load has ended. Returns whether one was awaited;
        otherwise the report is late, repeated or wrong."""
        if request_id not in self._awaited:
            return False
        self._awaited.remove(request_id)
        fetched = self._requests.get(request_id)
        if fetched is not None:
            fetched.state = State.DONE
        return True


def is_announcement(params: KVTransferParams) -> bool:
    """Whether the prefill engine has not answered yet. Announcements have no expiry."""
    return params.expires_at is None
