"""One address for several servers: each connection goes to the first of them that takes it. On the
import path of the tests (pytest's `pythonpath`)."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def forwarder(ports: Sequence[int]) -> Iterator[str]:
    """Yield the URL of the address, which is there until the end of the block."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            for port in ports:
                with contextlib.suppress(ConnectionRefusedError):
                    there = socket.create_connection(("127.0.0.1", port))
                    break
            else:
                return
            with there:
                back = threading.Thread(target=_copy, args=(there, self.request))
                back.start()
                _copy(self.request, there)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()
