"""Whoever is not of the service, or carries what its engines did not say, gets an error at once:
nothing is connected to, told or remembered. Real engines over UCX."""

from __future__ import annotations

import itertools
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from engine_kit.core import tokens
from engine_kit.handoff import (
    Engine,
    LocalRouter,
    drive,
    engines,
    prompt_of,
    request,
    save_toy,
    signed,
)
from waits import Deadline, source_of

from diptych_kv_transfer.connector import KVConnector
from diptych_kv_transfer.hinge_thread import HingeThread
from diptych_kv_transfer.signing.handshake import ANSWER_BYTES, NONCE_BYTES
from diptych_kv_transfer.signing.references import PUBLIC_KEY, HingeKey, References
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport
from diptych_protocol import CurveKeys, FinishReason, InvalidRequestError, KVTransferParams

Json = dict[str, Any]
PROMPT = prompt_of(3, 34)
OTHERS = CurveKeys("P" * 40, "another service's, or before a rotation")
LONG = {"max_tokens": 8, "ignore_eos": True}
_names = (f"r{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture
def trio(model: str) -> Iterator[list[Engine]]:
    with engines(model, alone={}, prefill={}, decode={}) as made:
        yield made


def hinge_of(engine: Engine) -> Hinge:
    """To look at."""
    connector = engine.core.connector
    assert isinstance(connector, KVConnector)
    driver = connector._driver
    assert isinstance(driver, HingeThread)
    return driver._hinge


def lend(prefill: Engine) -> Json:
    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    lent = drive(prefill, request(next(_names), PROMPT, max_tokens=1, extra_args=asked))
    assert lent[-1].kv_transfer_params is not None
    return lent[-1].kv_transfer_params


def fetching(lent: Json, prompt: list[int] = PROMPT) -> Any:
    return request(next(_names), prompt, extra_args={"kv_transfer_params": lent}, **LONG)


def refused(decode: Engine, lent: Json, *others: Engine, prompt: list[int] = PROMPT) -> str:
    """Why, in words; no token came."""
    [made] = drive(decode, fetching(lent, prompt), *others)
    assert (made.finish_reason, made.new_token_ids) == (FinishReason.ERROR, [])
    return made.error or ""


def answer(engine: Engine) -> list[int]:
    return tokens(drive(engine, request(next(_names), PROMPT, **LONG)))


def until(condition: Callable[[], bool], *engines: Engine) -> None:
    deadline = Deadline(source_of(condition))
    while not condition():
        deadline.check()
        for engine in engines:
            engine.turn()


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def test_engines_whose_clocks_differ_answer_without_a_handoff(trio: list[Engine]) -> None:
    alone, prefill, decode = trio
    connector = decode.core.connector
    assert isinstance(connector, KVConnector)
    connector._references.clock = lambda: time.time() + 600.0
    router = LocalRouter(None, prefill=[prefill], decode=[decode])
    try:
        [outputs] = router.run(request(next(_names), PROMPT, **LONG))
    finally:
        router.settle()
    assert outputs[-1].outputs[0].token_ids == answer(alone)
    assert decode.hinge.blocks_received == 0


EDITS: dict[str, list[Any]] = {
    "do_remote_prefill": [False],
    "do_remote_decode": [True],
    "remote_engine_id": ["somebody"],
    "remote_request_id": ["another"],
    "remote_block_ids": [[[0] * 9], [[5, 4, 3, 2, 1, 0, 6, 7, 8]]],
    "remote_host": ["prefill.example", "localhost", "127.0.0.1"],
    "remote_num_tokens": [33, 35, 1],
    "tp_size": [2],
    "lease_id": ["f" * 32],
    "lease_seconds": [3600.0],
    "epoch": ["before"],
    "compat": ["c"],
    "first_token_ids": [[1], [], None],
    "remote_block_size": [8, None],
    "expires_at": [1 << 40, 0],
    "tokens_digest": ["f" * 32],
    "proof": ["0" * 64, None],
}
"""Each `remote_host` comes with the port of somebody who listens."""


def test_a_reference_that_was_edited_in_any_field_is_an_error_and_nothing_connects(
    trio: list[Engine],
) -> None:
    alone, prefill, decode = trio
    assert {*EDITS, "remote_port"} == set(KVTransferParams.__struct_fields__)
    lent = lend(prefill)
    with listening() as listener:
        there = {"remote_port": listener.getsockname()[1]}
        for field, values in EDITS.items():
            for value in values:
                edited = {**lent, **(there if field == "remote_host" else {}), field: value}
                assert "kv_transfer_params: " in refused(decode, edited), (field, value)
        refused(decode, {**lent, **there})
        assert not select.select([listener], [], [], 0)[0]
    assert not hinge_of(decode).loads.remotes, "nobody was spoken to"
    assert not hinge_of(decode).loads.loads
    assert answer(decode) == answer(alone)
    decode.forget_prefixes()
    if prefill.hinge.leases_held:  # some edits leave what names the lease: it was given back
        drive(decode, fetching(lent), prefill)


def test_a_lease_is_for_its_tokens_and_for_one_request(trio: list[Engine]) -> None:
    alone, prefill, decode = trio
    lent = lend(prefill)
    assert "another prompt" in refused(decode, lent, prompt=prompt_of(4, 34))
    assert not hinge_of(decode).loads.remotes
    assert tokens(drive(decode, fetching(lent), prefill)) == answer(alone)
    started = decode.hinge.loads_started
    assert "used here before" in refused(decode, lent)
    decode.core.call("reject_kv_transfer", ["again", lent])
    assert decode.hinge.loads_started == started
    assert not hinge_of(decode).loads.rejects


def test_engines_with_other_keys_exchange_nothing(model: str) -> None:
    """Another service's, or those of a revision before or after the keys were rotated."""
    with engines(model, alone={}, ours={}, theirs={"keys": OTHERS}) as (alone, ours, theirs):
        for prefill, decode in ((ours, theirs), (theirs, ours)):
            lent = lend(prefill)
            assert "no engine of this service" in refused(decode, lent)
            with pytest.raises(InvalidRequestError, match="no engine of this service"):
                decode.core.call("reject_kv_transfer", ["r", lent])
            assert not hinge_of(decode).loads.remotes
            assert prefill.hinge.leases_held == 1
            prefill.core.call("reject_kv_transfer", ["r", lent])
            until(lambda: not prefill.hinge.leases_held, prefill)  # noqa: B023
            assert answer(decode) == answer(alone)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_stranger_s_rejection_frees_nothing_and_connects_nowhere(
    trio: list[Engine], side: str
) -> None:
    _, prefill, decode = trio
    told = prefill if side == "prefill" else decode
    lent = lend(prefill)
    until(lambda: prefill.hinge.leases_held == 1, prefill)
    with listening() as listener:
        there = {"remote_host": "127.0.0.1", "remote_port": listener.getsockname()[1]}
        for changes in ({"proof": "0" * 64}, {"proof": None}, there, {"lease_id": "f" * 32},
                        {"epoch": "e"}, {"remote_engine_id": "x"}, {"expires_at": 1 << 40},
                        {"compat": "c"}, {"remote_host": "localhost"}):  # fmt: skip
            with pytest.raises(InvalidRequestError, match="kv_transfer_params: "):
                told.core.call("reject_kv_transfer", ["r", {**lent, **changes}])
        assert not select.select([listener], [], [], 0)[0]
    assert not hinge_of(decode).loads.remotes
    assert not hinge_of(decode).loads.rejects
    assert prefill.hinge.leases_held == 1
    told.core.call("reject_kv_transfer", ["r", lent])
    until(lambda: not prefill.hinge.leases_held, prefill, decode)


def test_an_announcement_that_no_engine_signed_is_refused(trio: list[Engine]) -> None:
    """And an early load is adopted by a reference that was signed, and by no other."""
    alone, prefill, decode = trio
    about, lease = prefill.core.description, secrets.token_hex(16)
    announced = KVTransferParams(
        do_remote_prefill=True, remote_engine_id=about.engine_id, epoch=about.epoch,
        remote_host=about.kv_transfer_host, remote_port=about.kv_transfer_port, lease_id=lease,
        remote_num_tokens=len(PROMPT), compat=lend(prefill)["compat"],
        proof=about.kv_transfer_proof,
    )  # fmt: skip
    for changes in ({"proof": "0" * 32}, {"remote_port": 1}, {"remote_engine_id": "x"},
                    {"epoch": "e"}, {"compat": "c"}, {"remote_host": "127.0.0.2"}):  # fmt: skip
        edited = msgspec.structs.replace(announced, **changes)
        with pytest.raises(InvalidRequestError, match="no engine of this service"):
            decode.core.call("announce_kv_transfer", [fetching(edited.to_dict())])
    assert not hinge_of(decode).loads.remotes
    coming = fetching(announced.to_dict())
    assert decode.core.call("announce_kv_transfer", [coming]) is True
    made = drive(decode, coming, prefill)
    assert "no engine of this service" in (made[-1].error or ""), "what was announced is no lease"
    until(lambda: decode.at_rest, decode, prefill)
    assert answer(decode) == answer(alone)


class Impostor(UcxTransport):
    """Answers at an address as a hinge does, and has not the key."""

    def __init__(self, port: int, answers: Callable[[bytes], bytes]) -> None:
        super().__init__("127.0.0.1", port, HingeKey.of(OTHERS))
        self.heard: list[bytes] = []
        self._answers = answers
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _meet_itself(self, host: str) -> str:
        return "it would not believe itself"

    def _run(self) -> None:
        while not self._stopping:
            self.poll(0.05)

    def _shake(self, peer: int, connection: Any, data: bytes) -> None:
        self.heard.append(data)
        connection.stream.shake(self._answers(data))

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        self.close()


@pytest.mark.parametrize(
    "answers",
    [
        lambda heard: secrets.token_bytes(ANSWER_BYTES),
        lambda heard: heard + PUBLIC_KEY.mac(b"diptych connect1", heard + heard),
        lambda heard: heard,
    ],
    ids=["noise", "a mirror that guesses", "an echo"],
)
def test_an_impostor_is_told_a_nonce_and_poisons_nothing(
    model: str, answers: Callable[[bytes], bytes]
) -> None:
    """It has the address of an engine that is gone, and somebody still has a reference."""
    with engines(model, alone={}, decode={}) as (alone, decode):
        with engines(model, prefill={}) as [gone]:
            lent = lend(gone)
        impostor = Impostor(lent["remote_port"], answers)
        try:
            made = drive(decode, fetching(lent))
        finally:
            impostor.stop()
        assert "cannot connect" in (made[-1].error or "")
        assert tokens(made) == []
        assert {len(said) for said in impostor.heard} == {NONCE_BYTES}
        assert len(set(impostor.heard)) == len(impostor.heard), "never the same"
        assert decode.at_rest
        assert answer(decode) == answer(alone)


def test_a_rogue_engine_is_not_taken_for_another(trio: list[Engine], model: str) -> None:
    """It has the key, and a reference that says that it is the engine which it is not."""
    alone, prefill, decode = trio
    with engines(model, rogue={}) as [rogue]:
        about = rogue.core.description
        there = {"remote_port": about.kv_transfer_port}
        lent = lend(prefill)
        made = drive(decode, fetching(signed(lent, **there)), prefill, rogue)
        assert "restarted or replaced" in (made[-1].error or "")
        assert answer(decode) == answer(alone)
        prefill.core.call("reject_kv_transfer", ["r", lent])


def test_what_an_engine_signs_is_good_for_a_lease_s_time(trio: list[Engine]) -> None:
    _, prefill, _ = trio
    lent = KVTransferParams.parse(lend(prefill))
    References(PUBLIC_KEY).check(lent)
    References(PUBLIC_KEY, lambda: (lent.expires_at or 0) - 1.0).check_use(
        lent, lent.tokens_digest or ""
    )
    prefill.core.call("reject_kv_transfer", ["r", lent.to_dict()])
