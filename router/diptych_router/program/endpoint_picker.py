"""The endpoint picker of a gateway: answers, over gRPC, where each request should go.

A gateway that implements the Gateway API Inference Extension (protocol 004 there) opens a stream of
Envoy's `ext_proc` for each request. Every router reaches every engine, so the answer is the router
that was asked, which takes the request at once or is known to be unable: see decision 0135.

It is a process (`picker_process.py`): `python -m diptych_router.program.endpoint_picker OWN HOST
PORT`. Each line of its standard input is the router's new state; it ends with the last one.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final

import grpc
import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from grpc_health.v1 import health_pb2

from diptych_frontend.app import MAX_BODY_BYTES
from diptych_frontend.openai.errors import OPENAI, error_answer
from diptych_protocol import EngineOverloadedError
from diptych_router.program.picker_process import LAST_STREAMS_S, READY, RouterState, bracketed
from diptych_router.requests.pool_client import MAX_OPEN_REQUESTS

BODY_MODES: Final = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED")
"""How a body is sent, by number."""
OVERWRITE_IF_EXISTS_OR_ADD: Final = 2
"""What becomes of a header that a request has already."""
_PACKAGE: Final = "diptych.ext_proc"
_STRUCT: Final = "google.protobuf.Struct"
_MESSAGES: Final = {
    "HeaderValue": "key=1:string raw_value=3:bytes",
    "HeaderValueOption": "header=1:HeaderValue append_action=3:int32",
    "HeaderMutation": "set_headers=1:HeaderValueOption*",
    "StreamedBody": "body=1:bytes end_of_stream=2:bool",
    "BodyMutation": "streamed_response=3:StreamedBody|mutation",
    "CommonResponse": "header_mutation=2:HeaderMutation body_mutation=3:BodyMutation "
    "clear_route_cache=5:bool",
    "HeadersResponse": "response=1:CommonResponse",
    "BodyResponse": "response=1:CommonResponse",
    "TrailersResponse": "header_mutation=1:HeaderMutation",
    "HttpStatus": "code=1:int32",
    "ImmediateResponse": "status=1:HttpStatus headers=2:HeaderMutation body=3:bytes",
    "ProcessingResponse": "request_headers=1:HeadersResponse|response "
    "response_headers=2:HeadersResponse|response request_body=3:BodyResponse|response "
    "response_body=4:BodyResponse|response request_trailers=5:TrailersResponse|response "
    "response_trailers=6:TrailersResponse|response "
    f"immediate_response=7:ImmediateResponse|response dynamic_metadata=8:{_STRUCT}",
    "HttpHeaders": "end_of_stream=3:bool",
    "HttpBody": "body=1:bytes end_of_stream=2:bool",
    "HttpTrailers": "",
    "FilterMetadataEntry": f"key=1:string value=2:{_STRUCT}",
    "Metadata": "filter_metadata=1:FilterMetadataEntry*",
    "ProtocolConfiguration": "request_body_mode=1:int32 response_body_mode=2:int32",
    "ProcessingRequest": "request_headers=2:HttpHeaders|request "
    "response_headers=3:HttpHeaders|request request_body=4:HttpBody|request "
    "response_body=5:HttpBody|request request_trailers=6:HttpTrailers|request "
    "response_trailers=7:HttpTrailers|request metadata_context=8:Metadata "
    "observability_mode=10:bool protocol_config=11:ProtocolConfiguration",
}
"""The messages of Envoy's `ext_proc` of a picker: name=number:type of
each field, * if it is repeated, |the oneof that it is in. As on the wire, an enum is its number,
and a map its entries.

Fields have the numbers of `envoy/service/ext_proc/v3/external_processor.proto` and of what it
imports; fields that no picker needs are left out, and passed over on the wire. Packages of all of
Envoy's messages bring copies of other packages' files, and overwrite them."""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc.proto", package=_PACKAGE)
    file.syntax, file.dependency[:] = "proto3", [struct_pb2.DESCRIPTOR.name]
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            _add_field(message, text)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def _add_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    name, _, rest = text.partition("=")
    number, _, rest = rest.partition(":")
    kind, _, oneof = rest.partition("|")
    field = message.field.add(name=name, number=int(number))
    field.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
    kind = kind.removesuffix("*")
    if f"TYPE_{kind.upper()}" in kinds.Type.keys():  # noqa: SIM118  protobuf's enums are no mappings
        field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type = kinds.TYPE_MESSAGE
        field.type_name = f".{kind}" if kind == _STRUCT else f".{_PACKAGE}.{kind}"
    if oneof:
        if not message.oneof_decl:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = 0


MESSAGES: Final = _classes()
"""The class of each message, by its name."""


SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
"""Namespace and key of what a gateway tells of the endpoints that may be picked."""
MAX_MESSAGE_BYTES: Final = MAX_BODY_BYTES + (1 << 20)
"""A gateway may send a whole body, and headers besides."""
_PIECEMEAL: Final = tuple(map(BODY_MODES.index, ("BUFFERED", "STREAMED", "BUFFERED_PARTIAL")))
"""In these modes a body goes on by itself once it is answered. In the full-duplex one, also that of
gateways that do not say theirs, the picker sends it back."""


def pick(own: str, standing: RouterState, allowed: Sequence[str] | None, turn: int) -> str:
    """Return the `ip:port` that a request should go to; empty if it can go nowhere. allowed: those
    that the gateway names; None: it names none. Others than `own` take turns."""
    may_be_own = (allowed is None or own in allowed) and not standing.refusal
    others = [endpoint for endpoint in allowed or () if endpoint != own]
    if others and not (may_be_own and not standing.leaving):
        return others[turn % len(others)]
    return own if may_be_own else ""


class PickerStream:
    """What is said on the stream of one request. It performs no I/O."""

    def __init__(self, own: str, standing: RouterState, turn: int) -> None:
        self._own, self._standing, self._turn = own, standing, turn
        self._modes: dict[str, int] | None = None
        """How both bodies are sent, as the first message has it."""

    def answer(self, asked: Any) -> Any:
        """Return the ProcessingResponse to a ProcessingRequest; None if none is wanted."""
        if self._modes is None:
            config = asked.protocol_config
            self._modes = {
                "request_body": config.request_body_mode,
                "response_body": config.response_body_mode,
            }
        what = asked.WhichOneof("request")
        if asked.observability_mode or what is None:
            return None
        if what == "request_headers":
            return self._directed(_allowed(asked.metadata_context))
        if what in self._modes:
            return _passed_on(what, getattr(asked, what), self._modes[what])
        kind = "TrailersResponse" if "trailers" in what else "HeadersResponse"
        return MESSAGES["ProcessingResponse"](**{what: MESSAGES[kind]()})

    def _directed(self, allowed: Sequence[str] | None) -> Any:
        endpoint = pick(self._own, self._standing, allowed, self._turn)
        if not endpoint:
            full = self._standing.full and (allowed is None or self._own in allowed)
            return _refused(self._standing.refusal or "no router may take it", full=full)
        answer = MESSAGES["ProcessingResponse"]()
        common = answer.request_headers.response
        common.clear_route_cache = True
        option = common.header_mutation.set_headers.add(
            append_action=OVERWRITE_IF_EXISTS_OR_ADD  # a client may have sent one
        )
        option.header.key, option.header.raw_value = DESTINATION, endpoint.encode()
        answer.dynamic_metadata.update({"envoy.lb": {DESTINATION: endpoint}})
        return answer


def _allowed(metadata: Any) -> list[str] | None:
    namespace, key = SUBSET
    told = [each.value.fields for each in metadata.filter_metadata if each.key == namespace]
    if not told or key not in told[-1]:
        return None
    named = (value.string_value for value in told[-1][key].list_value.values)
    return [endpoint for endpoint in named if endpoint]


def _passed_on(what: str, body: Any, mode: int) -> Any:
    response = MESSAGES["BodyResponse"]()
    if mode not in _PIECEMEAL:
        sent = response.response.body_mutation.streamed_response
        sent.body, sent.end_of_stream = body.body, body.end_of_stream
    return MESSAGES["ProcessingResponse"](**{what: response})


def _refused(why: str, *, full: bool) -> Any:
    """As this router itself would refuse it, but with the status that the protocol has for it."""
    error = error_answer(EngineOverloadedError(why), "")
    answer = MESSAGES["ProcessingResponse"]()
    immediate = answer.immediate_response
    immediate.status.code = 429 if full else error.status
    immediate.body = OPENAI.body(error, "")
    for name, value in (*error.headers, (b"content-type", b"application/json")):
        option = immediate.headers.set_headers.add(append_action=OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name.decode(), value
    return answer


class EndpointPicker:
    """The gRPC services of one router."""

    def __init__(self, own: str, standing: RouterState) -> None:
        self._own, self.standing = own, standing
        self._turns = count()

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            MESSAGES["ProcessingRequest"].FromString,
            MESSAGES["ProcessingResponse"].SerializeToString,
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        return [
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
        ]

    async def _process(self, asked: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        exchange = PickerStream(self._own, self.standing, next(self._turns))
        async for message in asked:
            answer = exchange.answer(message)
            if answer is not None:
                yield answer

    async def _check(self, asked: Any, context: Any) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if asked.service not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        standing = self.standing
        ready = not standing.refusal and not standing.leaving
        serving = ready or asked.service == "liveness"
        return kinds(status=kinds.SERVING if serving else kinds.NOT_SERVING)


async def serve(own: str, host: str, port: int) -> None:
    """Answer gateways until standard input ends. Exits with a message if the port is not free."""
    told = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(told)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    states = msgspec.json.Decoder(RouterState)
    picker = EndpointPicker(own, states.decode(await told.readline()))
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(
        handlers=picker.handlers(), options=options, maximum_concurrent_rpcs=2 * MAX_OPEN_REQUESTS
    )
    try:
        server.add_secure_port(f"{bracketed(host)}:{port}", _credentials())
    except RuntimeError as exc:
        raise SystemExit(f"cannot listen on {host}:{port}: {exc}") from None
    await server.start()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    async for line in told:
        picker.standing = states.decode(line)
    await server.stop(LAST_STREAMS_S)


def _credentials() -> grpc.ServerCredentials:
    """TLS with a certificate that nobody else has signed: gateways encrypt what they tell a picker,
    and cannot check who it is."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "diptych-router")])
    day, now = timedelta(days=1), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 3650 * day)
        .sign(key, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, form, serialization.NoEncryption())
    return grpc.ssl_server_credentials([(private, certificate.public_bytes(encoding))])


def main() -> None:
    # Its router ends it, which hears the same signals.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))


if __name__ == "__main__":
    main()
