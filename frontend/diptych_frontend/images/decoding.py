"""Accepts images from callers: where bytes may come from, and what a decoder may do.

Everything here has a limit, and nothing is fetched from an address, because a caller could make the
server fetch what only the server can reach.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from diptych_protocol import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES: Final = 16 << 20
"""Limit on an image as it is sent, decoded from base64."""
MAX_PIXELS: Final = 24 << 20
"""Limit on width times height, checked before a single pixel is decoded: 72 MiB of pixels."""
MAX_SIDE: Final = 16_384
"""Limit on width and on height: a decoder's rows and a filter's tables grow with one of them."""
MAX_ASPECT: Final = 200
"""Limit on the ratio of the sides: beyond it, a model sees almost nothing of the shorter one."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""Only these formats, and their first frame: each further decoder is more code to trust."""


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a request."""

    content: bytes | Image
    """The bytes of a file, or an already decoded image in RGB."""
    where: str
    """The request's field that contains it."""


def bytes_of_url(url: str, where: str) -> bytes:
    """Return the image inside a `data:` URL. `where` names the field in errors.

    Raises `InvalidRequestError` for any other URL.
    """
    head, comma, body = url.partition(",")
    if not head.lower().startswith("data:"):
        raise InvalidRequestError(
            f"{where} must be a data: URL, as data:image/png;base64,...: this server fetches no "
            "images; send the image itself",
            param=where,
        )
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequestError(
            f"{where} must be of the form data:image/png;base64,...", param=where
        )
    if len(body) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InvalidRequestError(
            f"{where} is an image of more than {MAX_IMAGE_BYTES} bytes; send a smaller one",
            param=where,
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(f"{where} is not valid base64: {exc}", param=where) from exc


def size_in_header(encoded: bytes, where: str) -> tuple[int, int]:
    """Return width and height from the header of an image file without decoding it.

    Raises `InvalidRequestError` for a file that is no image, is of another format, or is too large,
    and `MemoryError`.
    """
    with _opened(encoded, where) as image:
        return image.size


def decoded(encoded: bytes, where: str) -> Image:
    """Return the pixels of an image file, in RGB and upright.

    Raises as `size_in_header`, and `InvalidRequestError` for a file that cannot be decoded.
    """
    from PIL import ImageOps  # here, as in `_opened`

    with _opened(encoded, where) as image:
        try:
            return _in_rgb(ImageOps.exif_transpose(image))
        except MemoryError:
            raise  # whoever set the bound knows what it was
        except Exception as exc:
            # A decoder of other people's bytes may fail in any way a program can.
            raise _unreadable(exc, where) from exc


def _in_rgb(image: Image) -> Image:
    """Eight bits for each colour, and white where nothing is, as in vLLM: transparent pixels have
    colours that nobody was to see. Pillow cuts grey of sixteen bits off at 255, which is white."""
    if image.mode.startswith("I"):
        import numpy as np
        from PIL import Image

        grey = np.asarray(image).clip(0, 0xFFFF) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    from PIL import Image

    over_white = Image.new("RGB", image.size, "white")
    seen = image.convert("RGBA")
    over_white.paste(seen, mask=seen)
    return over_white


def _opened(encoded: bytes, where: str) -> Image:
    """The file with its header read and its size judged."""
    # Loaded with the first image: most servers never see one.
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError:  # it names an object of ours
        raise _unreadable(ValueError("it is of no such format"), where) from None
    except Exception as exc:  # as in `decoded`
        raise _unreadable(exc, where) from exc
    check_size(image.size, where)
    return image


def _unreadable(cause: Exception, where: str) -> InvalidRequestError:
    why = str(cause)[:200] or type(cause).__name__
    return InvalidRequestError(
        f"{where} is not an image that can be read ({', '.join(FORMATS)}): {why}", param=where
    )


def check_size(size: tuple[int, int], where: str) -> None:
    """Raise `InvalidRequestError` for an image with too many pixels, with none, or with a shape
    that makes it costlier than its number of pixels suggests."""
    width, height = size
    if not 1 <= width * height <= MAX_PIXELS:
        wanted = f"at most {MAX_PIXELS} in all are taken"
    elif max(size) > MAX_SIDE:
        wanted = f"at most {MAX_SIDE} are taken on a side; shrink it or send it in parts"
    elif max(size) > MAX_ASPECT * min(size):
        wanted = f"a side may be at most {MAX_ASPECT} times the other; send it in parts"
    else:
        return
    raise InvalidRequestError(f"{where} has {width} x {height} pixels; {wanted}", param=where)


def as_given(image: Any, where: str) -> GivenImage:
    """Accept an image from a program: the bytes of a file, or an image of Pillow's.

    Raises `InvalidRequestError` for anything else.
    """
    from PIL import Image

    if isinstance(image, bytes | bytearray | memoryview):
        return GivenImage(bytes(image), where)
    if isinstance(image, Image.Image):
        check_size(image.size, where)
        try:
            return GivenImage(_in_rgb(image), where)
        except Exception as exc:  # it may be a file still that was not read
            raise _unreadable(exc, where) from exc
    raise InvalidRequestError(
        f"{where} must be the bytes of an image file or an image of Pillow's, not "
        f"{type(image).__name__}",
        param=where,
    )
