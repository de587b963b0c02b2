"""What clients, operators and strangers may do at some moment, right or wrong, by name."""

from __future__ import annotations

from collections.abc import Callable

from sim_choice import Fault, some_engine
from sim_direct import FORGERIES, LIAR, TOO_LONG, DirectClient, Params
from sim_engine import MAX_MODEL_LEN
from sim_stranger import ANSWERS, STRANGERS
from sim_streams import Stream
from sim_world import World

from diptych_kv_transfer import parameters
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.messages import Hello
from diptych_protocol import InvalidRequestError, KVTransferParams


def abort(world: World, where: str) -> bool:
    open_streams = [s for s in world.streams.values() if not s.ended]
    if not open_streams:
        return False
    here = world.engines[where].core.scheduler.requests if where else ()
    names = {name.split("/")[0] for name in here}
    concerned = [s for s in open_streams if s.request_id in names]
    world.abort(world.random.choice(concerned or open_streams))
    return True


def burst(world: World, where: str) -> bool:
    for _ in range(4):
        world.submit()
    return True


def proxy(world: World, where: str) -> bool:
    """Somebody else's router, which knows only the public vocabulary, and may change its mind."""
    changes_its_mind = world.random.random() < 0.3

    def lent(client: DirectClient, params: Params) -> bool:
        if changes_its_mind:
            client.reject(params)
        return changes_its_mind

    return _prefill(world, lent)


def forge(world: World, where: str) -> bool:
    """Somebody who gets to know a lease asks a decode engine to use it as she says, instead of its
    owner or beside her."""
    random = world.random
    kind, beside = random.choice(list(FORGERIES)), random.random() < 0.3

    def lent(client: DirectClient, params: Params) -> bool:
        decode = some_engine(world, where, "decode")
        if decode is None:
            return True
        world.note(f"forged: {kind}")
        stolen = random.choice([params, *world.lent[-2:]])
        # A rogue engine of the service signs what it likes, somebody outside cannot.
        signs, told = random.random() < 0.7, stolen["first_token_ids"]
        if signs:
            told = random.choice(([random.randrange(1, 1000)], None))
        length = params["remote_num_tokens"] + (told is None)
        stream = world.new_stream(
            after="f",
            prompt=client.stream.prompt if random.random() < 0.2 else None,
            length=MAX_MODEL_LEN if kind == TOO_LONG else length,
            first_token_ids=tuple(told or ()),
        )
        thief = world.direct[stream.request_id] = DirectClient(stream, decode, lambda: decode)
        if kind == LIAR:
            world.liar.poses_as = _hello_of(world, stolen)
        forged = FORGERIES[kind]({**stolen, "first_token_ids": told}, random)
        thief.go_on(_signed(forged, stream) if signs else forged)
        return not beside

    return _prefill(world, lent)


def _signed(params: Params, stream: Stream) -> Params:
    """The same, signed for the tokens of a stream by somebody who has the key, if it can be."""
    try:
        parsed = KVTransferParams.parse(params)
    except InvalidRequestError:
        return params
    tokens = [*stream.prompt, *(parsed.first_token_ids or ())][: parsed.remote_num_tokens]
    parsed.tokens_digest = parameters.digest_of(tokens, stream.identity)
    return References(PUBLIC_KEY, lambda: 0.0).sign(parsed, 1e6).to_dict()


def _hello_of(world: World, params: Params) -> Hello:
    compat = world.engines[params["remote_engine_id"]].driver.compat
    return Hello(params["remote_engine_id"], params["epoch"], compat)


def _prefill(world: World, lent: Callable[[DirectClient, Params], bool]) -> bool:
    prefill, decode = some_engine(world, "", "prefill"), some_engine(world, "", "decode")
    if prefill is None or decode is None:
        return False
    stream = world.new_stream(after="x")
    client = DirectClient(
        stream,
        prefill,
        lambda: world.engines[decode.name],
        lent=lambda params: lent(client, params),
    )
    world.direct[stream.request_id] = client
    client.begin()
    return True


def reject(world: World, where: str) -> bool:
    """A late, early or mistaken word that a lease is not needed, to any engine."""
    engine = some_engine(world, where)
    if engine is None or not world.lent:
        return False
    params = world.random.choice(world.lent[-3:])
    if world.random.random() < 0.1:
        params = {**params, "epoch": None}
    world.call(engine, "reject_kv_transfer", "somebody", params)
    return True


def again(world: World, where: str) -> bool:
    """A client gives up and tries again at once, under the same id and with the same lease."""

    def lent(client: DirectClient, params: Params) -> bool:
        world.clock.after(world.random.random() * 0.05, client.again)
        return False

    return _prefill(world, lent)


def misuse(world: World, where: str) -> bool:
    """A prefill engine is asked for what it cannot lend."""
    prefill = some_engine(world, where, "prefill")
    if prefill is None:
        return False
    known = [*prefill.driver.hinge.leases.leases, "none"]
    kind, random = world.random.choice(("lease", "lease", "length")), world.random
    stream = world.new_stream(after="m", length=MAX_MODEL_LEN if kind == "length" else None)
    client = DirectClient(stream, prefill, lambda: prefill, lent=lambda _: True)
    world.direct[stream.request_id] = client
    client.begin(**({"lease_id": random.choice(known)} if kind == "lease" else {}))
    return True


def announce(world: World, where: str) -> bool:
    """Somebody announces what never comes, or could not be served."""
    decode = some_engine(world, where, "decode")
    if decode is None or not world.lent:
        return False
    random, params = world.random, world.random.choice(world.lent[-3:])
    length = params["remote_num_tokens"]
    length = random.choice((length, length, length - 2, MAX_MODEL_LEN))
    prompt = tuple(random.randrange(1, 1000) for _ in range(max(1, length)))
    if random.random() < 0.7:  # a lease's proof is none of an announcement's
        proof = References(PUBLIC_KEY).proof_of_engine(KVTransferParams.parse(params))
        params = {**params, "proof": proof}
    request = Stream(f"a{len(world.seen)}", prompt, 2).request({"kv_transfer_params": params})
    world.call(decode, "announce_kv_transfer", request)
    return True


def stranger(world: World, where: str) -> bool:
    """Somebody who is no engine connects to an engine's hinge."""
    kind = world.random.choice(list(STRANGERS))
    engine = some_engine(world, where, "decode" if kind == ANSWERS else "prefill")
    if engine is None:
        return False
    world.admit_stranger(engine, kind)
    return True


CLIENT_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (abort, burst, proxy, forge, reject, again, misuse, announce, stranger)
}
