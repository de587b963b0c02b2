"""The arguments of an engine under vLLM's names, from code or from a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Final, Literal, Self, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from diptych_frontend.core_client.foreign_options import (
    Foreign,
    ForeignArgs,
    foreign_fields,
    judge_foreign,
    warn_of_environment,
)
from diptych_protocol import UNREADABLE, EngineConfig, KVTransferConfig, UsageContext
from diptych_protocol.field_ranges import descriptions

OUR_NAMES: Final = {
    "served_model_name": "served_name",
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "kv_transfer_config": "kv_transfer",
}
"""vLLM's name of a field -> ours, where they differ."""


class EngineArgs(ForeignArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `EngineConfig` whose fields may also be given under vLLM's names, and what concerns the
    client of the engine rather than the engine.

    Where both are given, the one under vLLM's name counts.
    """

    served_model_name: str | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_transfer_config: KVTransferConfig | None = None
    disable_log_stats: Annotated[bool, Meta(description="Keep and log no statistics.")] = False
    enable_log_requests: Annotated[
        bool, Meta(description="Write a line to the log for each request.")
    ] = False

    def create_engine_config(
        self, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
    ) -> EngineConfig:
        """What the engine gets.

        Raises `InvalidRequestError` for a value out of range, and `UnsupportedFeatureError` for one
        of vLLM's that asks for what is not here.
        """
        warn_of_environment()
        Foreign("it is the model's own", (self.model,)).judge("tokenizer", self.tokenizer)
        judge_foreign(self)
        values = {name: getattr(self, name) for name in EngineConfig.__struct_fields__}
        for theirs, ours in OUR_NAMES.items():
            value = getattr(self, theirs)
            if value is not None:
                values[ours] = value
        config = EngineConfig(**values)
        config.check()
        return config

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """One option for each field, which also answers to vLLM's name; returns the parser."""
        theirs = {ours: name for name, ours in OUR_NAMES.items()}
        types, meanings = get_type_hints(cls), descriptions(cls)
        for field in msgspec.structs.fields(cls):
            if field.name in OUR_NAMES:
                continue
            names = [field.name, *([theirs[field.name]] if field.name in theirs else [])]
            flags = [f"--{name.replace('_', '-')}" for name in names]
            if field.name in foreign_fields(ForeignArgs) or field.name == "tokenizer":
                parser.add_argument(*flags, dest=field.name, **_FOREIGN_OPTION)
                continue
            parser.add_argument(
                *flags,
                dest=field.name,
                help=meanings.get(field.name, "").replace("%", "%%"),
                **_option(field, types[field.name]),
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From what a parser with `add_cli_args` has read; other attributes are left alone."""
        given = vars(args)
        return cls(**{name: given[name] for name in cls.__struct_fields__ if name in given})


def _loosely(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return text


_FOREIGN_OPTION: Final[dict[str, Any]] = {
    "help": argparse.SUPPRESS, "default": None, "nargs": "?", "const": True, "type": _loosely,
}  # fmt: skip
"""How argparse reads the options that only vLLM has; a program's are judged in the same way."""


def _option(field: msgspec.structs.FieldInfo, kind: Any) -> dict[str, Any]:
    """How argparse reads one field."""
    option: dict[str, Any] = {"required": field.required}
    if field.default is not msgspec.NODEFAULT:
        option["default"] = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        option["default"] = field.default_factory()
    if kind is bool:
        return option | {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        values = get_args(kind)
        return option | {"choices": values, "type": type(values[0])}
    return option | {"type": _reader(kind), "metavar": field.name.upper()}


def _reader(kind: Any) -> Callable[[str], Any]:
    """From the text of an option to a value; objects and lists are written as JSON."""
    arms = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    plain = {str, int, float, type(None)}.issuperset(arms)

    def read(text: str) -> Any:
        try:
            if plain:
                return msgspec.convert(text, kind, strict=False)
            return msgspec.json.decode(text, type=kind)
        except UNREADABLE as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return read
