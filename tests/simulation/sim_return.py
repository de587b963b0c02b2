"""Clients whose router is lost come back to another one for the rest of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from sim_engine import MAX_MODEL_LEN
from sim_router import SimRouter
from sim_streams import Stream

from diptych_frontend.openai.resumption import EventIds, choose_kept
from diptych_protocol import EngineCoreOutput, InvalidRequestError, KeptAnswer

if TYPE_CHECKING:
    from sim_world import World

COMES_BACK_S = 4.0
"""The longest time until a client has another router."""
ASKED = b""
"""Stands for prompt and parameters: nobody here comes back with others."""


def come_back(world: World, stream: Stream) -> None:
    """Its router is gone. After a while its client asks whichever is there then."""
    world.clock.after(world.random.random() * COMES_BACK_S, _ask, world, stream)


def _ask(world: World, stream: Stream) -> None:
    living = [router for router in world.routers.values() if router.alive]
    if stream.ended:
        return
    if not living:
        stream.end("lost: there is no other router")
        return
    router = world.router_of[stream.request_id] = world.random.choice(living)
    world.say(f"{stream.request_id} comes back to {router.name}: it has {stream.delivered}")
    router.find_kept(stream.kept_as, partial(_go_on, world, stream, router))


def _go_on(world: World, stream: Stream, router: SimRouter, found: Sequence[KeptAnswer]) -> None:
    if stream.ended or not router.alive:
        return
    ids = EventIds(stream.kept_as, 0, stream.request_id, ASKED)
    ids.saw(stream.delivered)
    last_id = ids.marked(b"data: \n\n").partition(b"\n")[0].removeprefix(b"id: ").decode()
    try:
        _, kept = choose_kept(found, last_id, ASKED)
    except InvalidRequestError as error:
        if error.code != "answer_not_kept":
            raise AssertionError(f"P2: {stream.request_id}: {error}") from error
        stream.end(f"lost: {error}")
        return
    world.note(f"answer goes on at another router: {'whole' if kept.finish_reason else 'a part'}")
    rest = kept.token_ids[kept.num_told :]
    stream.tell(EngineCoreOutput(stream.request_id, rest, finish_reason=kept.finish_reason))
    if not stream.ended:
        request = stream.request()
        request.generated_token_ids = kept.token_ids
        router.submit(request, MAX_MODEL_LEN)
