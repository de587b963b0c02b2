"""Small pictures for tests, made of seeded noise and shapes.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    """An RGB image that resembles no other seed's."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
    noise = generator.integers(0, 40, (height, width, 3))
    return Image.fromarray((np.asarray(image) * 0.8 + noise).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def data_url(image: Image.Image | bytes, kind: str = "png") -> str:
    """As chat requests carry images."""
    content = image if isinstance(image, bytes) else encoded(image, kind.upper())
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_part(image: Image.Image | bytes) -> dict[str, object]:
    """A part of the content of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}}
