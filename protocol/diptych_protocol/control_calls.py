"""What the owner of one engine may ask of its core, each call as one type.

A call's fields are its arguments, in the order in which they travel (`UtilityCall.args`). Its class
says under which name it travels, how long the core may take, and where an engine's admin port has
it. These follow from it: the client's `control`, the HTTP route with its body and answer, and the
refusal of a client that owns no engine. The core runs a function of the same name and parameters.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final, Literal, get_args

import msgspec

from diptych_protocol.errors import InvalidRequestError
from diptych_protocol.weights import (
    LoRARequest,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

PauseMode = Literal["abort", "wait", "keep"]
WakeUpTag = Literal["weights", "kv_cache", "scheduling"]

PROFILE_PREFIX: Final = re.compile(r"[-\w.]{0,128}", re.ASCII)
CALL_TIMEOUT_S: Final = 60.0
CALL_FUNCTION: Final = "call_function"
APPLY_MODEL: Final = "apply_model"
"""Worker methods that run a named function; see `EngineConfig.allow_functions`."""
REST_TIMEOUT_S: Final = 3600.0
"""Until requests have come to rest: a pause that waits for them takes as long as they do."""
MOVE_TIMEOUT_S: Final = 1800.0
"""Until weights are put aside or back; those of a large model come from a slow disk."""
FILES_TIMEOUT_S: Final = 600.0
"""Until files of weights are read or received."""


# --- what the admin port answers --------------------------------------------------------------


class ResetReport(msgspec.Struct, frozen=True, omit_defaults=True):
    done: bool
    """False: blocks are in use, and nothing was forgotten."""
    note: str = ""


class ProfileReport(msgspec.Struct, frozen=True):
    files: list[str]
    """The traces that were written, in the engine's pod."""


class Done(msgspec.Struct, frozen=True):
    done: bool = True


# --- the calls --------------------------------------------------------------------------------


class ControlCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all calls."""

    METHOD: ClassVar[str]
    """Its name in a `UtilityCall`."""
    PATH: ClassVar[str] = ""
    """Its route on an engine's admin port, behind `/admin/`; empty: it has none of its own."""
    READS: ClassVar[bool] = False
    """It changes nothing, so its route is a GET."""
    SILENT: ClassVar[bool] = False
    """The core may be too busy to answer anything else meanwhile, and yet be well."""
    TIMEOUT_S: ClassVar[float] = CALL_TIMEOUT_S

    @property
    def timeout_s(self) -> float:
        """How long the core may take, in seconds."""
        return self.TIMEOUT_S

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the `UtilityCall`."""
        return msgspec.structs.astuple(self)

    @property
    def forgets_images(self) -> bool:
        """The front-end, too, is to forget the images that it prepared."""
        return False

    def report(self, answer: Any) -> msgspec.Struct | None:
        """What the admin port makes of the core's answer; None: it shows the engine's state."""
        return None


class PauseGeneration(ControlCall, frozen=True):
    METHOD = "pause_generation"
    PATH = "pause"
    TIMEOUT_S = REST_TIMEOUT_S
    mode: PauseMode = "abort"
    clear_cache: bool = True

    @property
    def forgets_images(self) -> bool:
        return self.clear_cache

    def __post_init__(self) -> None:
        """Raises `InvalidRequestError` for a mode that does not exist."""
        _check_mode(self.mode)


class ResumeGeneration(ControlCall, frozen=True):
    METHOD = "resume_generation"
    PATH = "resume"


class IsPaused(ControlCall, frozen=True):
    METHOD = PATH = "is_paused"
    READS = True


class Sleep(ControlCall, frozen=True):
    METHOD = PATH = "sleep"
    TIMEOUT_S = REST_TIMEOUT_S + MOVE_TIMEOUT_S
    SILENT = True
    level: Literal[0, 1, 2] = 1
    mode: PauseMode = "abort"

    @property
    def forgets_images(self) -> bool:
        return self.level != 0

    def __post_init__(self) -> None:
        """Raises `InvalidRequestError` for a mode that does not exist."""
        _check_mode(self.mode)


class WakeUp(ControlCall, frozen=True):
    METHOD = PATH = "wake_up"
    TIMEOUT_S = MOVE_TIMEOUT_S
    SILENT = True
    tags: list[WakeUpTag] | None = None


class IsSleeping(ControlCall, frozen=True):
    METHOD = PATH = "is_sleeping"
    READS = True


class ResetPrefixCache(ControlCall, frozen=True):
    METHOD = PATH = "reset_prefix_cache"
    reset_running_requests: bool = False
    reset_connector: bool = False

    @property
    def timeout_s(self) -> float:
        """KV that was lent is called back first, and may be read until then."""
        return REST_TIMEOUT_S if self.reset_connector else CALL_TIMEOUT_S

    def report(self, answer: Any) -> ResetReport:
        return ResetReport(bool(answer))


class ResetMmCache(ControlCall, frozen=True):
    METHOD = PATH = "reset_mm_cache"

    @property
    def forgets_images(self) -> bool:
        return True

    def report(self, answer: Any) -> ResetReport:
        return ResetReport(True, answer)


class ResetEncoderCache(ControlCall, frozen=True):
    METHOD = PATH = "reset_encoder_cache"

    def report(self, answer: Any) -> ResetReport:
        return ResetReport(True, answer)


class StartProfile(ControlCall, frozen=True):
    METHOD = PATH = "start_profile"
    profile_prefix: str = ""
    """The files' names begin with it; empty: with the engine's id."""

    def __post_init__(self) -> None:
        """Raises `InvalidRequestError` for what cannot begin a file's name."""
        if not PROFILE_PREFIX.fullmatch(self.profile_prefix):
            raise InvalidRequestError(
                "profile_prefix must be at most 128 letters, digits, '-', '_' and '.', "
                f"not {self.profile_prefix[:128]!r}",
                param="profile_prefix",
            )

    def report(self, answer: Any) -> Done:
        return Done()


class StopProfile(ControlCall, frozen=True):
    METHOD = PATH = "stop_profile"
    TIMEOUT_S = MOVE_TIMEOUT_S
    SILENT = True

    def report(self, answer: Any) -> ProfileReport:
        return ProfileReport(answer)


class AddLora(ControlCall, frozen=True):
    METHOD = "add_lora"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True
    lora_request: LoRARequest


class RemoveLora(ControlCall, frozen=True):
    METHOD = "remove_lora"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True
    lora_int_id: int


class ListLoras(ControlCall, frozen=True):
    METHOD = "list_loras"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True


class PinLora(ControlCall, frozen=True):
    METHOD = "pin_lora"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True
    lora_int_id: int


class InitWeightTransferEngine(ControlCall, frozen=True):
    METHOD = "init_weight_transfer_engine"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True
    init_request: WeightTransferInitRequest


class StartWeightUpdate(ControlCall, frozen=True):
    METHOD = PATH = "start_weight_update"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True
    is_checkpoint_format: bool = True

    def report(self, answer: Any) -> Done:
        return Done()


class UpdateWeights(ControlCall, frozen=True):
    METHOD = "update_weights"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True
    request: WeightTransferUpdateRequest


class FinishWeightUpdate(ControlCall, frozen=True):
    METHOD = PATH = "finish_weight_update"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True

    def report(self, answer: Any) -> Done:
        return Done()


class ReloadWeights(ControlCall, frozen=True):
    METHOD = PATH = "reload_weights"
    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True

    def report(self, answer: Any) -> Done:
        return Done()


AnyControlCall = (
    PauseGeneration | ResumeGeneration | IsPaused
    | Sleep | WakeUp | IsSleeping
    | ResetPrefixCache | ResetMmCache | ResetEncoderCache
    | StartProfile | StopProfile
    | AddLora | RemoveLora | ListLoras | PinLora
    | InitWeightTransferEngine | StartWeightUpdate | UpdateWeights | FinishWeightUpdate
    | ReloadWeights
)  # fmt: skip
CONTROL_CALLS: Final[tuple[type[ControlCall], ...]] = get_args(AnyControlCall)


def _check_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        modes = ", ".join(get_args(PauseMode))
        raise InvalidRequestError(f"mode must be one of {modes}, not {mode!r}", param="mode")
