"""The parameters of sampling, of how its answer is delivered, and of vectors."""

from __future__ import annotations

import enum
from collections.abc import Collection
from itertools import chain
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from diptych_protocol.errors import InvalidRequestError


class RequestOutputKind(enum.IntEnum):
    """How much of the text each `RequestOutput` carries."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the previous output."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


FORMS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The form that an answer must have: exactly one of the first five is set."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In the notation of Lark, or in GBNF."""
    json_object: bool = False
    """Any JSON object."""
    lenient: bool = False
    """Keywords of a JSON schema that cannot be enforced are ignored instead of refused."""

    @property
    def kind(self) -> str:
        """The name of the field that is set, for a form that was checked."""
        return self._asked()[0]

    def _asked(self) -> list[str]:
        return [name for name in FORMS if getattr(self, name) not in (None, False)]

    def check(self) -> None:
        """Raise `InvalidRequestError` unless exactly one form is given, and it is not empty."""
        asked = self._asked()
        if len(asked) != 1:
            raise InvalidRequestError(
                f"structured_outputs must set exactly one of {', '.join(FORMS)}, "
                f"not {', '.join(asked) or 'none'}",
                param="structured_outputs",
            )
        value = getattr(self, asked[0])
        empty = not value if asked[0] != "json" else value == ""
        if empty or (self.choice is not None and "" in self.choice):
            raise InvalidRequestError(
                f"structured_outputs: {asked[0]} must not be empty", param="structured_outputs"
            )


class SamplingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of one generation, under vLLM's names.

    Sent inside `EngineCoreRequest`, so every field must be a plain value. Call `check()` on
    anything that comes from outside: decoding checks types, `check` checks ranges.
    """

    n: int = 1
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Randomness is a function of (seed, position), so it survives preemption and hand-off."""
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Output tokens; None means up to the model's context length."""
    min_tokens: int = 0
    logprobs: int | None = None
    """How many alternatives to report for each sampled token (0: only the sampled one)."""
    prompt_logprobs: int | None = None
    """How many alternatives to report for each token of the prompt."""
    logit_bias: dict[int, float] | None = None
    """Token id -> a number from -100 to 100 that is added to its logit."""
    bad_words: list[str] = []
    """Texts that must not be generated."""
    bad_words_token_ids: list[list[int]] | None = None
    """The tokens of `bad_words`, which the front-end adds to those given here."""
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: list[str] | None = None
    """Functions of the engine's configuration, as `module:function`, which change the logits in
    this order."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    """Carries `kv_transfer_params`, as in vLLM."""

    def __post_init__(self) -> None:
        """Accept a single stop string as a list of one."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]

    def check(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in range."""
        for field, ok, wanted in (
            ("n", 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= -1, "0 or -1 (whole vocabulary), or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "in (0, 100]"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            (
                "min_tokens",
                0 <= self.min_tokens <= (self.max_tokens or 2**31),
                "between 0 and max_tokens",
            ),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"between 0 and {MAX_LOGPROBS}",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"between 0 and {MAX_LOGPROBS}",
            ),
        ):
            if not ok:
                value = getattr(self, field)
                raise InvalidRequestError(f"{field} must be {wanted}, not {value!r}", param=field)
        self._check_entries()
        if self.structured_outputs is not None:
            self.structured_outputs.check()

    def _check_entries(self) -> None:
        """Name the first wrong entry: there may be thousands."""
        for field, entries, most in (
            ("logit_bias", self.logit_bias, MAX_BIASED),
            ("bad_words", self.bad_words, MAX_STOPS),
            ("bad_words_token_ids", self.bad_words_token_ids, MAX_BAD_SEQUENCES),
            ("stop", self.stop, MAX_STOPS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS),
        ):
            if entries and len(entries) > most:
                raise InvalidRequestError(
                    f"{field} must have at most {most} entries, not {len(entries)}", param=field
                )
        for token_id, bias in (self.logit_bias or {}).items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} must be between -100 and 100, not {bias}",
                    param="logit_bias",
                )
        for field, sequences in (
            ("bad_words", self.bad_words),
            ("bad_words_token_ids", self.bad_words_token_ids or ()),
            ("stop", self.stop),
        ):
            for index, sequence in enumerate(sequences):
                if not 0 < len(sequence) <= MAX_STOP_CHARS:
                    raise InvalidRequestError(
                        f"{field}[{index}] must have a length of 1 to {MAX_STOP_CHARS}, not "
                        f"{len(sequence)}",
                        param=field,
                    )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every token exists."""
        for field, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias or ()),
            ("bad_words_token_ids", chain.from_iterable(self.bad_words_token_ids or ())),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{field}: {token_id} is outside the vocabulary of {vocab_size}",
                        param=field,
                    )

    def check_processors(self, known: Collection[str]) -> None:
        """Raise `InvalidRequestError` for a function that the engine's configuration does not name,
        and for too many functions."""
        wanted = self.logits_processors or ()
        if len(wanted) > MAX_STOPS:
            raise InvalidRequestError(
                f"logits_processors must be at most {MAX_STOPS} functions",
                param="logits_processors",
            )
        for name in wanted:
            if name not in known:
                raise InvalidRequestError(
                    f"logits_processors: {name!r} is none of this engine's functions; name it in "
                    "the engine's option of the same name",
                    param="logits_processors",
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


class SamplingDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Values for the fields of the same names that a request leaves out. None: nothing is said."""

    temperature: (
        Annotated[float, Meta(ge=0, le=100, description="0 takes the likeliest token each time.")]
        | None
    ) = None
    top_p: (
        Annotated[
            float,
            Meta(
                ge=0.001,
                le=1,
                description="Of the likeliest tokens as many as have this probability.",
            ),
        ]
        | None
    ) = None
    top_k: (
        Annotated[
            int, Meta(ge=0, le=2**31 - 1, description="So many of the likeliest tokens; 0: all.")
        ]
        | None
    ) = None
    min_p: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="Tokens whose probability is at least this part of the likeliest's.",
            ),
        ]
        | None
    ) = None
    repetition_penalty: (
        Annotated[
            float,
            Meta(
                ge=0.01,
                le=100,
                description="Above 1, tokens that were there before become less likely.",
            ),
        ]
        | None
    ) = None

    def over(self, others: SamplingDefaults) -> SamplingDefaults:
        """These, and the others' where these say nothing."""
        said = {name: getattr(self, name) for name in self.__struct_fields__}
        chosen = {name: value for name, value in said.items() if value is not None}
        return msgspec.structs.replace(others, **chosen)


UNSAID: Final = SamplingDefaults()
"""The whole distribution of the model, as OpenAI's API has it."""


MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_IDS = 256
MAX_BAD_SEQUENCES = 2 * MAX_STOPS
"""Every bad word may be tokenised in two ways."""
MAX_BIASED = 1024
MAX_STOP_CHARS = 1024


POOLING_TASKS: Final = ("embed", "token_embed")
"""`embed`: one vector for the prompt; `token_embed`: the last hidden state of each token."""


class PoolingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of one pooling request, under vLLM's names."""

    task: str = "embed"
    dimensions: int | None = None
    """Keep only this many leading dimensions (before normalising); None keeps all."""
    normalize: bool = True
    """Scale the vectors to length 1."""

    def check(self) -> None:
        """Raise `InvalidRequestError`, naming the field, unless every value is in range."""
        if self.task not in POOLING_TASKS:
            raise InvalidRequestError(
                f"task {self.task!r} is not supported; this engine pools for "
                f"{', '.join(POOLING_TASKS)}",
                param="task",
            )
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequestError("dimensions must be at least 1", param="dimensions")
