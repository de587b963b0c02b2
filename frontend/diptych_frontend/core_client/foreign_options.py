"""Accepts or refuses options of vLLM's engines that this project has in another form, or not at
all."""

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

PREFIX: Final = "VLLM_"


@dataclass(frozen=True)
class Foreign:
    """An option of vLLM's that is only understood here. It annotates the option's field
    (`Annotated`)."""

    why: str
    """What happens instead, or what to use."""
    same: tuple[object, ...] = ()
    """Values, besides None, that request what happens here anyway."""
    ignored: bool = False
    """Other values are not refused, but only logged."""

    def judge(self, name: str, value: object) -> None:
        """Raise `UnsupportedFeatureError` for a value that requests something else."""
        if value is None or any(type(value) is type(s) and value == s for s in self.same):
            return
        if not self.ignored:
            raise UnsupportedFeatureError(f"{name}={value!r} is not supported: {self.why}")
        log.warning("%s=%r changes nothing: %s", name, value, self.why)


MM_REGISTRY: Final = Foreign("the model's own processor takes images")


@cache
def foreign_fields(kind: type[msgspec.Struct]) -> Mapping[str, Foreign]:
    """Return the fields of a struct that only vLLM has."""
    return {
        name: mark
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Foreign)
    }


def judge_foreign(options: msgspec.Struct) -> None:
    """Raise `UnsupportedFeatureError` for the first of such fields that requests what does not
    exist here; log those that change nothing."""
    for name, mark in foreign_fields(type(options)).items():
        mark.judge(name, getattr(options, name))


@cache
def warn_of_environment() -> None:
    """Warn once of vLLM's variables that are set, because none of them is read."""
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    if found:
        log.warning("not read: %s; variables here begin with DIPTYCH_", ", ".join(found))


class ForeignArgs(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments that programs for vLLM often pass, and that an engine here does not have."""

    tokenizer: Any = None
    """The model itself, or None. `EngineArgs`, which knows the model, checks it."""
    enforce_eager: Annotated[
        Any, Foreign("an engine decides itself what it records", (False,), True)
    ] = None
    trust_remote_code: Annotated[
        Any, Foreign("no code of a model's is ever run", (False,), True)
    ] = None
    quantization: Any = None
    """What the model's files say, or None. `EngineArgs` compares."""
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


def with_executor(config: EngineConfig, executor_class: object) -> EngineConfig:
    """Return the configuration with this class to run the model; None leaves it as it is.

    Only the class's name is sent, because the model may run in another process. Raises
    `InvalidRequestError` for a class whose name cannot be imported.
    """
    if executor_class is None:
        return config
    if not isinstance(executor_class, type):
        raise _unnamed(executor_class, "executor_class")
    return msgspec.structs.replace(
        config, executor_class=importable_name(executor_class, "executor_class")
    )


def importable_name(thing: object, param: str) -> str:
    """Return `module:name` of a class or function, by which another process can import it.

    Raises `InvalidRequestError`, with `param`, for a lambda, for an object defined in a function,
    and for one defined in the program itself: none of them can be imported.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    if not isinstance(module, str) or module == "__main__" or "<" in name:
        raise _unnamed(thing, param)
    return f"{module}:{name}"


def _unnamed(thing: object, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} must be something that can be imported from a module, not {thing!r}", param=param
    )
