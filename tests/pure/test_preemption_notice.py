"""Preemption notices of clouds, from metadata services that this test serves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polyrhythm.errors import LaunchError
from polyrhythm.preemption_notice import NoticeWatch
from tests.metadata_service import CLOUDS, Metadata, serve

WAIT = 10.0


@contextmanager
def watched(wanted: str, service: ThreadingHTTPServer) -> Iterator[tuple[list[str], list[str]]]:
    """Watch a service; return the notices and warnings."""
    notices, warnings = list[str](), list[str]()
    host, port = service.server_address[:2]
    watch = NoticeWatch(f"{wanted}@{host!s}:{port}", interval=0.01)
    watch.start(notices.append, warnings.append)
    try:
        yield notices, warnings
    finally:
        watch.close()
        assert watch._thread is not None
        watch._thread.join(WAIT)
        assert not watch._thread.is_alive()


def eventually(found: list[str]) -> None:
    waiting = threading.Event()
    for _ in range(int(WAIT / 0.01)):
        if found:
            return
        waiting.wait(0.01)
    raise AssertionError("nothing came")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wanted", [*CLOUDS, "auto"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_comes_once_and_only_from_the_cloud_that_is_asked(cloud: str, wanted: str) -> None:
    metadata = Metadata(cloud)
    with serve(metadata) as service, watched(wanted, service) as (notices, warnings):
        if wanted not in (cloud, "auto"):
            eventually(warnings)
            assert len(warnings) == 1
            assert f"no service of {wanted} answers" in warnings[0]
            return
        metadata.wait_for_requests(6)
        assert (notices, warnings) == ([], [])
        metadata.is_preempted = True
        eventually(notices)
    assert notices == [f"{wanted}: {CLOUDS[cloud].notice}"]


@pytest.mark.timeout(30)
def test_an_expired_token_is_renewed() -> None:
    metadata = Metadata("aws")
    with serve(metadata) as service, watched("aws", service) as (notices, warnings):
        metadata.wait_for_requests(4)
        metadata.token = "second"
        metadata.is_preempted = True
        eventually(notices)
        assert warnings == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "events",
    [
        [{"EventType": "Preempt", "Resources": ["another"], "NotBefore": ""}],
        [{"EventType": "Freeze", "Resources": ["machine"], "NotBefore": ""}],
    ],
)
def test_events_of_others_and_short_ones_are_no_notice(events: list[dict[str, object]]) -> None:
    metadata = Metadata("azure")
    metadata.events = events
    with serve(metadata) as service, watched("azure", service) as (notices, _):
        metadata.wait_for_requests(6)
        assert notices == []


class Portal(BaseHTTPRequestHandler):
    """Answers every request with the same body, as the login page of a network does."""

    body = b"[1]"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_PUT = do_GET  # noqa: N815  # as http.server has it

    def log_message(self, *_: object) -> None: ...


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wanted", [*CLOUDS, "auto"])
@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"<html>\n<body>login</body>\n</html>",  # no header can have several lines
        b"\xff\xfe",
        b'{"Events": null}',
        b'{"Events": [1]}',
        b'{"Events": [{"EventType": "Preempt", "Resources": null}]}',
        b'{"Events": [{"EventType": ["Preempt"], "Resources": []}]}',
    ],
)
def test_an_answer_that_cannot_be_read_is_no_notice(body: bytes, wanted: str) -> None:
    handler = type("PortalOfTest", (Portal,), {"body": body})
    with serve(handler) as service, watched(wanted, service) as (notices, warnings):
        eventually(warnings)
        assert notices == []


@pytest.mark.timeout(30)
def test_failures_after_an_answer_cause_no_warning() -> None:
    metadata = Metadata("gcp")
    with serve(metadata) as service, watched("gcp", service) as (notices, warnings):
        metadata.wait_for_requests(2)
        metadata.cloud = "azure"  # refuses the header
        metadata.wait_for_requests(20)
        assert (notices, warnings) == ([], [])


@pytest.mark.parametrize("wanted", ["ibm", "gcp@host:x", "aws@host:99999", "auto@host:0", "aws@:1"])
def test_an_unknown_cloud_or_address_is_refused(wanted: str) -> None:
    with pytest.raises(LaunchError, match=f"preemption notices of '{wanted}'"):
        NoticeWatch(wanted)
