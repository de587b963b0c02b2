"""The control calls of an engine's owner to its core, each as one type.

A call's fields are its arguments, in the order of the message (`UtilityCall.args`). Its class
declares its answer, its name in the message, how long the core may take, and its route on an
engine's admin port. `ControlCalls` gives it a name. These are derived from the two: the method of
clients that wait, the method of clients that block, the HTTP route with its body and answer, and
the refusal of a client that owns no engine. The core runs a function of the same name and
parameters.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    overload,
)

import msgspec
from msgspec import Meta

from diptych_protocol.errors import InvalidRequestError
from diptych_protocol.weights import (
    LoRARequest,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

A = TypeVar("A")
P = ParamSpec("P")

PauseMode = Literal["abort", "wait", "keep"]
WakeUpTag = Annotated[str, Meta(pattern="^(weights|kv_cache|scheduling)$")]

PROFILE_PREFIX: Final = re.compile(r"[-\w.]{0,128}", re.ASCII)
CALL_TIMEOUT_S: Final = 60.0
CALL_FUNCTION: Final = "call_function"
APPLY_MODEL: Final = "apply_model"
"""Worker methods that run a named function; see `EngineConfig.allow_functions`."""
REST_TIMEOUT_S: Final = 3600.0
"""The time limit for a pause that waits for running requests, which take as long as they do."""
MOVE_TIMEOUT_S: Final = 1800.0
"""The time limit for saving or restoring weights; those of a large model come from a slow disk."""
FILES_TIMEOUT_S: Final = 600.0
"""The time limit for reading or receiving files of weights."""


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


class ControlCall(msgspec.Struct, Generic[A], frozen=True, forbid_unknown_fields=True):
    """The base of all calls; `A` is the type of the answer for the caller."""

    METHOD: ClassVar[str]
    """Its name in a `UtilityCall`."""
    PATH: ClassVar[str] = ""
    """Its route on an engine's admin port, below `/admin/`; empty if it has none of its own."""
    READS: ClassVar[bool] = False
    """Whether it changes nothing, so that its route is a GET."""
    SILENT: ClassVar[bool] = False
    """Whether the core may be too busy to answer anything else meanwhile, and yet be well."""
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
        """Whether the front-end also has to forget the images that it prepared."""
        return False

    def read(self, answer: Any) -> A:
        """Return the answer for the caller of a method, from the core's answer."""
        (base,) = type(self).__orig_bases__  # type: ignore[attr-defined]
        (wanted,) = get_args(base)
        # A caller who gets nothing is not told what the core has to say about it.
        return cast(A, None if wanted is type(None) else msgspec.convert(answer, wanted))

    def report(self, answer: Any) -> msgspec.Struct | None:
        """Return the admin port's answer, from the core's answer; None to show the
        engine's state."""
        return None


class PauseGeneration(ControlCall[None], frozen=True):
    METHOD = "pause_generation"
    PATH = "pause"
    TIMEOUT_S = REST_TIMEOUT_S
    mode: PauseMode = "abort"
    clear_cache: bool = True

    @property
    def forgets_images(self) -> bool:
        return self.clear_cache

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError` for a mode that does not exist."""
        _check_mode(self.mode)


class ResumeGeneration(ControlCall[None], frozen=True):
    METHOD = "resume_generation"
    PATH = "resume"


class IsPaused(ControlCall[bool], frozen=True):
    METHOD = PATH = "is_paused"
    READS = True


class Sleep(ControlCall[None], frozen=True):
    METHOD = PATH = "sleep"
    TIMEOUT_S = REST_TIMEOUT_S + MOVE_TIMEOUT_S
    SILENT = True
    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: PauseMode = "abort"

    @property
    def forgets_images(self) -> bool:
        return self.level != 0

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError` for a mode that does not exist."""
        _check_mode(self.mode)


class WakeUp(ControlCall[None], frozen=True):
    METHOD = PATH = "wake_up"
    TIMEOUT_S = MOVE_TIMEOUT_S
    SILENT = True
    tags: Sequence[WakeUpTag] | None = None


class IsSleeping(ControlCall[bool], frozen=True):
    METHOD = PATH = "is_sleeping"
    READS = True


class ResetPrefixCache(ControlCall[bool], frozen=True):
    METHOD = PATH = "reset_prefix_cache"
    reset_running_requests: bool = False
    reset_connector: bool = False

    @property
    def timeout_s(self) -> float:
        """Return how long the core may take: leases are revoked first, and may be
        read until then."""
        return REST_TIMEOUT_S if self.reset_connector else CALL_TIMEOUT_S

    def report(self, answer: Any) -> ResetReport:
        return ResetReport(bool(answer))


class ResetMmCache(ControlCall[None], frozen=True):
    METHOD = PATH = "reset_mm_cache"

    @property
    def forgets_images(self) -> bool:
        return True

    def report(self, answer: Any) -> ResetReport:
        return ResetReport(True, answer)


class ResetEncoderCache(ControlCall[None], frozen=True):
    METHOD = PATH = "reset_encoder_cache"

    def report(self, answer: Any) -> ResetReport:
        return ResetReport(True, answer)


class StartProfile(ControlCall[None], frozen=True):
    METHOD = PATH = "start_profile"
    profile_prefix: str | None = None
    """The beginning of the files' names; None or empty: the engine's id."""

    def __post_init__(self) -> None:
        """Raise `InvalidRequestError` for an invalid beginning of a file's name."""
        prefix = self.profile_prefix or ""
        if not PROFILE_PREFIX.fullmatch(prefix):
            raise InvalidRequestError(
                "profile_prefix must be at most 128 letters, digits, '-', '_' and '.', "
                f"not {prefix[:128]!r}",
                param="profile_prefix",
            )

    def report(self, answer: Any) -> Done:
        return Done()


class StopProfile(ControlCall[None], frozen=True):
    METHOD = PATH = "stop_profile"
    TIMEOUT_S = MOVE_TIMEOUT_S
    SILENT = True

    def report(self, answer: Any) -> ProfileReport:
        return ProfileReport(answer)


class FilesCall(ControlCall[A], Generic[A], frozen=True):
    """A call for which files of weights may be read or received."""

    TIMEOUT_S = FILES_TIMEOUT_S
    SILENT = True


class AddLora(FilesCall[bool], frozen=True):
    METHOD = "add_lora"
    lora_request: LoRARequest


class RemoveLora(FilesCall[bool], frozen=True):
    METHOD = "remove_lora"
    lora_id: int


class ListLoras(FilesCall[set[int]], frozen=True):
    METHOD = "list_loras"


class PinLora(FilesCall[bool], frozen=True):
    METHOD = "pin_lora"
    lora_id: int


class InitWeightTransferEngine(FilesCall[None], frozen=True):
    METHOD = "init_weight_transfer_engine"
    init_request: WeightTransferInitRequest


class StartWeightUpdate(FilesCall[None], frozen=True):
    METHOD = PATH = "start_weight_update"
    is_checkpoint_format: bool = True

    def report(self, answer: Any) -> Done:
        return Done()


class UpdateWeights(FilesCall[None], frozen=True):
    METHOD = "update_weights"
    request: WeightTransferUpdateRequest


class FinishWeightUpdate(FilesCall[None], frozen=True):
    METHOD = PATH = "finish_weight_update"

    def report(self, answer: Any) -> Done:
        return Done()


class ReloadWeights(FilesCall[None], frozen=True):
    METHOD = PATH = "reload_weights"

    def report(self, answer: Any) -> Done:
        return Done()


# --- their names ------------------------------------------------------------------------------


class Named(Generic[P, A]):
    """A call as a method, which is awaited in an `AwaitedCalls` and blocks in a `BlockingCalls`."""

    def __init__(self, kind: Callable[P, ControlCall[A]]) -> None:
        self.kind = cast(type[ControlCall[Any]], kind)

    def __set_name__(self, owner: type, name: str) -> None:
        kind = self.kind

        async def awaited(client: AwaitedCalls, *args: Any, **kwargs: Any) -> Any:
            call = kind(*args, **kwargs)
            return call.read(await client.control(call))

        def blocking(client: BlockingCalls, *args: Any, **kwargs: Any) -> Any:
            call = kind(*args, **kwargs)
            return call.read(client.control(call))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(kind)
        signature = signature.replace(parameters=[own, *signature.parameters.values()])
        methods: tuple[Any, Any] = awaited, blocking
        for method in methods:
            method.__name__, method.__qualname__ = name, f"{owner.__qualname__}.{name}"
            method.__doc__, method.__signature__ = kind.__doc__, signature
        self._awaited, self._blocking = methods

    @overload
    def __get__(
        self, client: AwaitedCalls, owner: type | None = None
    ) -> Callable[P, Coroutine[Any, Any, A]]: ...

    @overload
    def __get__(self, client: BlockingCalls, owner: type | None = None) -> Callable[P, A]: ...

    def __get__(self, client: Any, owner: Any = None) -> Any:
        method: Any = self._awaited if issubclass(owner, AwaitedCalls) else self._blocking
        return method.__get__(client, owner)


class ControlCalls:
    """All calls by the names that callers use."""

    pause_generation = Named(PauseGeneration)
    resume_generation = Named(ResumeGeneration)
    is_paused = Named(IsPaused)
    sleep = Named(Sleep)
    wake_up = Named(WakeUp)
    is_sleeping = Named(IsSleeping)
    reset_prefix_cache = Named(ResetPrefixCache)
    reset_mm_cache = Named(ResetMmCache)
    reset_encoder_cache = Named(ResetEncoderCache)
    start_profile = Named(StartProfile)
    stop_profile = Named(StopProfile)
    add_lora = Named(AddLora)
    remove_lora = Named(RemoveLora)
    list_loras = Named(ListLoras)
    pin_lora = Named(PinLora)
    init_weight_transfer_engine = Named(InitWeightTransferEngine)
    start_weight_update = Named(StartWeightUpdate)
    update_weights = Named(UpdateWeights)
    finish_weight_update = Named(FinishWeightUpdate)
    reload_weights = Named(ReloadWeights)


CONTROL_CALLS: Final = tuple(
    named.kind for named in vars(ControlCalls).values() if isinstance(named, Named)
)


class AwaitedCalls(ControlCalls, ABC):
    """All calls, for a client of programs with an event loop."""

    @abstractmethod
    async def control(self, call: ControlCall[Any]) -> Any:
        """Make a call. Returns the core's answer as it is."""


class BlockingCalls(ControlCalls, ABC):
    """All calls, for an engine of programs without an event loop."""

    @abstractmethod
    def control(self, call: ControlCall[Any]) -> Any:
        """Make a call. Returns the core's answer as it is."""


def _check_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        modes = ", ".join(get_args(PauseMode))
        raise InvalidRequestError(f"mode must be one of {modes}, not {mode!r}", param="mode")
