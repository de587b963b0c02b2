"""The arguments of an engine under vLLM's names, from code or from a command line."""

from __future__ import annotations

import argparse
from typing import Annotated, Any, Final, Self, get_type_hints

import msgspec
from msgspec import Meta

from diptych_frontend.core_client.foreign_options import (
    Foreign,
    ForeignArgs,
    foreign_fields,
    judge_foreign,
    warn_of_environment,
)
from diptych_frontend.model_files.model_source import resolve_model
from diptych_protocol import (
    UNREADABLE,
    EngineConfig,
    KVTransferConfig,
    SpeculativeConfig,
    UsageContext,
)
from diptych_protocol.command_line import option
from diptych_protocol.errors import converted
from diptych_protocol.field_ranges import descriptions

OUR_NAMES: Final = {
    "served_model_name": "served_name",
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "kv_transfer_config": "kv_transfer",
}
"""vLLM's name of a field -> ours, where they differ."""

OF_THE_MODEL: Final = ("tokenizer", "quantization")
"""Arguments that can only repeat what the model's files say."""


class EngineArgs(ForeignArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `EngineConfig` whose fields may also be given under vLLM's names, and further arguments
    for the client of the engine.

    If both names are given, vLLM's has precedence.
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
        """Return the engine's configuration.

        Raises `InvalidRequestError` for a value out of range, and `UnsupportedFeatureError` for a
        value of vLLM's that requests what does not exist here.
        """
        warn_of_environment()
        Foreign("it is the model's own", (self.model,)).judge("tokenizer", self.tokenizer)
        if self.quantization is not None:
            stored = resolve_model(self.model).stored_as
            why = f"the files of {self.model} are {stored or 'not quantised'}"
            Foreign(why, (stored, f"{stored}_marlin")).judge("quantization", self.quantization)
        judge_foreign(self)
        values = {name: getattr(self, name) for name in EngineConfig.__struct_fields__}
        for theirs, ours in OUR_NAMES.items():
            value = getattr(self, theirs)
            if value is not None:
                values[ours] = value
        if isinstance(values["speculative_config"], dict):  # as vLLM takes it
            name = "speculative_config"
            values[name] = converted(values[name], SpeculativeConfig, name, name)
        config = EngineConfig(**values)
        config.check()
        return config

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each field, which also has vLLM's name; return the parser."""
        theirs = {ours: name for name, ours in OUR_NAMES.items()}
        types, meanings = get_type_hints(cls), descriptions(cls)
        for field in msgspec.structs.fields(cls):
            if field.name in OUR_NAMES:
                continue
            names = [field.name, *([theirs[field.name]] if field.name in theirs else [])]
            flags = [f"--{name.replace('_', '-')}" for name in names]
            if field.name in (*foreign_fields(ForeignArgs), *OF_THE_MODEL):
                parser.add_argument(*flags, dest=field.name, **_FOREIGN_OPTION)
                continue
            parser.add_argument(
                *flags,
                dest=field.name,
                help=meanings.get(field.name, "").replace("%", "%%"),
                **option(field, types[field.name]),
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the arguments from the result of a parser with `add_cli_args`; other attributes
        are ignored."""
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
