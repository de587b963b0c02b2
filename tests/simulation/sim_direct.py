"""Clients that talk to engines themselves: a proxy that knows only `kv_transfer_params`, and
attackers, who know every lease there ever was and tell engines what they like."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from sim_engine import SimEngine
from sim_session import PATIENCE_S, Abort, Add, Call, FromEngine, Posture, Session
from sim_stranger import Liar
from sim_streams import Stream

from diptych_protocol import EngineCoreOutput, FinishReason, KVTransferParams

Params = dict[str, Any]
Forge = Callable[[Params, Random], Params]


def _of_somebody_else(params: Params, random: Random) -> Params:
    return params


def _out_of_range(params: Params, random: Random) -> Params:
    blocks = [random.randrange(100, 1000) for _ in params["remote_block_ids"][0]]
    return {**params, "remote_block_ids": [blocks]}


def _other_blocks(params: Params, random: Random) -> Params:
    blocks = [random.randrange(7) for _ in params["remote_block_ids"][0]]
    return {**params, "remote_block_ids": [blocks]}


def _guessed(params: Params, random: Random) -> Params:
    return {**params, "lease_id": f"{random.getrandbits(128):032x}"}


def _other_epoch(params: Params, random: Random) -> Params:
    return {**params, "epoch": f"{params['epoch']}x"}


def _other_length(params: Params, random: Random) -> Params:
    return {**params, "remote_num_tokens": random.randrange(1, 9)}


def _nowhere(params: Params, random: Random) -> Params:
    return {**params, "remote_host": "10.0.0.99"}


def _other_first_tokens(params: Params, random: Random) -> Params:
    return {**params, "first_token_ids": [-1]}


def _both_sides(params: Params, random: Random) -> Params:
    return {**params, "do_remote_decode": True}


def _no_address(params: Params, random: Random) -> Params:
    return {**params, "remote_host": None}


def _too_many_blocks(params: Params, random: Random) -> Params:
    return {**params, "remote_block_ids": [[*params["remote_block_ids"][0], 1, 2]]}


def _liar(params: Params, random: Random) -> Params:
    return {**params, "remote_host": Liar.address[0], "remote_port": Liar.address[1]}


def _nonsense(params: Params, random: Random) -> Params:
    return {**params, "remote_port": -1, "remote_block_ids": "all"}


LIAR = "an address where somebody lies"
TOO_LONG = "a prompt that is too long"
FORGERIES: dict[str, Forge] = {
    "somebody else's or a consumed lease": _of_somebody_else,
    "block ids out of range": _out_of_range,
    "other block ids": _other_blocks,
    TOO_LONG: _of_somebody_else,
    "a guessed lease": _guessed,
    "another epoch": _other_epoch,
    "another number of tokens": _other_length,
    "an address where nobody is": _nowhere,
    LIAR: _liar,
    "first tokens that are none": _other_first_tokens,
    "both sides at once": _both_sides,
    "no address": _no_address,
    "too many blocks": _too_many_blocks,
    "parameters that are none": _nonsense,
}


class DirectClient:
    """Prefill on one engine, decode on another; or only the latter, with forged parameters."""

    def __init__(
        self,
        stream: Stream,
        prefill: SimEngine,
        decode: Callable[[], SimEngine],
        *,
        lent: Callable[[Params], bool] = lambda _: False,
    ) -> None:
        """`lent` is told what prefill lends; whether it is now somebody else's affair."""
        self.stream = stream
        self.session: Session | None = None
        self._decode = decode
        self._lent = lent
        self._prefill = prefill
        self._params: Params = {}
        """What was told to decode."""
        self._given_up = 0
        """Tries that were taken back, and whose last words are still to come."""

    def begin(self, **changes: Any) -> None:
        """Let the KV be computed and lent; what the prefill engine is told may be changed."""
        lent = KVTransferParams(do_remote_decode=True).to_dict()
        request = self.stream.request({"kv_transfer_params": {**lent, **changes}})
        assert request.sampling_params is not None
        request.sampling_params.max_tokens = 1
        self._connect(self._prefill, self._prefilled)
        self._post(Add(request))

    def go_on(self, params: Params) -> None:
        """Let somebody decode with these parameters."""
        self._params = params
        self._connect(self._decode(), self._decoded)
        self._post(Add(self.stream.request({"kv_transfer_params": params})))

    def again(self) -> None:
        """Give up at decode, and try again at once under the same id."""
        if not self.stream.ended and self.session is not None and self.session.open:
            self._given_up += 1
            self._post(Abort([self.stream.request_id]))
            self._post(Add(self.stream.request({"kv_transfer_params": self._params})))

    def abort(self) -> None:
        """The user has left."""
        self.stream.end("aborted")
        self._post(Abort([self.stream.request_id]))

    def check(self, engine: str) -> None:
        """An engine fell silent some time ago: if it still is, do not wait any more."""
        session = self.session
        if session is None or session.engine.name != engine:
            return
        if session.open and not session.engine.heard_by(session.host):
            session.open = False
            self._lost(session, "silent")

    def reject(self, params: Params) -> None:
        """Tell whoever was spoken to last that a lease is not needed."""
        self._post(Call("reject_kv_transfer", (self.stream.request_id, params)))

    def _connect(
        self, engine: SimEngine, receive: Callable[[list[EngineCoreOutput]], None]
    ) -> None:
        def hear(session: Session, message: FromEngine) -> None:
            if session is self.session and not isinstance(message, Posture):
                receive([o for o in message if o.request_id == self.stream.request_id])

        name = self.stream.request_id.encode() + engine.name.encode()
        self.session = Session(name, "client", engine, hear, self._lost)
        if not engine.alive:
            self._lost(self.session, "not there")
            return
        engine.accept(self.session)
        engine.clock.after(PATIENCE_S, self.check, engine.name)

    def _post(self, message: Add | Abort | Call) -> None:
        if self.session is not None and self.session.open:
            self.session.engine.post(self.session, message)

    def _lost(self, session: Session, why: str) -> None:
        if session is self.session and not self.stream.ended:
            self.stream.end(f"lost: {why}")

    def _prefilled(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            params = output.kv_transfer_params
            if self.stream.ended:
                continue
            if params is None:
                self.stream.tell(output)  # an error, or all there is
            elif self._lent(params):
                self.stream.end("went no further")
            else:
                self.go_on(params)

    def _decoded(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if self._given_up and output.finish_reason is FinishReason.ABORT:
                self._given_up -= 1
                self.stream.delivered.clear()
            elif not self.stream.ended:
                self.stream.tell(output)
