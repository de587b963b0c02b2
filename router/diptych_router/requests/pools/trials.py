"""Decides which engines are verified for hand-offs, and which pairs to try next.

    NEW ──due──▶ ON TRIAL ──blocks arrived──▶ VERIFIED
     ▲               │
     └── back-off ───┘ it failed, or took too long

A trial is a real request through a pair, which verifies both engines at once. An engine is
identified by its epoch, so a restarted one is new. Verified engines stay verified, and serve as
partners. The process that takes the place of a verified one, as the same engine, is trusted until
its trial has ended, because streams wait for it. This module performs no I/O.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diptych_protocol import EngineCoreOutput
from diptych_router.engines.engine_table import Role
from diptych_router.engines.health_book import back_off_s

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 30.0
AFTER_STREAMS_S = 1.0
"""One that is trusted goes on with its streams first."""

PROMPT_BLOCKS = 2
"""Full blocks of a canary's prompt. One more token begins a third block."""
OUTPUT_TOKENS = 4
NEARLY = 0.1
"""Tokens whose log-probabilities differ by less count as equally likely."""


class Candidate(NamedTuple):
    """An engine that may take part in a trial: up, listed and not draining."""

    epoch: str
    role: Role
    fingerprint: str
    load: int


class Trial(NamedTuple):
    """A canary to send: the epochs of its pair."""

    prefill: str
    decode: str


@dataclass(slots=True)
class _Record:
    verified: bool = False
    trusted: bool = False
    on_trial: bool = False
    failures: int = 0
    retry_at: float = 0.0


class TrialBook:
    """The trials of one router. The caller passes the time, in seconds of any clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._failed_pairs = Counter[Trial]()

    def verified(self, epoch: str) -> bool:
        record = self._records.get(epoch)
        return record is not None and record.verified

    def trusted(self, epoch: str) -> bool:
        """Whether it is verified, or took the place of one that was, and no trial has failed."""
        record = self._records.get(epoch)
        return record is not None and record.trusted

    def keep(self, formers: Mapping[str, str], now: float) -> None:
        """Forget every engine but these. formers: epoch -> that of the process in whose place it
        is the same engine; empty: there was none."""
        for epoch, former in formers.items():
            if epoch not in self._records and self.verified(former):
                self._records[epoch] = _Record(trusted=True, retry_at=now + AFTER_STREAMS_S)
        self._records = {e: r for e, r in self._records.items() if e in formers}
        kept = {pair: n for pair, n in self._failed_pairs.items() if formers.keys() >= {*pair}}
        self._failed_pairs = Counter(kept)

    def due(self, candidates: Sequence[Candidate], now: float) -> list[Trial]:
        """Return trials to begin now. Each must be reported to `ended`.

        The pairs that failed least come first, whichever engine of the two asks. Otherwise broken
        engines could take a sound one as their partner again and again, before it finds one of its
        own.
        """
        free = {e.epoch for e in candidates if not self._record(e.epoch).on_trial}
        pairs = [
            (_pair(engine, partner), partner)
            for engine in candidates
            if self._wants_proof(engine.epoch, now)
            for partner in candidates
            if partner.role != engine.role and partner.fingerprint == engine.fingerprint
        ]
        trials = []
        for trial, _ in sorted(pairs, key=self._preference):
            if free.issuperset(trial):
                trials.append(trial)
                for record in self._unproven(trial):
                    record.on_trial = True
                free -= {epoch for epoch in trial if not self.verified(epoch)}
        return trials

    def ended(self, trial: Trial, *, ok: bool, now: float) -> None:
        """Record the end of a trial. A failure does not show which engine is at fault."""
        if not ok:
            self._failed_pairs[trial] += 1
        for record in self._unproven(trial):
            record.on_trial = False
            record.verified = record.trusted = ok
            if not ok:
                record.failures += 1
                record.retry_at = now + back_off_s(record.failures, FIRST_RETRY_S, LONGEST_RETRY_S)

    def _unproven(self, trial: Trial) -> list[_Record]:
        return [record for record in map(self._record, trial) if not record.verified]

    def _record(self, epoch: str) -> _Record:
        return self._records.setdefault(epoch, _Record())

    def _wants_proof(self, epoch: str, now: float) -> bool:
        record = self._record(epoch)
        return not (record.verified or record.on_trial) and now >= record.retry_at

    def _preference(self, asked: tuple[Trial, Candidate]) -> tuple[int, bool, int]:
        """Somebody else than last time, if it failed; then one that needs the proof too."""
        trial, partner = asked
        return self._failed_pairs[trial], self.verified(partner.epoch), partner.load


def prompt_length(block_size: int, max_model_len: int) -> int:
    """Return the tokens of a canary's prompt: whole blocks, and the beginning of another."""
    return max(1, min(PROMPT_BLOCKS * block_size + 1, max_model_len - OUTPUT_TOKENS))


def complaint(
    outputs: Sequence[EngineCoreOutput], prompt_tokens: int, blocks: int, blocks_received: int
) -> str:
    """Return what is wrong with the decode engine's answer to a canary; empty if nothing is.

    Args:
        outputs: everything that the decode engine sent, the last of them finished.
        blocks: how many the prompt fills.
        blocks_received: how many more the decode engine has received since the canary began.
    """
    computed = prompt_tokens - received_tokens(outputs)
    if computed > 0:
        return f"decode computed {computed} of {prompt_tokens} prompt tokens itself"
    if blocks_received < blocks:
        return f"only {blocks_received} of {blocks} blocks crossed the hinge"
    if not any(output.new_token_ids for output in outputs):
        return "decode made no token"
    return ""


def unlike(tokens: Sequence[int], alone: Sequence[EngineCoreOutput]) -> str:
    """Return how the answer to a canary differs from the answer of the decode engine alone; empty
    if it does not.

    Engines that compute in batches may round differently each time. So a token that the decode
    engine finds nearly as likely as its own counts as the same, and what comes after it may be
    anything.

    Args:
        tokens: the answer to the canary, all of it greedy.
        alone: decode's own outputs, perhaps with log-probabilities of alternatives for each token.
    """
    num_alone = sum(len(output.new_token_ids) for output in alone)
    if min(len(tokens), num_alone) < OUTPUT_TOKENS:
        return f"decode made {len(tokens)} tokens, and alone {num_alone}, of {OUTPUT_TOKENS}"
    place = 0
    for output in alone:
        probable = output.new_logprobs
        for index, own in enumerate(output.new_token_ids):
            if place == len(tokens):
                break
            token, place = tokens[place], place + 1
            if token == own:
                continue
            found: dict[int, float] = {}
            if probable is not None:
                ids, values = probable.logprob_token_ids[index], probable.logprobs[index]
                found = dict(zip(ids, values, strict=True))
            if found.get(own, 0.0) - found.get(token, -math.inf) <= NEARLY:
                return ""
            return f"token {place} is {token}, and decode alone answers {own}: its KV is wrong"
    return ""


def received_tokens(outputs: Sequence[EngineCoreOutput]) -> int:
    """Return the prompt tokens whose KV the decode engine reports as received."""
    return sum(output.num_received_tokens for output in outputs)


def _pair(one: Candidate, other: Candidate) -> Trial:
    prefill, decode = (one, other) if one.role == "prefill" else (other, one)
    return Trial(prefill.epoch, decode.epoch)
