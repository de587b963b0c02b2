"""Gateways: what they ask an endpoint picker, and a real Envoy that is one.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from client_kit.environment import program, surroundings
from free_ports import free_port
from grpc_health.v1 import health_pb2
from waits import PATIENCE_S, wait_until

from diptych_router.program.endpoint_picker import BODY_MODES, MESSAGES

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
HINT, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
DUPLEX, BUFFERED, STREAMED = "FULL_DUPLEX_STREAMED", "BUFFERED", "STREAMED"


ProcessingRequest, ProcessingResponse = (
    MESSAGES[name] for name in ("ProcessingRequest", "ProcessingResponse")
)


def asked(**fields: Any) -> Any:
    return ProcessingRequest(**fields)


def headers(subset: Sequence[str] | None = None, mode: str | None = None) -> Any:
    """The first message about a request: the endpoints that may be picked, how bodies are sent."""
    first = asked(request_headers={})
    if subset is not None:
        first.metadata_context.filter_metadata.add(key=HINT).value.update({SUBSET: list(subset)})
    if mode is not None:
        first.protocol_config.request_body_mode = BODY_MODES.index(mode)
        first.protocol_config.response_body_mode = BODY_MODES.index(mode)
    return first


def destinations(answer: Any) -> tuple[str, str]:
    """Where a request is sent, by the header and by the metadata."""
    [option] = answer.request_headers.response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    return option.header.raw_value.decode(), answer.dynamic_metadata["envoy.lb"][DESTINATION]


@contextlib.asynccontextmanager
async def picker(port: int) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a picker at this port of this machine, as gateways open it: they cannot know
    its certificate, and take what it shows."""
    shown = ssl.get_server_certificate(("127.0.0.1", port)).encode()
    credentials = grpc.ssl_channel_credentials(shown)
    options = [
        ("grpc.ssl_target_name_override", "diptych-router"),
        ("grpc.max_receive_message_length", -1),
    ]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        yield channel


def said(channel: grpc.aio.Channel, *messages: Any) -> Any:
    """Say this on one stream, whether or not anybody reads what is answered."""
    call = channel.stream_stream(
        f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
    )
    return call(iter(messages), timeout=PATIENCE_S)


async def exchange(channel: grpc.aio.Channel, *messages: Any) -> list[Any]:
    """Say this on one stream; what is answered until the picker has no more to say."""
    return [answer async for answer in said(channel, *messages)]


async def health(channel: grpc.aio.Channel, service: str) -> str:
    kinds = health_pb2.HealthCheckResponse
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        kinds.FromString,
    )
    found = await check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
    return str(kinds.ServingStatus.Name(found.status))


@contextlib.contextmanager
def envoy(folder: Path, pickers: int, listeners: Mapping[int, Mapping[str, Any]]) -> Iterator[None]:
    """A gateway that asks the picker at the port `pickers`. Each listener has a `mode` of bodies, a
    way to be told of the `destination` ("header" or "metadata"), and perhaps a `subset`."""
    config = folder / "envoy.json"
    config.write_text(json.dumps(_config(pickers, listeners)))
    command = [program("envoy", "envoy"), "--config-path", str(config), "--disable-hot-restart"]
    flags = ["--concurrency", "1", "--log-level", "error"]
    process = subprocess.Popen([*command, *flags], env=surroundings())
    try:
        for port in listeners:
            wait_until(lambda port=port: _listens(process, port), "Envoy listens")  # type: ignore[misc]
        yield
    finally:
        process.kill()
        process.wait()


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    assert process.poll() is None, f"Envoy has ended with {process.returncode}"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _config(pickers: int, listeners: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    by_header = {"use_http_header": True, "http_header_name": DESTINATION}
    by_metadata = {"metadata_key": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
    http2: dict[str, Any] = {"explicit_http_config": {"http2_protocol_options": {}}}
    protocols = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    clusters = [
        {
            "name": "picker",
            "connect_timeout": "60s",
            "load_assignment": {"cluster_name": "picker", "endpoints": [_endpoint(pickers)]},
            "transport_socket": {
                "name": "tls",
                "typed_config": _typed(
                    "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
                ),
            },
            "typed_extension_protocol_options": {protocols: _typed(protocols) | http2},
        },
        *(
            {
                "name": name,
                "connect_timeout": "60s",
                "type": "ORIGINAL_DST",
                "lb_policy": "CLUSTER_PROVIDED",
                "original_dst_lb_config": found_by,
            }
            for name, found_by in (("header", by_header), ("metadata", by_metadata))
        ),
    ]
    admin = {"address": _address(free_port())}
    served = [_listener(port, about) for port, about in listeners.items()]
    return {"admin": admin, "static_resources": {"listeners": served, "clusters": clusters}}


def _listener(port: int, about: Mapping[str, Any]) -> dict[str, Any]:
    kind = "envoy.extensions.filters.http"
    trailers = "SEND" if about["mode"] == DUPLEX else "SKIP"
    asks = _typed(f"{kind}.ext_proc.v3.ExternalProcessor") | {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "message_timeout": "60s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": about["mode"],
            "response_body_mode": about["mode"],
            "request_trailer_mode": trailers,
            "response_trailer_mode": trailers,
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", HINT]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters = [
        {"name": "ext_proc", "typed_config": asks},
        {"name": "router", "typed_config": _typed(f"{kind}.router.v3.Router")},
    ]
    if "subset" in about:
        told = {"metadata_namespace": HINT, "value": {SUBSET: about["subset"]}}
        hint = _typed(f"{kind}.set_metadata.v3.Config") | {"metadata": [told]}
        filters.insert(0, {"name": "hint", "typed_config": hint})
    route = {"cluster": about["destination"], "timeout": "0s"}
    host = {
        "name": "all",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": route}],
    }
    manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    connections = _typed(manager) | {
        "stat_prefix": str(port),
        "route_config": {"virtual_hosts": [host]},
        "http_filters": filters,
    }
    chain = {"filters": [{"name": "http", "typed_config": connections}]}
    return {"name": str(port), "address": _address(port), "filter_chains": [chain]}


def _typed(kind: str) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/{kind}"}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _endpoint(port: int) -> dict[str, Any]:
    return {"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}
