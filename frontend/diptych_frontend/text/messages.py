"""The messages of a conversation, in the form that chat templates expect."""

from __future__ import annotations

from typing import Any, Final

from diptych_frontend.images.decoding import GivenImage, bytes_of_url
from diptych_protocol import InvalidRequestError

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
            f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}",
            param=f"{where}.role",
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
