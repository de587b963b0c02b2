"""Turns prompts and conversations into token ids: the `Renderer` of every client here."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, Final

import msgspec

from diptych_frontend.images.decoding import GivenImage, as_given, bytes_of_url
from diptych_frontend.images.image_processor import ImageProcessor
from diptych_frontend.model_files.model_source import ModelSource
from diptych_frontend.text.prompt_embeds import check_embeds
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import InvalidRequestError, PromptType, TokensPrompt
from diptych_protocol.multimodal import MultiModalCacheStats

PARAM = "tokenization_kwargs"


class Tokenization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options, named as those of Hugging Face's tokenizers. They affect texts only: a prompt of
    token ids is not tokenised."""

    add_special_tokens: bool = True
    """Whether to add the tokens that the model expects at the beginning of a text."""
    truncation: bool = False
    """Whether to keep only the first `max_length` tokens."""
    max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """None: as many as the model can hold."""


AS_USUAL = Tokenization()
WITHOUT_SPECIAL_TOKENS = Tokenization(add_special_tokens=False)


def tokenization(kwargs: object) -> Tokenization:
    """Parse `tokenization_kwargs`. Raises `InvalidRequestError` for any other argument."""
    if kwargs is None:
        return AS_USUAL
    if not isinstance(kwargs, dict):
        raise InvalidRequestError(f"{PARAM} must be a dict", param=PARAM)
    try:
        wanted = msgspec.convert(kwargs, Tokenization)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        known = ", ".join(Tokenization.__struct_fields__)
        raise InvalidRequestError(f"{PARAM} takes {known}: {exc}", param=PARAM) from None
    if wanted.max_length is not None and not wanted.truncation:
        raise InvalidRequestError(f"{PARAM}: max_length needs truncation=True", param=PARAM)
    return wanted


ROLES: Final = ("system", "developer", "user", "assistant", "tool")
IMAGE_PART: Final = {"type": "image"}
"""Stands for an image in the content for a template."""


def plain_message(message: Any, index: int, images: list[GivenImage] | None) -> dict[str, Any]:
    """Return a message with its content as one string or, for a model that takes images, as a list
    of parts.

    images: collects the images of the message, in their order; None: the model takes text only.

    Raises `InvalidRequestError`, naming the part, for an invalid message.
    """
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    content, where = message.get("content"), f"{where}.content"
    if images is None:
        return {**message, "content": _content_text(content, where)}
    return {**message, "content": _content_parts(content, where, images)}


def _content_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        return text_field(content, where)
    texts = []
    for index, part in enumerate(content):
        if _kind(part) != "text":
            raise InvalidRequestError(
                f"{where}[{index}] is of type {_kind(part)!r}; this model takes only text parts",
                param=f"{where}[{index}]",
            )
        texts.append(text_field(part.get("text"), f"{where}[{index}].text"))
    return "\n".join(texts)


def _content_parts(content: Any, where: str, images: list[GivenImage]) -> list[dict[str, str]]:
    if not isinstance(content, list):
        return [{"type": "text", "text": _content_text(content, where)}]
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        match _kind(part):
            case "text":
                parts.append(
                    {"type": "text", "text": text_field(part.get("text"), f"{place}.text")}
                )
            case "image_url":
                images.append(_image(part.get("image_url"), f"{place}.image_url"))
                parts.append(IMAGE_PART)
            case other:
                raise InvalidRequestError(
                    f"{place} is of type {other!r}; this model takes text and image_url parts",
                    param=place,
                )
    return parts


def _image(image_url: Any, where: str) -> GivenImage:
    url = image_url.get("url") if isinstance(image_url, dict) else image_url
    where = f"{where}.url"
    return GivenImage(bytes_of_url(text_field(url, where), where), where)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else part


def text_field(value: Any, where: str) -> str:
    """Return a string. Raises `InvalidRequestError`, naming the field, for anything else."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where} must be a string", param=where)
    return value


PROMPT_FIELDS: Final = frozenset(
    {
        "prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "multi_modal_data",
        "mm_features",
    }
)  # fmt: skip
"""The supported fields. Others, such as those for sounds, would change the answer, so they are
refused rather than ignored."""
NO_IMAGES: Final = "this model takes no images; leave multi_modal_data out"


class TextRenderer:
    """Renders with the model's own tokenizer and chat template.

    A model without a tokenizer (`dummy://`) takes prompts of token ids only. Safe to use from
    several threads.
    """

    def __init__(self, source: ModelSource, *, skip_tokenizer_init: bool = False) -> None:
        """A model without a tokenizer takes token ids and answers with them."""
        self.model_config = source.config
        self.sampling = source.sampling
        """How to sample where a request does not say."""
        self.tokenizer: Tokenizer | None = None if skip_tokenizer_init else load_tokenizer(source)
        self.vocab_size = source.config.vocab_size
        in_range = msgspec.Meta(ge=0, lt=self.vocab_size)
        self._vocabulary = list[Annotated[int, in_range]]
        self.hidden_size = source.config.hidden_size
        self.max_model_len = source.config.max_position_embeddings
        """What the model itself can hold; an engine may be set to less."""
        vision = source.config.vision
        self.vision = vision
        self._images = None if vision is None else ImageProcessor(vision, self.max_model_len)
        self._asker: str | None = None

    def of(self, *asker: str | None) -> TextRenderer:
        """Return the same renderer for prompts of one asker: it remembers the tokens of long ones,
        see `Tokenizer.encode`. Nobody else can find out from its pace what they were."""
        theirs = copy(self)
        theirs._asker = repr(asker)
        return theirs

    @property
    def chat_template(self) -> str | None:
        """See `Renderer.chat_template`."""
        return None if self.tokenizer is None else self.tokenizer.chat_template

    def render_prompt(
        self, prompt: PromptType, *, tokenization: Tokenization = AS_USUAL
    ) -> TokensPrompt:
        """Tokenise a completion prompt; token ids and embeddings pass through, checked.

        Raises `InvalidRequestError` for an empty prompt, an id outside the vocabulary, or
        embeddings that do not fit the model.
        """
        if isinstance(prompt, str):
            rendered = self._tokenize(prompt, tokenization)
            return rendered if self._images is None else self._with_images(rendered, (), "prompt")
        if isinstance(prompt, list):
            rendered = TokensPrompt(prompt_token_ids=self._checked(prompt))
            return self._with_images(rendered, (), "prompt")
        if not isinstance(prompt, dict):
            raise InvalidRequestError(
                "prompt must be a string or a list of token ids", param="prompt"
            )
        for key, value in prompt.items():
            if key not in PROMPT_FIELDS and value is not None:
                raise InvalidRequestError(
                    f"{str(key)[:100]!r} is not supported in a prompt; leave it out",
                    param=str(key)[:100],
                )
        rendered = self._render_dict(dict(prompt), tokenization)
        if "cache_salt" in prompt:
            rendered["cache_salt"] = text_field(prompt["cache_salt"], "cache_salt")
        return rendered

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> TokensPrompt:
        """See `Renderer.render_chat`."""
        tokenizer = self._require_tokenizer("messages")
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        images: list[GivenImage] = []
        seen = None if self._images is None else images
        text = tokenizer.render_chat(
            [plain_message(message, index, seen) for index, message in enumerate(messages)],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        # The template writes BOS itself where the model wants one.
        rendered = self._tokenize(text, WITHOUT_SPECIAL_TOKENS)
        if self._images is None:
            return rendered
        return self._with_images(rendered, images, "messages")

    def stat_mm_cache(self) -> MultiModalCacheStats | None:
        """Return the counts of the cache of images; None for a model that takes none."""
        return None if self._images is None else self._images.stat()

    def clear_mm_cache(self) -> None:
        """Forget prepared images."""
        if self._images is not None:
            self._images.clear()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Renderer.tokenize`."""
        wanted = AS_USUAL if add_special_tokens else WITHOUT_SPECIAL_TOKENS
        return self._tokenize(text, wanted)["prompt_token_ids"]

    def token_names(self, token_ids: list[int]) -> list[str]:
        """See `Renderer.token_names`."""
        return self._require_tokenizer("prompt").token_names(token_ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence of tokens; empty if the model has no tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `InvalidRequestError` if none is loaded."""
        return self._require_tokenizer("model")

    def _render_dict(self, prompt: dict[str, Any], tokenization: Tokenization) -> TokensPrompt:
        if prompt.get("prompt_embeds") is not None:
            if prompt.get("multi_modal_data"):
                raise InvalidRequestError(
                    "prompt_embeds and multi_modal_data exclude each other",
                    param="multi_modal_data",
                )
            embeds = check_embeds(prompt["prompt_embeds"], self.hidden_size)
            return TokensPrompt(prompt_token_ids=[0] * embeds.shape[0], prompt_embeds=embeds)
        if "prompt_token_ids" in prompt:
            rendered = TokensPrompt(prompt_token_ids=self._checked(prompt["prompt_token_ids"]))
            if prompt.get("prompt") is not None:
                rendered["prompt"] = text_field(prompt["prompt"], "prompt")
            if "mm_features" in prompt:  # rendered already
                rendered["mm_features"] = prompt["mm_features"]
                return rendered
            if self._images is None and "multi_modal_data" not in prompt:
                return rendered
            return self._with_images(rendered, self._given(prompt), "multi_modal_data")
        if "prompt" in prompt:
            text = text_field(prompt["prompt"], "prompt")
            rendered = self._tokenize(text, tokenization)
            return self._with_images(rendered, self._given(prompt), "multi_modal_data")
        raise InvalidRequestError(
            "prompt holds neither text nor token ids nor embeddings", param="prompt"
        )

    def _given(self, prompt: dict[str, Any]) -> list[GivenImage]:
        """The images of `multi_modal_data`, one or several."""
        data = prompt.get("multi_modal_data")
        if not data:
            return []
        if self._images is None:
            raise InvalidRequestError(NO_IMAGES, param="multi_modal_data")
        if not isinstance(data, dict) or data.keys() != {"image"}:
            raise InvalidRequestError(
                'multi_modal_data must be of the form {"image": IMAGE or list of them}',
                param="multi_modal_data",
            )
        images = data["image"] if isinstance(data["image"], list) else [data["image"]]
        return [as_given(image, "multi_modal_data.image") for image in images]

    def _with_images(
        self, rendered: TokensPrompt, images: Sequence[GivenImage], where: str
    ) -> TokensPrompt:
        """A prompt with its image tokens expanded; unchanged for a model that takes none."""
        if self._images is None:
            return rendered
        token_ids, features = self._images.place(
            rendered["prompt_token_ids"], images, self._encode_marker, where
        )
        if features:
            rendered["prompt_token_ids"], rendered["mm_features"] = token_ids, features
        return rendered

    def _encode_marker(self, text: str) -> list[int]:
        return self._require_tokenizer("prompt").encode(text, add_special_tokens=False)

    def _tokenize(self, text: str, wanted: Tokenization) -> TokensPrompt:
        tokenizer = self._require_tokenizer("prompt")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the text holds a lone surrogate, which is not a character", param="prompt"
            ) from None
        if not wanted.truncation and tokenizer.exceeds(text, self.max_model_len):
            raise InvalidRequestError(
                f"the prompt has more tokens than this model can hold, {self.max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        token_ids = tokenizer.encode(
            text, add_special_tokens=wanted.add_special_tokens, asker=self._asker
        )
        if wanted.truncation:
            token_ids = token_ids[: wanted.max_length or self.max_model_len]
        if not token_ids or tokenizer.highest_id >= self.vocab_size:
            token_ids = self._checked(token_ids)
        return TokensPrompt(prompt_token_ids=token_ids, prompt=text)

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "no tokenizer is loaded for this model; send the prompt as token ids", param=param
            )
        return self.tokenizer

    def _checked(self, token_ids: Any) -> list[int]:
        try:
            ids: list[int] = msgspec.convert(token_ids, self._vocabulary)
        except (msgspec.ValidationError, UnicodeEncodeError) as exc:
            raise InvalidRequestError(self._fault_of(token_ids, exc), param="prompt") from None
        if not ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        return ids

    def _fault_of(self, token_ids: Any, error: Exception) -> str:
        """What is wrong with token ids that the vocabulary does not have."""
        try:
            ids = msgspec.convert(token_ids, list[int])
        except (msgspec.ValidationError, UnicodeEncodeError) as exc:
            return f"prompt token ids: {exc}"
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), error)
        return f"token id {bad} is outside the vocabulary of {self.vocab_size}"


def text_of(prompt: object) -> str | None:
    """Return the text of a prompt that was given as text."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None
