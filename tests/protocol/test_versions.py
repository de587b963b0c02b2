"""Every struct that travels is read by programs that know fewer of its fields, and more of them."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec import NODEFAULT, inspect
from msgspec.structs import FieldInfo, asdict, fields

import diptych_protocol
from diptych_kv_transfer.tables import messages
from diptych_kv_transfer.transports.ucx import frames
from diptych_protocol import (
    Array,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDescription,
    FinishReason,
    RequestJourneyEvent,
    RequestJourneyEventType,
    wire,
)
from diptych_protocol.arrays import FrameDecoder
from diptych_protocol.control_calls import ControlCall
from diptych_router.engines import serving

Kind = type[msgspec.Struct]
ROOMS = [
    *(
        importlib.import_module(f"diptych_protocol.{room.name}")
        for room in pkgutil.iter_modules(diptych_protocol.__path__)
    ),
    *(messages, frames, serving),
]
STRUCTS: list[Kind] = [
    kind
    for room in ROOMS
    for kind in vars(room).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ == room.__name__
    and kind.__struct_fields__
    # The arguments of a call travel as a list, each by itself.
    and not issubclass(kind, ControlCall)
]
NEWER = "of_the_future"


class NoExampleError(Exception):
    """A text has to match a pattern."""


def example(kind: inspect.Type) -> Any:
    """A value of a type, and seldom a default."""
    match kind:
        case inspect.Metadata():
            return example(kind.type)
        case inspect.UnionType():
            kinds = [x for x in kind.types if not isinstance(x, inspect.NoneType)]
            return example(kinds[-1])
        case inspect.ListType():
            return [example(kind.item_type)]
        case inspect.SetType():
            return {example(kind.item_type)}
        case inspect.VarTupleType():
            return (example(kind.item_type),)
        case inspect.TupleType():
            return tuple(map(example, kind.item_types))
        case inspect.DictType():
            return {example(kind.key_type): example(kind.value_type)}
        case inspect.EnumType():
            return list(kind.cls)[-1]
        case inspect.LiteralType():
            return kind.values[-1]
        case inspect.IntType():
            return (kind.ge or 0) + 3 if kind.le is None else kind.le
        case inspect.FloatType():
            return kind.le or (kind.ge or 0.0) + 0.5
        case inspect.StrType() if kind.pattern is None:
            return "text"
        case inspect.BytesType():
            return bytes(kind.min_length or 3)
        case inspect.BoolType():
            return True
        case inspect.CustomType() if kind.cls is Array:
            return Array("uint8", (2,), b"ab")
        case inspect.StructType():
            return message_of(kind.cls)
        case inspect.AnyType():
            return {"text": [1, None]}
    raise NoExampleError(kind)


def message_of(struct: Kind) -> Any:
    """A message in which every field is set, also those that have a default."""
    about = inspect.type_info(struct)
    assert isinstance(about, inspect.StructType)
    given = {}
    for field in about.fields:
        with contextlib.suppress(NoExampleError):
            given[field.name] = example(field.type)
    return struct(**given)


def default(field: FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def version_of(struct: Kind, known: Sequence[FieldInfo], *more: tuple[str, type, Any]) -> Kind:
    """The struct in a version that has these fields."""
    config = struct.__struct_config__
    return msgspec.defstruct(
        struct.__name__,
        [
            *(
                (field.name, field.type)
                if field.required
                else (
                    field.name,
                    field.type,
                    msgspec.field(default_factory=partial(default, field)),
                )
                for field in known
            ),
            *more,
        ],
        tag=config.tag,
        tag_field=config.tag_field,
        array_like=config.array_like,
        omit_defaults=config.omit_defaults,
        forbid_unknown_fields=config.forbid_unknown_fields,
        kw_only=True,
    )


def read(message: msgspec.Struct, reader: Kind) -> dict[str, Any]:
    return asdict(FrameDecoder(reader).decode(wire.encoder.encode(message)))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_a_reader_of_another_version_reads_all_that_it_knows(struct: Kind) -> None:
    known, message = fields(struct), message_of(struct)
    newer = version_of(struct, known, (NEWER, int, 7))
    # Configurations and parameters of requests are refused where somebody does not know all of
    # them, rather than left undone. So what is new there must not be sent unless it is asked for.
    strict = struct.__struct_config__.forbid_unknown_fields
    said = asdict(message)
    assert read(message, newer) == said | {NEWER: 7}, "an older writer leaves it out"
    assert read(newer(**said, **{NEWER: 7 if strict else 8}), struct) == said
    for count in reversed(range(len(known))):
        if strict and known[count].required:
            break
        if strict:
            said[known[count].name] = default(known[count])
        shared = {field.name: said[field.name] for field in known[:count]}
        older = version_of(struct, known[:count])
        assert read(struct(**said), older) == shared, "an older reader skips it"


def test_a_value_that_only_newer_engines_know_costs_no_connection() -> None:
    finished = EngineCoreOutput("r", [], finish_reason=FinishReason.STOP)
    event = RequestJourneyEvent("r", RequestJourneyEventType.CHUNK, 1.0)
    newer = msgspec.to_builtins(EngineCoreOutputs(outputs=[finished], journey_events=[event]))
    newer[1][0][5] = newer[1][0][15] = newer[6][0][1] = 99
    told = wire.outputs_decoder.decode([msgspec.msgpack.encode(newer)])
    assert told.outputs[0].finish_reason is FinishReason.ERROR
    assert told.outputs[0].error_kind is wire.ErrorKind.FAULT
    assert told.journey_events is not None
    assert told.journey_events[0].event_type is RequestJourneyEventType.OTHER


def test_an_engine_with_a_newer_way_to_serve_is_known() -> None:
    required = "engine_id epoch model max_model_len vocab_size block_size num_blocks dtype compat"
    told = dict.fromkeys(required.split(), 1) | {"max_num_seqs": 1, "pid": 1, "compat": {}}
    told |= dict.fromkeys(("engine_id", "epoch", "model", "dtype"), "")
    told |= {"scheduling_policy": "shortest_first", "runtime": "another", "tasks": ["score"]}
    assert msgspec.convert(told, EngineDescription).scheduling_policy == "shortest_first"
