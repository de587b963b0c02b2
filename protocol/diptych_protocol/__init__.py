"""The contract between Diptych's parts: structs, parameters, errors and the EngineClient seam.

Imports nothing but msgspec and the standard library.
"""

from diptych_protocol.config import CurveKeys, EngineConfig, KVTransferConfig, RouterConfig
from diptych_protocol.engine_client import (
    EngineClient,
    PromptType,
    Renderer,
    TextPrompt,
    TokensPrompt,
)
from diptych_protocol.errors import (
    ClientClosedError,
    DiptychError,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    InvalidRequestError,
    UnsupportedFeatureError,
    UtilityError,
)
from diptych_protocol.kv_transfer_params import KVTransferParams, fingerprint
from diptych_protocol.outputs import CompletionOutput, Logprob, RequestOutput
from diptych_protocol.sampling import RequestOutputKind, SamplingParams
from diptych_protocol.wire import (
    FINISH_REASON_STRINGS,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDescription,
    FinishReason,
    KVTransferStats,
    LogprobsLists,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)

__all__ = [
    "FINISH_REASON_STRINGS",
    "ClientClosedError",
    "CompletionOutput",
    "CurveKeys",
    "DiptychError",
    "EngineClient",
    "EngineConfig",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineDeadError",
    "EngineDescription",
    "EngineGenerateError",
    "EngineOverloadedError",
    "FinishReason",
    "InvalidRequestError",
    "KVTransferConfig",
    "KVTransferParams",
    "KVTransferStats",
    "Logprob",
    "LogprobsLists",
    "PromptType",
    "ReconfigureDistributedRequest",
    "ReconfigureRankType",
    "Renderer",
    "RequestOutput",
    "RequestOutputKind",
    "RouterConfig",
    "SamplingParams",
    "SchedulerStats",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedFeatureError",
    "UtilityCall",
    "UtilityError",
    "UtilityOutput",
    "fingerprint",
]
