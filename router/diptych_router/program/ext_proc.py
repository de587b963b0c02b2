"""The messages of Envoy's `ext_proc` that an endpoint picker reads and writes.

Fields have the numbers of `envoy/service/ext_proc/v3/external_processor.proto` and of what it
imports; fields that no picker needs are left out, and passed over on the wire. Packages of all of
Envoy's messages bring copies of other packages' files, and overwrite them.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

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
    "Metadata": "filter_metadata=1:Metadata.FilterMetadataEntry*",
    "ProtocolConfiguration": "request_body_mode=1:int32 response_body_mode=2:int32",
    "ProcessingRequest": "request_headers=2:HttpHeaders|request "
    "response_headers=3:HttpHeaders|request request_body=4:HttpBody|request "
    "response_body=5:HttpBody|request request_trailers=6:HttpTrailers|request "
    "response_trailers=7:HttpTrailers|request metadata_context=8:Metadata "
    "observability_mode=10:bool protocol_config=11:ProtocolConfiguration",
}
"""name=number:type of each field, * if it is repeated, |the oneof that it is in. An enum is its
number: that is the same on the wire."""


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc.proto", package=_PACKAGE)
    file.syntax, file.dependency[:] = "proto3", [struct_pb2.DESCRIPTOR.name]
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            _add_field(message, text)
    entry = next(each for each in file.message_type if each.name == "FilterMetadataEntry")
    entry.options.map_entry = True
    metadata = next(each for each in file.message_type if each.name == "Metadata")
    metadata.nested_type.append(entry)  # a map's entries are described inside
    file.message_type.remove(entry)
    return file


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


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(_described())
    names = (name for name in _MESSAGES if name != "FilterMetadataEntry")
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in names
    }


MESSAGES: Final = _classes()
"""The class of each message, by its name."""
