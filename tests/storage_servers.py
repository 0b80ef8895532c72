"""Servers of Amazon's and Google's storage on loopback, through a proxy that counts requests and injects faults."""

import contextlib
import http.client
import http.server
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import NamedTuple

BUCKET = "bucket"
# moto has Amazon's protocol. The emulator of Google's lacks what TensorStore needs: generations of objects in headers, and
# writes and reads on condition of a generation.
_PROGRAMS = {
    "s3": "from moto.server import main; main(['-p', '{port}'])",
    "gs": """
from http import HTTPStatus
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

def generation(request, storage, name):
    try:
        return storage.get_file_obj(request.params["bucket_name"], name)["generation"]
    except NotFound:
        return "0"

def conditional(function):
    def call(request, response, storage, *args, **kwargs):
        name = request.params.get("object_id") or (request.query.get("name") or [""])[0]
        current = generation(request, storage, name)
        for parameter, is_met in (("ifGenerationMatch", lambda x: x == current), ("ifGenerationNotMatch", lambda x: x != current)):
            if parameter in request.query and not is_met(request.query[parameter][0]):
                response.status = HTTPStatus(412 if parameter == "ifGenerationMatch" else 304)
                return
        function(request, response, storage, *args, **kwargs)
        response["x-goog-generation"] = generation(request, storage, name)
    return call

for name in ("download", "get", "insert", "delete"):
    setattr(objects, name, conditional(getattr(objects, name)))
from gcp_storage_emulator import server
import http.server
server.server.HTTPServer = http.server.ThreadingHTTPServer
server.create_server("localhost", {port}, in_memory=True).run()
""",
}


class Request(NamedTuple):
    """A request as the proxy has seen it.

    Attributes:
      method: HTTP's verb.
      path: path with query.
      status: of the reply.
      sent, received: bytes of the bodies, from the client and to it.
    """

    method: str
    path: str
    status: int
    sent: int
    received: int

    @property
    def is_write(self) -> bool:
        return self.method in ("PUT", "POST", "DELETE") and "?delete" not in self.path


class Storage:
    """A bucket behind a proxy.

    Attributes:
      url: URL of the bucket, such as "s3://bucket".
      port: port of the server behind the proxy.
      environment: variables with which programs find the server.
      requests: all requests so far.
      fault: function called with each method and path before it is forwarded. It may wait; it returns a status with which the
        request is answered in place of the server, -1 to close the connection after the request, -2 to close it within the
        reply, or None.
      listing_lag: seconds for which the listing of a run's checkpoints is answered as before. (Both storages guarantee current
        listings. Orbax needs them inside of a checkpoint.)
    """

    def __init__(self, scheme: str, address: str, port: int):
        self.url, self.port = f"{scheme}://{BUCKET}", port
        self.requests: list[Request] = []
        self.listing_lag = 0.0
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        self.environment = {
            "s3": {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_REGION": "us-east-1",
            },
            "gs": {
                "STORAGE_EMULATOR_HOST": address,
                "TENSORSTORE_GCS_HTTP_URL": address,
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                "GOOGLE_CLOUD_PROJECT": "project",
            },
        }[scheme]

    def names(self, folder: str = "") -> list[str]:
        """Returns the names of the objects in a folder of the bucket."""
        if self.url.startswith("s3"):
            listing = self._get(f"/{BUCKET}?list-type=2&prefix={urllib.parse.quote(folder)}").decode()
            return re.findall("<Key>(.*?)</Key>", listing)
        listing = json.loads(self._get(f"/storage/v1/b/{BUCKET}/o?prefix={urllib.parse.quote(folder)}"))
        return [item["name"] for item in listing.get("items", [])]

    def objects(self, folder: str) -> dict[str, bytes]:
        """Returns the objects of a folder of the bucket by name."""
        is_amazon = self.url.startswith("s3")
        path = lambda key: f"/{BUCKET}/{key}" if is_amazon else f"/download/storage/v1/b/{BUCKET}/o/{key}?alt=media"
        quote = lambda name: urllib.parse.quote(name, safe="/" if is_amazon else "")
        return {name: self._get(path(quote(name))) for name in self.names(f"{folder}/")}

    def download(self, folder: str, directory: str) -> None:
        """Copies the objects of a folder of the bucket to a local directory."""
        for name, data in self.objects(folder).items():
            path = pathlib.Path(directory, name.removeprefix(f"{folder}/"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(f"http://localhost:{self.port}{path}")
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request")
        with urllib.request.urlopen(request) as reply:
            return reply.read()


_ERRORS = {
    401: b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>",
    403: b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
    404: b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>",
    503: b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
}


_BETWEEN_NEIGHBORS = ("connection", "transfer-encoding", "expect")  # headers that a proxy does not forward


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a reply's body waits 40 ms for the acknowledgement of its headers
    storage: Storage
    port: int
    listings: dict[str, tuple[float, tuple[int, dict[str, str], bytes]]]

    def _forward(self) -> None:
        body = self._body()
        fault = self.storage.fault(self.command, self.path)
        if fault == -1:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault is not None and fault > 0:
            self._answer(fault, {"Content-Type": "application/xml"}, _ERRORS.get(fault, b""), 0)
            return
        if move := re.fullmatch(r"(.*/b/.*/o/.*)/moveTo/o/(.*)", self.path):  # Google's emulator knows only its two halves
            status, headers, data = self._ask(self.command, f"{move[1]}/rewriteTo/b/{BUCKET}/o/{move[2]}", body)
            self._ask("DELETE", move[1], b"")
        else:
            status, headers, data = self._listed(body) if self._is_listing() else self._ask(self.command, self.path, body)
        self.storage.requests.append(Request(self.command, self.path, status, len(body), len(data)))
        self._answer(status, headers, data, fault)

    def _is_listing(self) -> bool:
        return self.command == "GET" and bool(re.search(r"prefix=[^&]*/checkpoints/(&|$)", urllib.parse.unquote(self.path)))

    def _listed(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Returns a listing, which may be an old one."""
        then, reply = self.listings.get(self.path, (0.0, None))
        if reply is None or time.monotonic() - then >= self.storage.listing_lag:
            reply = self._ask(self.command, self.path, body)
            self.listings[self.path] = time.monotonic(), reply
        return reply

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Returns the server's status, headers and body."""
        server = http.client.HTTPConnection("localhost", self.port, timeout=120)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _BETWEEN_NEIGHBORS}
        if body or "Content-Length" in self.headers:
            headers["Content-Length"] = str(len(body))
        server.request(method, path, body, headers)
        reply = server.getresponse()
        data = reply.read()
        server.close()
        return reply.status, dict(reply.getheaders()), data

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _forward

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: dict, data: bytes, fault: int | None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in (*_BETWEEN_NEIGHBORS, "content-length", "server", "date"):
                self.send_header(name, value)
        length = (
            headers.get("Content-Length", headers.get("content-length", len(data))) if self.command == "HEAD" else len(data)
        )
        if status not in (204, 304):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if fault == -2:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(data)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # of a client that was killed
            super().handle()

    def log_message(self, *args) -> None:
        pass


@contextlib.contextmanager
def storage(scheme: str) -> Iterator[Storage]:
    """Serves an empty bucket: "s3" Amazon's, "gs" Google's."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = _PROGRAMS[scheme].replace("{port}", str(port))
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    handler = type("Handler", (_Handler,), {"port": port, "listings": {}})
    proxy = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    address = f"http://localhost:{proxy.server_address[1]}"
    handler.storage = Storage(scheme, address, port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        _create_bucket(scheme, f"http://localhost:{port}")
        yield handler.storage
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.kill()
        server.wait()


def _create_bucket(scheme: str, address: str) -> None:
    if scheme == "s3":
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
    else:
        request = urllib.request.Request(f"{address}/storage/v1/b?project=p", f'{{"name": "{BUCKET}"}}'.encode(), method="POST")
        request.add_header("Content-Type", "application/json")
    until = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(request).read()
            return
        except (urllib.error.URLError, ConnectionError) as error:
            if time.monotonic() > until or isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(0.1)
