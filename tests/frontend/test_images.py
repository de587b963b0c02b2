"""Images become the tiles and the tokens of the published processors, within limits."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers  # its classes are imported when they are used
from model_kit.pictures import data_url, encoded, image_part, picture
from model_kit.seeing import (
    IMAGE_TOKEN,
    LONGEST_EDGE,
    TILE,
    save_processor,
    seeing_config,
)
from PIL import Image

from diptych_frontend.chain_memo import ItemCache
from diptych_frontend.images import confined_decoding, decoding, image_processor
from diptych_frontend.images import features as feature_limits
from diptych_frontend.images.decoding import GivenImage
from diptych_frontend.images.features import MAX_IMAGES, check_features, content_hash
from diptych_frontend.images.image_processor import ImageProcessor
from diptych_frontend.images.tiles import cut, num_tiles
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.model_files.vision_config import VisionConfig
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineCoreRequest,
    InvalidRequestError,
    MultiModalFeatureSpec,
    PlaceholderRange,
    PoolingParams,
    SamplingParams,
    wire,
)

SIZES = [(60, 40), (40, 60), (64, 64), (32, 32), (1, 1), (300, 7), (7, 300), (65, 33), (999, 500)]
TEXT = {"type": "text", "text": "what is it?"}
CUT_OFF = encoded(picture(1))[:2000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    seeing_config("smolvlm").save_pretrained(folder)
    save_processor(folder)
    return folder


@pytest.fixture
def seeing(folder: Path) -> TextRenderer:
    return TextRenderer(resolve_model(str(folder), weights=False))


@pytest.fixture
def vision(seeing: TextRenderer) -> VisionConfig:
    assert seeing.vision is not None
    return seeing.vision


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("name", ["Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil"])
def test_tiles_equal_those_of_the_published_processor(
    vision: VisionConfig, name: str, splits: bool
) -> None:
    processor = getattr(transformers, name)(
        size={"longest_edge": LONGEST_EDGE},
        max_image_size={"longest_edge": TILE},
        do_image_splitting=splits,
        do_rescale=False,
        do_normalize=False,
        return_row_col_info=True,
    )
    config = msgspec.structs.replace(vision, splits=splits)
    for size in SIZES:
        image = picture(1, *size)
        theirs = processor(images=[image])
        tiles = cut(image, config)
        ours = np.frombuffer(tiles.pixels.data, np.uint8).reshape(tiles.pixels.shape)
        assert np.array_equal(ours, np.asarray(theirs["pixel_values"][0])), size
        assert (tiles.rows, tiles.columns) == (theirs["rows"][0][0], theirs["cols"][0][0]), size


def test_no_image_is_enlarged_beyond_a_limit(vision: VisionConfig) -> None:
    config = msgspec.structs.replace(vision, longest_edge=5000, image_size=2048)
    tiles = cut(picture(1, 50, 10), config)
    assert (tiles.rows, tiles.columns) == (1, 2)


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 40), (64, 16), (1, 150), (30, 30)])
def test_a_conversation_has_the_tokens_of_the_published_processor(
    seeing: TextRenderer, folder: Path, size: tuple[int, int]
) -> None:
    image = picture(1, *size)
    messages = user(image_part(image), TEXT, image_part(picture(2)))
    rendered = seeing.render_chat(messages)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    said: Any = [{"type": "image"}, TEXT, {"type": "image"}]
    text = tokenizer.apply_chat_template(user(*said), tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    pieces = text.split("<image>")
    string_of = transformers.models.smolvlm.processing_smolvlm.get_image_prompt_string
    assert seeing.vision is not None
    for piece, each in zip(pieces[1:], (image, picture(2)), strict=True):
        tiles = cut(each, seeing.vision)
        pieces[0] += string_of(
            tiles.rows, tiles.columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        pieces[0] += piece
    expected = tokenizer(pieces[0], add_special_tokens=False)["input_ids"]
    assert rendered["prompt_token_ids"] == expected
    features = rendered["mm_features"]
    check_features(features, rendered["prompt_token_ids"], seeing.vision)
    for feature in features:
        assert feature.data is not None
        assert feature.identifier == feature.mm_hash == content_hash(feature.data)
    assert features[0].identifier != features[1].identifier


def test_equal_pixels_have_one_name_whatever_their_file(seeing: TextRenderer) -> None:
    files = (encoded(picture(3)), encoded(picture(3), "GIF"), picture(3), encoded(picture(4)))
    names = []
    for image in files:
        prompt: Any = {"prompt": "<image>x", "multi_modal_data": {"image": image}}
        names.append(seeing.render_prompt(prompt)["mm_features"][0].identifier)
    assert names[0] == names[2] != names[3]
    assert len({*names}) == 3  # a GIF has other colours


def test_token_ids_may_have_image_tokens_too(seeing: TextRenderer) -> None:
    image = encoded(picture(1))
    by_text = seeing.render_prompt({"prompt": "a<image>b", "multi_modal_data": {"image": image}})
    token_ids = seeing.get_tokenizer().encode("a<image>b")
    by_ids = seeing.render_prompt(
        {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [image]}}
    )
    assert by_text["prompt_token_ids"] == by_ids["prompt_token_ids"]
    again = seeing.render_prompt(by_ids)
    assert again["mm_features"] == by_ids["mm_features"]


def test_an_image_is_upright(seeing: TextRenderer) -> None:
    image = picture(5)
    turned = image.rotate(90, expand=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    buffer = io.BytesIO()
    turned.save(buffer, "PNG", exif=exif)
    assert decoding.decoded(buffer.getvalue(), "x").tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "RGB", "L"])
def test_what_is_transparent_is_white(mode: str) -> None:
    """As in vLLM, whose pictures are RGBA; in the other forms of transparency, too."""
    dark, light = ((20, 20, 20), (200, 200, 200)) if mode[0] == "L" else ((20, 30, 40), (1, 2, 3))
    if mode in ("RGBA", "LA", "PA"):
        image = Image.new("RGBA", (3, 1), (*dark, 0))
        image.putpixel((1, 0), (*light, 255))
        image.putpixel((2, 0), (*dark, 128))
        image = image.convert(mode)
        white = tuple(round(255 + (value - 255) * 128 / 255) for value in dark)
    else:
        image = Image.new("RGB", (3, 1), dark)
        image.putpixel((1, 0), light)
        image = image.quantize(4) if mode == "P" else image.convert(mode)
        image.info["transparency"] = image.getpixel((0, 0))
        white = (255, 255, 255)
    files = [] if mode == "PA" else [decoding.decoded(encoded(image), "x")]
    for rgb in (decoding.as_given(image, "x").content, *files):
        assert isinstance(rgb, Image.Image)
        assert rgb.mode == "RGB"
        assert [rgb.getpixel((x, 0)) for x in range(3)] == [(255, 255, 255), light, white]


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_grey_of_sixteen_bits_keeps_its_shades(mode: str) -> None:
    shades = [0, 256, 16_384, 32_768, 49_152, 65_535]
    image = Image.fromarray(np.array([shades], np.uint16 if mode == "I;16" else np.int32))
    assert image.mode == mode
    given = decoding.as_given(image, "x").content
    assert isinstance(given, Image.Image)
    buffer = io.BytesIO()
    Image.fromarray(np.array([shades], np.uint16)).save(buffer, "PNG")
    for rgb in (decoding.decoded(buffer.getvalue(), "x"), given):
        assert [rgb.getpixel((x, 0)) for x in range(6)] == [(s >> 8,) * 3 for s in shades]


# --- what is refused ------------------------------------------------------------------------------


def bomb(width: int, height: int) -> bytes:
    """A small file that says to be a large image."""

    def chunk(name: bytes, body: bytes) -> bytes:
        checked = name + body
        return len(body).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((1, 0, 0, 0, 0))
    rows = zlib.compress(bytes((width // 8 + 1) * 64))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/cat.png", "fetches no images"),
        ("http://169.254.169.254/latest/meta-data", "fetches no images"),
        ("file:///etc/passwd", "fetches no images"),
        ("", "fetches no images"),
        ("data:image/png,abc", "must be of the form"),
        ("data:image/png;base64", "must be of the form"),
        ("data:image/png;base64,!!!", "base64"),
        ("data:image/png;base64,aGVsbG8=", "cannot be read|can be read"),
        (data_url(encoded(picture(1))[:200]), "can be read"),
        (data_url(bomb(60000, 60000)), "60000 x 60000 pixels|can be read"),
        (data_url(bomb(6000, 6000)), "6000 x 6000 pixels"),
        (data_url(bomb(1, 24 << 20)), "at most 16384 are taken on a side"),
        (data_url(bomb(20_000, 1000)), "at most 16384 are taken on a side"),
        (data_url(bomb(201, 1)), "at most 200 times the other"),
        (data_url(picture(1), "bmp"), "can be read"),
    ],
)
def test_an_image_that_is_none_is_refused_by_its_place(
    seeing: TextRenderer, url: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        seeing.render_chat(user({"type": "image_url", "image_url": {"url": url}}, TEXT))
    assert (caught.value.param or "").startswith("messages")
    assert caught.value.status == 400


@pytest.mark.parametrize("num_images", [1, 5])
def test_what_headers_tell_is_judged_before_any_image_is_decoded(
    seeing: TextRenderer,
    vision: VisionConfig,
    monkeypatch: pytest.MonkeyPatch,
    num_images: int,
) -> None:
    """A tall image, and too many tokens or pixels of images that are each within the limits."""

    def no_decoding(*args: Any) -> Any:
        raise RuntimeError("an image was decoded")

    monkeypatch.setattr(image_processor, "tiles_of", no_decoding)
    tall = bomb(1, 24 << 20) if num_images == 1 else bomb(4000, 6000)
    with pytest.raises(InvalidRequestError, match=r"16384|together") as caught:
        seeing.render_chat(user(*[image_part(tall)] * num_images, TEXT))
    assert caught.value.status == 400
    small = ImageProcessor(vision, 100)
    marks = [IMAGE_TOKEN] * 20
    images = [GivenImage(encoded(picture(1)), "x")] * 20
    with pytest.raises(InvalidRequestError, match="send fewer images") as caught:
        small.place(marks, images, lambda text: [1], "prompt")
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("splits", [True, False])
def test_a_header_tells_how_many_tiles_an_image_has(vision: VisionConfig, splits: bool) -> None:
    config = msgspec.structs.replace(vision, splits=splits)
    for size in SIZES:
        assert num_tiles(size, config) == cut(picture(1, *size), config).pixels.shape[0], size


def test_bytes_and_numbers_of_images_have_limits(
    seeing: TextRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_IMAGES}"):
        seeing.render_chat(user(*[image_part(picture(1, 3, 3))] * (MAX_IMAGES + 1), TEXT))
    monkeypatch.setattr(decoding, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(InvalidRequestError, match="more than 100 bytes"):
        seeing.render_chat(user(image_part(picture(1)), TEXT))
    monkeypatch.setattr(confined_decoding, "MAX_IMAGE_BYTES", 100)
    prompt: Any = {"prompt": "<image>x", "multi_modal_data": {"image": encoded(picture(1))}}
    with pytest.raises(InvalidRequestError, match="at most 100"):
        seeing.render_prompt(prompt)


def many_headers(count: int) -> bytes:
    """A JPEG whose header has so many pieces of Exif data, which Pillow joins one by one."""
    file = encoded(picture(1), "JPEG")
    piece = b"\xff\xe1\x00\x09Exif\x00\x00x"
    return file[:2] + piece * count + file[2:]


@pytest.mark.parametrize(
    "file", [encoded(picture(1)), many_headers(1000)], ids=["PNG", "many headers"]
)
def test_no_byte_of_an_image_is_read_in_the_process_of_a_server(
    seeing: TextRenderer, monkeypatch: pytest.MonkeyPatch, file: bytes
) -> None:
    """Neither its header nor its pixels."""

    def nothing_is_read(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a file was read here")

    monkeypatch.setattr(Image, "open", nothing_is_read)
    prompt: Any = {"prompt": "<image>x", "multi_modal_data": {"image": file}}
    assert len(seeing.render_prompt(prompt)["mm_features"]) == 1
    with pytest.raises(InvalidRequestError, match="no such format"):
        seeing.render_prompt(prompt | {"multi_modal_data": {"image": b"GIF"}})


def test_the_header_of_an_image_that_was_prepared_is_not_read_again(
    seeing: TextRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    once = confined_decoding.size_of

    def size_of(encoded: bytes, where: str) -> tuple[int, int]:
        read.append(where)
        return once(encoded, where)

    monkeypatch.setattr(image_processor, "size_of", size_of)
    for _ in range(2):
        seeing.render_chat(user(image_part(picture(1)), TEXT))
    assert len(read) == 1


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("no image, but <image> in the text", "prompt"),
        ([IMAGE_TOKEN, 1], "prompt"),
        ({"prompt": "x", "multi_modal_data": {"image": encoded(picture(1))}}, "multi_modal_data"),
        ({"prompt": "<image>x", "multi_modal_data": {"image": 3}}, "multi_modal_data.image"),
        ({"prompt": "<image>x", "multi_modal_data": {"audio": b""}}, "multi_modal_data"),
        (
            {"prompt": "<image>x", "multi_modal_data": {"image": Image.open(io.BytesIO(CUT_OFF))}},
            "multi_modal_data.image",
        ),
        ({"prompt": "<image>x", "multi_modal_data": [b""]}, "multi_modal_data"),
    ],
)
def test_prompts_whose_images_do_not_fit_are_refused(
    seeing: TextRenderer, prompt: Any, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        seeing.render_prompt(prompt)
    assert caught.value.param == param


def test_a_model_without_vision_refuses_images(text_renderer: TextRenderer) -> None:
    with pytest.raises(InvalidRequestError, match="only text parts") as caught:
        text_renderer.render_chat(user(TEXT, image_part(picture(1))))
    assert caught.value.param == "messages[0].content[1]"
    prompt: Any = {"prompt": "x", "multi_modal_data": {"image": encoded(picture(1))}}
    with pytest.raises(InvalidRequestError, match="takes no images"):
        text_renderer.render_prompt(prompt)
    assert text_renderer.stat_mm_cache() is None
    text_renderer.clear_mm_cache()


# --- features -------------------------------------------------------------------------------------


@pytest.fixture
def sound(seeing: TextRenderer) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    rendered = seeing.render_chat(user(image_part(picture(1)), TEXT, image_part(picture(2))))
    return rendered["prompt_token_ids"], rendered["mm_features"]


def other(feature: MultiModalFeatureSpec, **changes: Any) -> MultiModalFeatureSpec:
    return msgspec.structs.replace(feature, **changes)


def test_features_that_do_not_fit_are_refused(sound: Any, vision: VisionConfig) -> None:
    token_ids, (first, second) = sound
    place = first.mm_position
    bad: list[Any] = [
        [],
        "features",
        [first],
        [second, first],
        [first, first],
        [first, second] * 20,
        [3, second],
        [other(first, modality="video"), second],
        [other(first, identifier=""), second],
        [other(first, identifier="x" * 65, mm_hash=None), second],
        [other(first, mm_hash="another"), second],
        [other(first, mm_position=PlaceholderRange(-1, place.length)), second],
        [other(first, mm_position=PlaceholderRange(place.offset, 0)), second],
        [other(first, mm_position=PlaceholderRange(place.offset, 10**9)), second],
        [other(first, mm_position=PlaceholderRange(place.offset, place.length - 2)), second],
        [first, other(second, mm_position=PlaceholderRange(len(token_ids), 1))],
        [other(first, data=picture(1)), second],
        [
            other(
                first, data=second.data.__class__("uint8", (1, 3, TILE, TILE), bytes(3 * TILE**2))
            ),
            second,
        ],
    ]
    for features in bad:
        with pytest.raises(InvalidRequestError) as caught:
            check_features(features, token_ids, vision)
        assert caught.value.param == "mm_features"
    with pytest.raises(InvalidRequestError, match="takes no images"):
        check_features([first, second], token_ids, None)
    place = second.mm_position
    cut_off = [first, other(second, mm_position=PlaceholderRange(place.offset, place.length - 1))]
    with pytest.raises(InvalidRequestError, match="end with an image token"):
        check_features(cut_off, token_ids[: place.offset + place.length - 1], vision)
    assert check_features([first, second], token_ids, vision) == [first, second]
    assert check_features([other(first, data=None), second], token_ids, vision)


def test_features_travel_as_they_are(sound: Any, seeing: TextRenderer) -> None:
    token_ids, features = sound
    inputs = InputProcessor(seeing, max_model_len=1000, vocab_size=seeing.vocab_size)
    request = inputs.process(
        "a", {"prompt_token_ids": token_ids, "mm_features": features}, SamplingParams()
    )
    assert (request.prompt_token_ids, request.mm_features) == (token_ids, features)
    received = wire.request_decoder.decode(wire.encoder.encode(request))
    assert isinstance(received, EngineCoreRequest)
    assert received.mm_features == features
    adopted = inputs.process_inputs("b", received, SamplingParams())
    assert adopted.mm_features == features
    prompt: Any = {"prompt_token_ids": token_ids, "mm_features": features}
    with pytest.raises(InvalidRequestError, match="for generate"):
        inputs.process("c", prompt, PoolingParams(task="embed"))
    with pytest.raises(InvalidRequestError, match="mm_features"):
        inputs.process("d", prompt | {"mm_features": "x"}, SamplingParams())


@pytest.mark.parametrize("name", ["MAX_IMAGE_BYTES", "MAX_FEATURE_BYTES"])
def test_tiles_have_limits(
    sound: Any, vision: VisionConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For each image, and for all of a prompt."""
    token_ids, (first, second) = sound
    size = 5 * 3 * TILE * TILE
    monkeypatch.setattr(feature_limits, name, size)
    if name == "MAX_FEATURE_BYTES":
        first = other(first, data=None)
    assert check_features([other(first, data=None), second], token_ids, vision)
    monkeypatch.setattr(feature_limits, name, size - 1)
    with pytest.raises(InvalidRequestError, match=f"more than {size - 1}") as caught:
        check_features([first, second], token_ids, vision)
    assert caught.value.param == "mm_features"


# --- the cache ------------------------------------------------------------------------------------


def test_images_are_prepared_once(seeing: TextRenderer) -> None:
    def stats() -> tuple[int, int, int, bool]:
        found = seeing.stat_mm_cache()
        assert found is not None
        return found.requests, found.queries, found.hits, found.reset

    messages = user(image_part(picture(1)), TEXT, image_part(picture(2)))
    seeing.render_chat(messages)
    first = seeing.render_chat(messages)["mm_features"]
    assert stats() == (2, 4, 2, False)
    seeing.clear_mm_cache()
    again = seeing.render_chat(messages)["mm_features"]
    assert again == first
    assert stats() == (3, 6, 2, True)
    assert stats()[3] is False


def test_the_cache_keeps_what_was_used_last() -> None:
    cache: ItemCache[str, bytes] = ItemCache(len, 10)
    for name in "abc":
        cache.put(name, bytes(4))
        cache.get("a")
    assert [name for name in "abc" if cache.get(name)] == ["a", "c"]
    cache.put("too large", bytes(11))
    assert len(cache) == 2
    cache.put("a", bytes(1))
    assert len(cache.get("a") or b"") == 4
    cache.clear()
    assert len(cache) == 0
