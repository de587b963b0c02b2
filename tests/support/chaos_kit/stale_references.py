"""Hand-offs by parameters that are not good, or not good any more, past any router.

Whoever asks like this gets an error, or the right answer; never what other KV says. On the import
path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from engine_kit.wire import Client
from model_kit.sensitive_model import ANSWER_TOKENS, Question

Params = dict[str, Any]
EDITS: Params = {
    "remote_port": 9, "remote_num_tokens": 1, "lease_id": "f" * 32, "compat": "c", "epoch": "e",
    "expires_at": 1 << 40, "tokens_digest": "0" * 32, "lease_seconds": 3600.0, "proof": "0" * 64,
}  # fmt: skip
KINDS = (
    "consumed", "another prompt's", "forged", "edited", "another epoch's", "rejected", "expired"
)  # fmt: skip


@dataclass
class Forger:
    """Asks two engines directly."""

    prefill: Client
    decode: Client
    asked: list[Question]
    lease_s: float
    rng: random.Random
    asks: int = 0

    def lend(self, question: Question) -> Params:
        """Let the prefill engine compute a prompt and hold its blocks."""
        remote = {"kv_transfer_params": {"do_remote_decode": True}}
        _, params, error = self._ask(self.prefill, question, max_tokens=1, extra_args=remote)
        if params is None:
            raise RuntimeError(f"prefill did not work: {error}")
        return params

    def try_one(self, kind: str) -> str:
        """Use a bad reference. Returns what is wrong with the answers; empty if nothing is."""
        question, other = self.rng.sample(self.asked, 2)
        params, victim = self.lend(question), question
        match kind:
            case "consumed":
                found = self._use(params, question)
                if found != "right":
                    return f"a good reference: {found}"
            case "another prompt's":
                victim = other
            case "forged":
                params["lease_id"] = f"{self.rng.getrandbits(128):032x}"
            case "edited":
                field = self.rng.choice(list(EDITS))
                params[field] = EDITS[field]
            case "another epoch's":
                params["epoch"] = "before"
            case "rejected":
                self.prefill.call("reject_kv_transfer", "r", dict(params))
            case "expired":
                time.sleep(self.lease_s * 1.3)
        found = self._use(params, victim)
        if found == "right":
            return f"a reference that is {kind} was taken"
        if found != "refused":
            return f"a reference that is {kind}: {found}"
        again = self._use(None, victim)
        return "" if again == "right" else f"after a reference that is {kind}: {again}"

    def _use(self, params: Params | None, question: Question) -> str:
        extra = None if params is None else {"kv_transfer_params": params}
        tokens, _, error = self._ask(
            self.decode, question, max_tokens=ANSWER_TOKENS, extra_args=extra
        )
        told = [] if params is None else list(params["first_token_ids"])
        if error and tokens == told:
            return "refused"  # it repeated what we said ourselves, and computed nothing
        if tokens != question.answer[: len(tokens)]:
            return f"answered {tokens}, not {question.answer}"
        return "refused" if error else "right" if tokens == question.answer else "cut short"

    def _ask(
        self, client: Client, question: Question, **params: Any
    ) -> tuple[list[int], Params | None, str | None]:
        """Tokens, kv_transfer_params and error of one request."""
        self.asks += 1
        name = f"forger-{self.asks}"
        client.add(name, prompt=question.prompt, ignore_eos=True, **params)
        tokens: list[int] = []
        while True:
            for output in client.receive().outputs:
                if output.request_id == name:
                    tokens += output.new_token_ids
                    if output.finished:
                        return tokens, output.kv_transfer_params, output.error
