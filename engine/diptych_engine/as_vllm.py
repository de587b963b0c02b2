"""Modules under vLLM's names, for programs that were written for it.

`from vllm.v1.engine.async_llm import AsyncLLM` becomes `from
diptych_engine.as_vllm.v1.engine.async_llm import AsyncLLM`. Only the modules and names in `MODULES`
exist. Each name stands for a class of ours, which is loaded at its first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from diptych_engine.execution.runner import ModelRunner
    from diptych_protocol import EngineConfig

_PROTOCOL: Final = "diptych_protocol"
_CLIENTS: Final = "diptych_frontend.core_client"
_TEXT: Final = "diptych_frontend.text"
_V0: Final = "diptych_frontend.v0"
_WIRE: Final = (
    "FINISH_REASON_STRINGS", "EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequest",
    "EngineCoreRequestType", "FinishReason", "ReconfigureDistributedRequest",
    "ReconfigureRankType", "UtilityOutput", "UtilityResult",
)  # fmt: skip

MODULES: Final[dict[str, dict[str, str]]] = {
    "": {
        "LLM": "diptych_engine.serving.llm",
        "AsyncEngineArgs": f"{_CLIENTS}.engine_args:EngineArgs",
        "EngineArgs": f"{_CLIENTS}.engine_args",
        "LLMEngine": "diptych_engine.serving.llm_engine",
        "PoolingParams": _PROTOCOL,
        "SamplingParams": f"{_V0}.params",
    },
    "config": {"DecodingConfig": f"{_V0}.params", "VllmConfig": f"{_PROTOCOL}:EngineConfig"},
    "engine": {},
    "engine.arg_utils": {
        "AsyncEngineArgs": f"{_CLIENTS}.engine_args:EngineArgs",
        "EngineArgs": f"{_CLIENTS}.engine_args",
    },
    "engine.multiprocessing": {
        "ENGINE_DEAD_ERROR": f"{_V0}.mq_client",
        "MQEngineDeadError": f"{_V0}.sockets",
    },
    "engine.multiprocessing.client": {
        "MQClientClosedError": f"{_V0}.mq_client",
        "MQLLMEngineClient": f"{_V0}.mq_client",
        "logger": f"{_V0}.mq_client",
    },
    "engine.protocol": dict.fromkeys(
        (
            "EngineClient",
            "EngineInput",
            "PauseMode",
            "StreamingInput",
            "WeightTransferInitRequest",
            "WeightTransferUpdateRequest",
        ),
        _PROTOCOL,
    ),
    "envs": {"VLLM_RPC_TIMEOUT": f"{_V0}.mq_client"},
    "inputs": dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), _PROTOCOL),
    "inputs.preprocess": {"InputPreprocessor": f"{_TEXT}.input_processor:InputProcessor"},
    "lora": {},
    "lora.request": {"LoRARequest": _PROTOCOL},
    "outputs": dict.fromkeys(
        ("CompletionOutput", "PoolingOutput", "PoolingRequestOutput", "RequestOutput"), _PROTOCOL
    ),
    "pooling_params": {"PoolingParams": _PROTOCOL},
    "prompt_adapter": {},
    "prompt_adapter.request": {"PromptAdapterRequest": f"{_V0}.params"},
    "sampling_params": {
        "GuidedDecodingParams": f"{_V0}.params",
        "RequestOutputKind": _PROTOCOL,
        "SamplingParams": f"{_V0}.params",
        "StructuredOutputsParams": _PROTOCOL,
    },
    "transformers_utils": {},
    "transformers_utils.tokenizer_group": {"TokenizerGroup": f"{_V0}.tokenizer_group"},
    "usage": {},
    "usage.usage_lib": {"UsageContext": _PROTOCOL},
    "utils": {"Device": f"{_V0}.params"},
    "v1": {},
    "v1.engine": dict.fromkeys(_WIRE, _PROTOCOL),
    "v1.engine.async_llm": {"AsyncLLM": f"{_CLIENTS}.async_llm"},
    "v1.engine.coordinator": {"DPCoordinator": f"{_CLIENTS}.group:WaveCoordinator"},
    "v1.engine.core": {"EngineCore": "diptych_engine.control.core"},
    "v1.engine.core_client": {
        "AsyncMPClient": f"{_CLIENTS}.client:CoreClient",
        "InprocClient": "diptych_engine.serving.in_process_core:InProcessCore",
        "SyncMPClient": f"{_CLIENTS}.sync_client:SyncCoreClient",
    },
    "v1.engine.detokenizer": {"IncrementalDetokenizer": f"{_TEXT}.detokenizer:Detokenizer"},
    "v1.engine.exceptions": dict.fromkeys(("EngineDeadError", "EngineGenerateError"), _PROTOCOL),
    "v1.engine.input_processor": {"InputProcessor": f"{_TEXT}.input_processor"},
    "v1.engine.llm_engine": {"LLMEngine": "diptych_engine.serving.llm_engine"},
    "v1.engine.logprobs": {"LogprobsProcessor": f"{_TEXT}.collector:PromptLogprobs"},
    "v1.engine.output_processor": {
        "OutputProcessor": f"{_TEXT}.output_processor",
        "RequestOutputCollector": f"{_TEXT}.collector:Collector",
    },
    "v1.engine.parallel_sampling": {"ParentRequest": f"{_TEXT}.output_processor"},
    "v1.engine.utils": {"CoreEngineProcManager": f"{_CLIENTS}.group:CoreGroup"},
    "v1.executor": {"Executor": __name__},
    "v1.executor.abstract": {"Executor": __name__},
    "v1.metrics": {},
    "v1.metrics.loggers": {
        "LoggingStatLogger": "diptych_frontend.observability.stat_loggers",
        "StatLoggerBase": "diptych_frontend.observability.stat_loggers:StatLogger",
        "StatLoggerFactory": "diptych_frontend.observability.stat_loggers",
        "StatLoggerManager": "diptych_frontend.observability.stat_loggers",
    },
    "v1.metrics.stats": {
        "FinishedRequestStats": "diptych_frontend.observability.stat_loggers",
        "IterationStats": "diptych_frontend.observability.stat_loggers",
        "SchedulerStats": _PROTOCOL,
    },
    "v1.metrics.reader": dict.fromkeys(
        ("Counter", "Gauge", "Histogram", "Metric"),
        "diptych_frontend.observability.metric_snapshot",
    ),
}
"""Module -> name there -> our module, or `module:name` where our name differs."""


class Executor:
    """Stands for vLLM's base class of executors; ours is `ModelRunner`."""

    @staticmethod
    def get_class(vllm_config: EngineConfig) -> type[ModelRunner]:
        """Return the class that will run the model. Raises `InvalidRequestError` for an unsuitable
        class."""
        from diptych_engine.serving.build_core import executor_class

        return executor_class(vllm_config)


class _Module(ModuleType):
    """One module of vLLM's."""

    def __init__(self, path: str, names: dict[str, str]) -> None:
        super().__init__(f"{__name__}.{path}", f"Names of vLLM's module {path}: {sorted(names)}.")
        self.__path__: list[str] = []
        self.__all__ = sorted(names)
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return _find(self.__name__, self._names, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names]


def _find(module: str, names: dict[str, str], name: str) -> Any:
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, own_name = names[name].partition(":")
    return getattr(import_module(home), own_name or name)


def __getattr__(name: str) -> Any:
    return _find(__name__, MODULES[""], name)


__path__: list[str] = []
for _path, _names in MODULES.items():
    if _path:
        _parent, _, _last = f"{__name__}.{_path}".rpartition(".")
        sys.modules[f"{_parent}.{_last}"] = _module = _Module(_path, _names)
        setattr(sys.modules[_parent], _last, _module)
