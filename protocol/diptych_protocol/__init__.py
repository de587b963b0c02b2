"""The contract between Diptych's parts: structs, parameters, errors and the EngineClient seam.

Imports nothing but msgspec and the standard library.
"""

from diptych_protocol.arrays import Array
from diptych_protocol.config import (
    Batches,
    CurveKeys,
    EngineConfig,
    KVTransferConfig,
    RouterConfig,
    Slo,
    UsageContext,
)
from diptych_protocol.control_calls import AnyControlCall, ControlCall, PauseMode
from diptych_protocol.controlled_client import ControlledClient
from diptych_protocol.engine_client import (
    EmbedsPrompt,
    EngineClient,
    EngineInput,
    PromptType,
    Renderer,
    StreamingInput,
    TextPrompt,
    TokensPrompt,
)
from diptych_protocol.engine_settings import (
    EngineSettings,
    JsonSchemas,
    ReasoningParserName,
    SchedulingPolicy,
)
from diptych_protocol.errors import (
    UNREADABLE,
    ClientClosedError,
    DiptychError,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    InvalidRequestError,
    RefusedByEngineError,
    TenantOverloadedError,
    UnsupportedFeatureError,
    UtilityError,
)
from diptych_protocol.kv_transfer_params import KVTransferParams, fingerprint
from diptych_protocol.multimodal import (
    MultiModalCacheStats,
    MultiModalFeatureSpec,
    PlaceholderRange,
)
from diptych_protocol.outputs import (
    CompletionOutput,
    Logprob,
    RequestJourneyEvent,
    RequestJourneyEventType,
    RequestOutput,
)
from diptych_protocol.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from diptych_protocol.router_settings import RouterSettings
from diptych_protocol.sampling import (
    UNSAID,
    RequestOutputKind,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputsParams,
)
from diptych_protocol.weights import (
    LoRARequest,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
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
    LogprobsTensors,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
    UtilityResult,
)
from diptych_protocol.without_control import WithoutControl

__all__ = [
    "FINISH_REASON_STRINGS",
    "UNREADABLE",
    "UNSAID",
    "AnyControlCall",
    "Array",
    "Batches",
    "ClientClosedError",
    "CompletionOutput",
    "ControlCall",
    "ControlledClient",
    "CurveKeys",
    "DiptychError",
    "EmbedsPrompt",
    "EngineClient",
    "EngineConfig",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineDeadError",
    "EngineDescription",
    "EngineGenerateError",
    "EngineInput",
    "EngineOverloadedError",
    "EngineSettings",
    "FinishReason",
    "InvalidRequestError",
    "JsonSchemas",
    "KVTransferConfig",
    "KVTransferParams",
    "KVTransferStats",
    "LoRARequest",
    "Logprob",
    "LogprobsLists",
    "LogprobsTensors",
    "MultiModalCacheStats",
    "MultiModalFeatureSpec",
    "PauseMode",
    "PlaceholderRange",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "ReasoningParserName",
    "ReconfigureDistributedRequest",
    "ReconfigureRankType",
    "RefusedByEngineError",
    "Renderer",
    "RequestJourneyEvent",
    "RequestJourneyEventType",
    "RequestOutput",
    "RequestOutputKind",
    "RouterConfig",
    "RouterSettings",
    "SamplingDefaults",
    "SamplingParams",
    "SchedulerStats",
    "SchedulingPolicy",
    "Slo",
    "StreamingInput",
    "StructuredOutputsParams",
    "TenantOverloadedError",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedFeatureError",
    "UsageContext",
    "UtilityCall",
    "UtilityError",
    "UtilityOutput",
    "UtilityResult",
    "WeightTransferInitRequest",
    "WeightTransferUpdateRequest",
    "WithoutControl",
    "fingerprint",
]
