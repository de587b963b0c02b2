"""Every parser of what a client, a model, a peer or a server sent, in one table.

On the import path of the tests (pytest's `pythonpath`). `tests/parsers` feeds each with bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from model_kit.checkpoints import random_tensors, save_adapter, save_model
from model_kit.gguf import save_gguf
from PIL import Image
from vllm_kit.sent import request

from diptych.answer_stream import AnswerError
from diptych.bench import workload
from diptych.bench.stream import read_stream
from diptych.chat import files as chat_files
from diptych.errors import BadInputError
from diptych_engine.lora.peft import read_peft
from diptych_engine.models.stored_parts import open_safetensors
from diptych_engine.parallel import steps
from diptych_frontend.admin.control import (
    LoadAdapter,
    RejectKVTransfer,
    Scale,
    UnloadAdapter,
    Update,
)
from diptych_frontend.batches_api.lines import check
from diptych_frontend.batches_api.upload import UploadForm
from diptych_frontend.browsers import HOST, ORIGIN, BrowserRules
from diptych_frontend.images.decoding import bytes_of_url, decoded
from diptych_frontend.model_files.gguf_header import read_header
from diptych_frontend.model_files.model_config import config_from_gguf
from diptych_frontend.model_files.model_source import readable, resolve_model
from diptych_frontend.openai.exchange import decode_json
from diptych_frontend.openai.promised_prefill import PromiseFinder, promised_prefill
from diptych_frontend.openai.resumption import read_id
from diptych_frontend.reasoning.formats import FORMATS as REASONING_FORMATS
from diptych_frontend.text.gguf_tokenizer import tokenizer_from_gguf
from diptych_frontend.text.structured_outputs import check_structured_outputs
from diptych_frontend.text.templates.chat_template import ChatTemplate
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_frontend.tool_calls.formats import FORMATS as CALL_FORMATS
from diptych_kv_transfer.signing.handshake import AuthenticationError, Handshake, Session
from diptych_kv_transfer.signing.references import HingeKey, References
from diptych_kv_transfer.tables import messages as hinge_messages
from diptych_kv_transfer.transports.ucx import frames
from diptych_operator.api.names import PUBLIC_KEY_FILE, SECRET_KEY_FILE
from diptych_operator.api.parse import parse as parse_service
from diptych_operator.render.keys import admin_token
from diptych_protocol import (
    UNREADABLE,
    CurveKeys,
    DiptychError,
    KVTransferParams,
    StructuredOutputsParams,
    UtilityCall,
    wire,
)
from diptych_protocol.admin import ADMIN_TOKEN_FILE
from diptych_protocol.control_calls import CONTROL_CALLS
from diptych_protocol.model_uri import parse_model_uri
from diptych_protocol.salvage import call_id_of, request_id_of
from diptych_router.engines.serving import ServingFile
from diptych_router.route.proxy import asked_for
from diptych_vllm.serve.kv_events import RememberedBlocks

Feed = Callable[[bytes], object]


@dataclass(frozen=True)
class Parser:
    """One of them."""

    name: str
    modules: tuple[str, ...]
    """The files that it reads with, from the repository's root."""
    feed: Feed
    samples: tuple[bytes, ...]
    """What it takes, or nearly."""
    raises: tuple[type[Exception], ...] = (DiptychError,)
    """What it may raise: this project's errors, or those that its callers are told to catch."""
    costs: int = 1
    """How many times as long as others it takes: it is fed so much less."""


KEY_FILES = (PUBLIC_KEY_FILE, SECRET_KEY_FILE, ADMIN_TOKEN_FILE)


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def text(feed: Callable[[str], object]) -> Feed:
    """For what takes texts: what is no UTF-8 never reaches it."""
    return lambda data: feed(data.decode("utf-8", "replace"))


def in_frames(decoder: Any) -> Feed:
    """A message of one frame, and one whose arrays are in a second."""

    def feed(data: bytes) -> None:
        decoder.decode([data[: len(data) // 2], data[len(data) // 2 :]])
        decoder.decode([data])

    return feed


KEY = HingeKey.of(CurveKeys("public", "secret"))
MESSAGE = request(max_tokens=2)
REFERENCE = References(KEY).sign(
    KVTransferParams(
        do_remote_prefill=True, remote_engine_id="p", remote_host="10.0.0.1", remote_port=5600,
        remote_num_tokens=40, remote_block_ids=[[1]], lease_id="ab" * 16, epoch="e", compat="c",
        tokens_digest="d",
    ),
    30.0,
)  # fmt: skip
SCHEMA = b'{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
TEMPLATE = (
    b"{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}\n{% endfor %}"
    b"{% if add_generation_prompt %}{{ bos_token }}{% endif %}"
)


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (1, 2, 3)).save(file, kind)
    return file.getvalue()


def multipart(data: bytes) -> None:
    """The first line is the content type, the rest comes in two pieces."""
    kind, _, body = data.partition(b"\n")
    form = UploadForm(kind.decode("latin-1"))
    form.feed(body[:40])
    form.feed(body[40:])
    form.ended()


def template(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ChatTemplate(source, "<s>", "</s>").render(messages, add_generation_prompt=True)


def tool_calls(text: str) -> None:
    for style in CALL_FORMATS.values():
        for marker in (*style.markers, ""):
            style.open(marker + text, {"f": {"properties": {}}}).end(marker + text)


def reasoning(text: str) -> None:
    for style in REASONING_FORMATS.values():
        for make in filter(None, (style.splitter, style.call_splitter)):
            splitter = make(None)
            splitter.push(text[:9])
            splitter.push(text[9:], last=True)
        style.ended_in_prompt(text)


def reference(data: bytes) -> None:
    given = decode_json(data, msgspec.json.Decoder(dict[str, Any]))
    KVTransferParams.naming_lease(given)
    references = References(KEY)
    params = KVTransferParams.parse(given)
    references.check_use(params, "d")
    references.take(params)


def promise(data: bytes) -> None:
    promised_prefill(data)
    finder = PromiseFinder()
    finder.feed(data[:50])
    finder.feed(data[50:])
    finder.found()


def handshake(data: bytes) -> None:
    for connects in (True, False):
        Handshake(KEY, b"n" * 16, connects=connects).receive(data)


def browser(data: bytes) -> None:
    rules = BrowserRules(origins=frozenset({"https://a.example"}))
    rules.check_host("/", {HOST: data})
    rules.shared_with("POST", {HOST: b"h", ORIGIN: data})


def last_event_id(said: str) -> None:
    read_id(said, b"")


def gguf_metadata(data: bytes) -> None:
    with contextlib.suppress(*UNREADABLE):
        metadata = msgspec.json.decode(data, type=dict[str, Any])
        for read in (tokenizer_from_gguf, lambda given: config_from_gguf(given, set())):
            with contextlib.suppress(DiptychError):
                read(metadata)


BODIES = (
    *(kind for kind in CONTROL_CALLS if kind.PATH), RejectKVTransfer, Scale, LoadAdapter,
    UnloadAdapter, Update,
)  # fmt: skip


def admin_bodies(data: bytes) -> None:
    for kind in BODIES:
        try:
            decode_json(data or b"{}", msgspec.json.Decoder(kind))
        except DiptychError:
            continue


EVENTS = packed(
    [
        1.5,
        [
            {
                "type": "BlockStored", "block_hashes": [b"h"], "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4], "block_size": 4, "lora_id": None, "medium": "GPU",
            },
            {"type": "BlockRemoved", "block_hashes": [b"h"], "medium": "GPU"},
        ],
        0,
    ]
)  # fmt: skip
SERVICE = b"""apiVersion: diptych.dev/v1alpha1
kind: InferenceService
metadata: {name: svc}
spec: {model: {uri: "dummy://"}, prefill: {}, decode: {}, router: {allowedHosts: [a.example]}}
"""
VOCABULARY = msgspec.json.encode(
    {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.token_type": [1, 3, 4], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True, "general.architecture": "llama",
        "llama.embedding_length": 64, "llama.feed_forward_length": 8, "llama.block_count": 2,
        "llama.attention.head_count": 4, "llama.context_length": 64,
    }
)  # fmt: skip
QUANTISED = (
    b'"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized", '
    b'"bits": 4, "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int", '
    b'"block_structure": [128, 128]}}}}, '
)
TOKENIZER = b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
CHUNK = b'{"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": 1}}'


def parsers() -> Iterator[Parser]:
    """Those that read bytes in memory."""
    front, proto = "frontend/diptych_frontend", "protocol/diptych_protocol"
    hinge = "kv_transfer/diptych_kv_transfer"
    yield Parser(
        "multipart forms", (f"{front}/batches_api/upload.py",), multipart,
        (b'multipart/form-data; boundary=b\n--b\r\ncontent-disposition: form-data; name="purpose"'
         b'\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n'
         b"--b--\r\n",
         b"multipart/form-data; boundary=" + b"b" * 2000 + b"\n--b--"),
    )  # fmt: skip
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"a": 1}}'
    yield Parser(
        "lines of batches", (f"{front}/batches_api/lines.py",),
        lambda data: check(io.BytesIO(data), "/v1/completions"),
        (line, line[:-2] + b', "stream": 1e99999}}', line[:-2] + b', "stream": "\xff"}}'),
        raises=(),
    )  # fmt: skip
    yield Parser(
        "images", (f"{front}/images/decoding.py",), lambda data: decoded(data, "image"),
        tuple(map(picture, ("PNG", "JPEG", "WEBP", "GIF"))),
    )  # fmt: skip
    yield Parser(
        "URLs of images", (f"{front}/images/decoding.py",),
        text(lambda url: bytes_of_url(url, "image")), (b"data:image/png;base64,AAAA",),
    )  # fmt: skip
    yield Parser(
        "chat templates", (f"{front}/text/templates/chat_template.py",), text(template),
        (TEMPLATE, b"{{ messages | tojson }}", b"{{ " + b"(" * 3000),
    )  # fmt: skip
    for name, sample in {
        "json": SCHEMA, "regex": b"(a|b)+[0-9]{2}", "grammar": b'start: "a" | "b" start\n',
    }.items():  # fmt: skip

        def form(given: str, name: str = name) -> None:
            check_structured_outputs(msgspec.convert({name: given}, StructuredOutputsParams))

        module = f"{front}/text/structured_outputs.py"
        yield Parser(f"structured outputs, {name}", (module,), text(form), (sample,), costs=3)
    calls = tuple(f"{front}/tool_calls/{name}.py" for name in ("calls", "qwen3_coder", "pythonic"))
    yield Parser(
        "calls of tools", calls, text(tool_calls),
        (b'{"name": "f", "arguments": {"x": 1}}</tool_call>', b'f[ARGS]{"x": "\\ud800"}',
         b"f(x=[1, {'a': None}])]", b"f>\n<parameter=x>\n1e99999\n</parameter>\n</function>",
         b'{"name": "f", "arguments": ' + b"[" * 2000),
        raises=(), costs=2,
    )  # fmt: skip
    yield Parser(
        "reasoning", (), text(reasoning),
        (b"<think>a</think>b", b"<|channel|>analysis<|message|>a<|end|>"), raises=(),
    )  # fmt: skip
    yield Parser(
        "bodies of admin calls", (f"{front}/admin/calls.py",), admin_bodies,
        (b'{"mode": "keep"}', b'{"lora_name": "a", "lora_path": "/a"}', b'{"level": 1}'), raises=(),
    )  # fmt: skip
    yield Parser(
        "bodies at a route", ("router/diptych_router/route/proxy.py",), asked_for,
        (b'{"model": "m", "x": [1.5, {"y": null}]}', b'{"model": 3}', b'{}'),
    )  # fmt: skip
    yield Parser(
        "signed references",
        (f"{proto}/kv_transfer_params.py", f"{hinge}/signing/references.py"), reference,
        (msgspec.json.encode(REFERENCE), msgspec.json.encode({"do_remote_decode": True})),
    )  # fmt: skip
    yield Parser(
        "promises in refused bodies", (f"{front}/openai/promised_prefill.py",), promise,
        (b'{"kv_transfer_params": {"do_remote_prefill": true, "a": [1]}}',), raises=(),
    )  # fmt: skip
    yield Parser("ids of events", (f"{front}/openai/resumption.py",), text(last_event_id), (
        f"{'0f' * 16}.12.{'a7' * 8}.2.1.14.0.1790000000.chat-1".encode(),
    ))  # fmt: skip
    yield Parser("browsers' headers", (f"{front}/browsers.py",), browser,
                 (b"https://a.example", b"[::1]:80", b"localhost"))  # fmt: skip
    yield Parser("URIs of models", (f"{proto}/model_uri.py",), text(parse_model_uri), (
                 b"hf://org/name/file.gguf", b"https://host:80/a.gguf", b"https://[::1/a.gguf",
                 ))  # fmt: skip
    yield Parser(
        "URIs of models that are here",
        (f"{front}/model_files/model_source.py", f"{front}/model_files/model_config.py"),
        text(resolve_model),
        (b"dummy://?num_hidden_layers=2&eos_token_ids=1,2", b"dummy://?rope_scaling={}",
         b"https://[::1/a.gguf", b"package://__main__/b", b"~nobody/a", b"file:///a%00b", b"file://[/a"),
    )  # fmt: skip
    yield Parser(
        "a GGUF file's metadata",
        (f"{front}/text/tokenizer_files.py", f"{front}/model_files/model_config.py"),
        gguf_metadata, (VOCABULARY,),
    )  # fmt: skip
    yield from wire_parsers(proto, hinge)
    yield Parser(
        "the events of vLLM's core", ("vllm_connector/diptych_vllm/serve/kv_events.py",),
        lambda data: RememberedBlocks(4, 2).take(data),
        (EVENTS, EVENTS.replace(b"GPU", b"\xff\xff\xff")),
    )  # fmt: skip
    yield Parser(
        "services in YAML", ("operator/diptych_operator/api/parse.py",), text(parse_service),
        (SERVICE,), costs=3,
    )  # fmt: skip
    yield Parser(
        "the keys of a service", ("operator/diptych_operator/render/keys.py",),
        text(lambda said: admin_token({"data": dict.fromkeys(KEY_FILES, said)})), (b"c2VzYW1l",),
    )  # fmt: skip
    yield Parser(
        "the events of answers", ("cli/diptych/answer_stream.py",),
        lambda data: read_stream([(0.0, data)]),
        (b"data: " + CHUNK + b"\n\ndata: [DONE]\n",),
        raises=(AnswerError,),
    )  # fmt: skip


def wire_parsers(proto: str, hinge: str) -> Iterator[Parser]:
    """Between the project's own processes and machines."""
    sent = {
        "requests": (wire.request_decoder, packed(MESSAGE)),
        "aborts": (wire.abort_decoder, packed(["a"])),
        "calls": (wire.utility_decoder, packed(UtilityCall(0, 1, "stats", []))),
        "waves": (wire.wave_decoder, packed([1, 2])),
        "outputs": (wire.outputs_decoder, packed(wire.EngineCoreOutputs())),
        "steps": (steps.step_decoder, packed([1])),
        "workers' calls": (steps.call_decoder, packed(steps.WorkerCall(1, "a", [], {}))),
        "workers' answers": (steps.answer_decoder, packed(steps.Answer(1))),
    }
    modules = (
        *(f"{proto}/{name}.py" for name in ("arrays", "wire", "as_sent")),
        "engine/diptych_engine/parallel/steps.py",
    )
    for name, (decoder, sample) in sent.items():
        yield Parser(
            f"messages: {name}", modules, in_frames(decoder), (sample,),
            raises=UNREADABLE,
        )  # fmt: skip

    def salvage(data: bytes) -> None:
        request_id_of(data)
        call_id_of(data)

    yield Parser("ids in what cannot be read", (f"{proto}/salvage.py",), salvage,
                 (packed(MESSAGE), packed([1, 2])), raises=())  # fmt: skip
    told = hinge_messages.Open("ab" * 16, "digest", 1, [(0, 1)])
    yield Parser(
        "the hinge's messages", (f"{hinge}/tables/messages.py",), hinge_messages.decode,
        (hinge_messages.encode(told),), raises=(hinge_messages.RemoteProtocolError,),
    )  # fmt: skip
    yield Parser(
        "the hinge's frames", (f"{hinge}/transports/ucx/frames.py",), frames.decode,
        (frames.encode(frames.Moved(3, ok=True)),), raises=UNREADABLE,
    )  # fmt: skip
    yield Parser(
        "the hinge's handshake", (f"{hinge}/signing/handshake.py",), handshake, (b"n" * 16,),
        raises=(AuthenticationError,),
    )  # fmt: skip
    yield Parser(
        "the hinge's records", (f"{hinge}/signing/handshake.py",),
        lambda data: Session(KEY, KEY).open(1, data), (Session(KEY, KEY).seal(1, b"x"),),
        raises=(AuthenticationError,),
    )  # fmt: skip


def file_parsers(folder: Path) -> Iterator[Parser]:
    """Those that read files, of which they get one in `folder`."""
    front = "frontend/diptych_frontend"
    model = Path(save_model(folder / "model", random_tensors(1)))
    adapter = Path(save_adapter(folder / "adapter", 1))
    whole = Path(save_gguf(folder / "whole.gguf")).read_bytes()
    header = whole[:2048]

    def placed(path: Path, read: Callable[[], object]) -> tuple[Feed, tuple[bytes, ...]]:
        kept = path.read_bytes() if path.exists() else None

        def feed(data: bytes) -> None:
            path.write_bytes(data)
            try:
                read()
            finally:
                path.unlink() if kept is None else path.write_bytes(kept)

        return feed, () if kept is None else (kept,)

    gguf = folder / "a.gguf"

    def read_gguf() -> None:
        load_tokenizer(resolve_model(str(gguf)))
        with readable(gguf):
            read_header(gguf).tensors()

    feed, _ = placed(gguf, read_gguf)
    nested = struct.pack("<4sIQQQsI", b"GGUF", 3, 0, 1, 1, b"k", 9)  # a list of lists of lists ...
    nested += struct.pack("<IQ", 9, 1) * 3000
    yield Parser(
        "GGUF", (f"{front}/model_files/gguf_header.py", f"{front}/text/tokenizer_files.py"), feed,
        (header, nested),
    )  # fmt: skip
    for name, content in {
        "tokenizer.json": TOKENIZER,
        "config.json": None,
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "preprocessor_config.json": b'{"image_processor_type": "a", "do_resize": true}',
        "tokenizer_config.json": b'{"chat_template": "x", "bos_token": {"content": "<s>"}}',
        "chat_template.jinja": TEMPLATE,
    }.items():
        if name == "tokenizer.json":  # without it the others are not looked at
            (model / name).write_bytes(TOKENIZER)

        def read_model() -> None:
            load_tokenizer(resolve_model(str(model)))

        feed, samples = placed(model / name, read_model)
        yield Parser(
            f"a model's {name}",
            (f"{front}/model_files/model_source.py", f"{front}/text/tokenizer_files.py"), feed,
            samples if content is None else (content, content + b"\xff"),
        )  # fmt: skip
    quantised = (model / "config.json").read_bytes().replace(b"{", b"{" + QUANTISED, 1)
    feed, _ = placed(model / "config.json", lambda: resolve_model(str(model)))
    yield Parser(
        "a quantised model's config.json", (f"{front}/model_files/quantization.py",), feed,
        (quantised, quantised.replace(b"compressed-tensors", b"gptq")),
    )  # fmt: skip

    def read_tensors() -> None:
        with ExitStack() as stack:
            open_safetensors(model, stack)

    feed, samples = placed(model / "model.safetensors", read_tensors)
    yield Parser("safetensors", ("engine/diptych_engine/models/stored_parts.py",), feed, samples)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        feed, samples = placed(adapter / name, lambda: read_peft(str(adapter), {}, 2, 8))
        yield Parser(f"an adapter's {name}", ("engine/diptych_engine/lora/peft.py",), feed, samples)
    saved = folder / "chat.json"
    feed, _ = placed(saved, lambda: chat_files.load(saved))
    yield Parser(
        "saved chats", ("cli/diptych/chat/files.py",), feed,
        (json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode(),),
        raises=(chat_files.FileError,),
    )  # fmt: skip
    asked = folder / "asked.jsonl"
    feed, _ = placed(asked, lambda: workload.of_file(asked, workload.Lengths.parse("8"), 1))
    yield Parser(
        "bench's files", ("cli/diptych/bench/workload.py",), feed, (b'{"prompt": "hi"}\n',),
        raises=(BadInputError,),
    )  # fmt: skip
    serving = folder / "serving.json"
    feed, _ = placed(serving, lambda: ServingFile(serving).refresh())
    yield Parser(
        "which revisions serve", ("router/diptych_router/engines/serving.py",), feed,
        (b'{"revisions": ["a"], "asleep": false}',), raises=(),
    )  # fmt: skip
