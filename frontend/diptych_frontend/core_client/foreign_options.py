"""Options of vLLM's engines as this project has them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, get_type_hints

import msgspec

from diptych_protocol import EngineConfig, InvalidRequestError, UnsupportedFeatureError

log = logging.getLogger(__name__)

_WHY = {"mm_registry": "the model's own processor takes images"}
PREFIX: Final = "VLLM_"


@dataclass(frozen=True)
class Foreign:
    """An option of vLLM's that is only understood here: beside its field, as `Annotated`."""

    why: str
    """What is done instead, or what to use."""
    same: tuple[object, ...] = ()
    """Values that ask for what is done here anyway, besides None."""
    ignored: bool = False
    """Other values change nothing but a line of the log, and are not refused."""

    def judge(self, name: str, value: object) -> None:
        """Raises `UnsupportedFeatureError` for a value that asks for something else."""
        if value is None or any(type(value) is type(s) and value == s for s in self.same):
            return
        if not self.ignored:
            raise UnsupportedFeatureError(f"{name}={value!r} is not supported: {self.why}")
        log.warning("%s=%r changes nothing: %s", name, value, self.why)


@cache
def foreign_fields(kind: type[msgspec.Struct]) -> Mapping[str, Foreign]:
    """The fields of a struct that are vLLM's only."""
    return {
        name: mark
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Foreign)
    }


def judge_foreign(options: msgspec.Struct) -> None:
    """Raise `UnsupportedFeatureError` for the first of such fields that asks for what is not here;
    those that change nothing are logged."""
    for name, mark in foreign_fields(type(options)).items():
        mark.judge(name, getattr(options, name))


@cache
def warn_of_environment() -> None:
    """Say once which of vLLM's variables are set, because none of them is read."""
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    if found:
        log.warning("not read: %s; variables here begin with DIPTYCH_", ", ".join(found))


class ForeignArgs(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments that programs for vLLM often give, and that an engine here has not."""

    tokenizer: Any = None
    """The model itself, or None: judged in `EngineArgs`, which knows the model."""
    enforce_eager: Annotated[
        Any, Foreign("an engine decides itself what it records", (False,), True)
    ] = None
    trust_remote_code: Annotated[
        Any, Foreign("no code of a model's is ever run", (False,), True)
    ] = None
    quantization: Annotated[
        Any, Foreign("the model's file says how its weights are stored", ("gguf",))
    ] = None
    load_format: Annotated[
        Any,
        Foreign(
            "the kind of the model's files decides; for random weights use model='dummy://'",
            ("auto", "gguf", "safetensors"),
        ),
    ] = None
    tokenizer_mode: Annotated[
        Any, Foreign("there is one tokenizer for each model", ("auto", "hf"))
    ] = None
    tokenizer_revision: Annotated[Any, Foreign("the tokenizer is the model's own")] = None
    config_format: Annotated[
        Any, Foreign("the kind of the model's files decides", ("auto", "hf"))
    ] = None
    hf_overrides: Annotated[Any, Foreign("change the model's config.json", ({},))] = None
    hf_token: Annotated[
        Any, Foreign("nothing is fetched here: fetch the model first, see docs/models.md")
    ] = None
    download_dir: Annotated[
        Any, Foreign("nothing is fetched here: fetch the model first, see docs/models.md")
    ] = None
    swap_space: Annotated[Any, Foreign("no block is ever swapped out", (0,), True)] = None
    cpu_offload_gb: Annotated[Any, Foreign("weights stay where the model runs", (0,))] = None
    enable_chunked_prefill: Annotated[
        Any, Foreign("prompts are always computed in chunks", (True,))
    ] = None
    enable_lora: Annotated[
        Any, Foreign("adapters can always be loaded; see max_loras", (True, False))
    ] = None
    max_logprobs: Annotated[Any, Foreign("the limit is fixed", (20,))] = None
    disable_custom_all_reduce: Annotated[
        Any, Foreign("ranks add up through gloo", (True,), True)
    ] = None
    distributed_executor_backend: Annotated[
        Any, Foreign("ranks are processes of one machine", ("mp",))
    ] = None
    speculative_config: Annotated[Any, Foreign("no token is drafted")] = None
    compilation_config: Annotated[
        Any, Foreign("kernels are compiled ahead; there are no levels", (0,))
    ] = None
    max_seq_len_to_capture: Annotated[
        Any, Foreign("an engine decides itself what it records", (), True)
    ] = None
    guided_decoding_backend: Annotated[
        Any, Foreign("llguidance compiles forms", ("auto", "guidance"))
    ] = None
    limit_mm_per_prompt: Annotated[
        Any, Foreign("a prompt has as many images as fit into its context")
    ] = None
    task: Annotated[Any, Foreign("a model does all that it can", ("auto", "generate", "embed"))] = (
        None
    )
    runner: Annotated[
        Any, Foreign("a model does all that it can", ("auto", "generate", "pooling"))
    ] = None
    disable_log_requests: Annotated[
        Any, Foreign("requests are logged with enable_log_requests", (True,))
    ] = None


def refuse_foreign(**options: object) -> None:
    """Raise `UnsupportedFeatureError` unless each of the named options is None: not asked for."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedFeatureError(f"{name} must be left alone: {_WHY[name]}")


def with_executor(config: EngineConfig, executor_class: object) -> EngineConfig:
    """The configuration with this class to run the model; None leaves it as it is.

    The class travels by its name, because the model may run in another process. Raises
    `InvalidRequestError` for what has no name that can be imported.
    """
    if executor_class is None:
        return config
    if not isinstance(executor_class, type):
        raise _unnamed(executor_class, "executor_class")
    return msgspec.structs.replace(
        config, executor_class=importable_name(executor_class, "executor_class")
    )


def importable_name(thing: object, param: str) -> str:
    """`module:name` of a class or function, by which another process can import it.

    Raises `InvalidRequestError`, with `param`, for a lambda, for what was made in a function, and
    for what stands in the program itself: none of them can be imported.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    if not isinstance(module, str) or module == "__main__" or "<" in name:
        raise _unnamed(thing, param)
    return f"{module}:{name}"


def _unnamed(thing: object, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} must be something that can be imported from a module, not {thing!r}", param=param
    )
