"""A metadata service as three clouds have it, for tests."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_TIMEOUT = 20.0


class Cloud(NamedTuple):
    """What a request needs, and what a notice says."""

    header: tuple[str, str] | None
    notice: str


CLOUDS = {
    "aws": Cloud(None, "terminate at 2026-01-02T03:04:05Z"),
    "gcp": Cloud(("Metadata-Flavor", "Google"), "preempted"),
    "azure": Cloud(("Metadata", "true"), "Preempt not before now"),
}


class Metadata:
    """The content of a service, which a test changes."""

    def __init__(self, cloud: str) -> None:
        self.cloud, self.is_preempted, self.token = cloud, False, "first"
        self.events: list[dict[str, object]] = []
        self.num_requests = 0

    def wait_for_requests(self, number: int) -> None:
        """Wait for so many more."""
        wanted, deadline = self.num_requests + number, time.monotonic() + _TIMEOUT
        while self.num_requests < wanted:
            assert time.monotonic() < deadline, "nobody asks"
            time.sleep(0.01)

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        """Return status and body."""
        self.num_requests += 1
        header = CLOUDS[self.cloud].header
        if header is not None and headers.get(header[0]) != header[1]:
            return 403, ""
        match self.cloud, method, path:
            case "aws", "PUT", "/latest/api/token":
                is_asked = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
                return (200, self.token) if is_asked else (400, "")
            case "aws", "GET", "/latest/meta-data/spot/instance-action":
                if headers.get("X-aws-ec2-metadata-token") != self.token:
                    return 401, ""
                action = {"action": "terminate", "time": "2026-01-02T03:04:05Z"}
                return (200, json.dumps(action)) if self.is_preempted else (404, "")
            case "gcp", "GET", "/computeMetadata/v1/instance/preempted":
                return 200, "TRUE" if self.is_preempted else "FALSE"
            case (
                "azure",
                "GET",
                "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
            ):
                return 200, "machine"
            case "azure", "GET", "/metadata/scheduledevents?api-version=2020-07-01":
                event = {"EventType": "Preempt", "Resources": ["machine"], "NotBefore": ""}
                events = [*self.events, *([event] if self.is_preempted else [])]
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})
        return 404, ""


def handler_of(metadata: Metadata) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = metadata.answer(self.command, self.path, self.headers)
            self.send_response(status)
            if metadata.cloud == "gcp":
                self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_GET  # noqa: N815  # as http.server has it

        def log_message(self, *_: object) -> None: ...

    return Handler


@contextmanager
def serve(
    content: Metadata | type[BaseHTTPRequestHandler], address: tuple[str, int] = ("127.0.0.1", 0)
) -> Iterator[ThreadingHTTPServer]:
    """Serve it in a thread during a `with` block."""
    handler = handler_of(content) if isinstance(content, Metadata) else content
    server = ThreadingHTTPServer(address, handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_TIMEOUT)
