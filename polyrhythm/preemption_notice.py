"""Notices of a cloud that it takes this machine away: its metadata service is asked for them.

Sources: the clouds' documentation of Spot instance interruption notices (AWS, with IMDSv2), of Spot
VMs (Google Cloud: `instance/preempted`) and of Scheduled Events (Azure). All answer at the same
address, which no proxy serves and no other machine has. Google and Azure want a header that a
redirected request would not have; AWS a token.
"""

import contextlib
import http.client
import json
import threading
from collections.abc import Callable
from typing import Any, Protocol

from polyrhythm.errors import LaunchError
from polyrhythm.types import Seconds

NOTICE_VARIABLE = "POLYRHYTHM_PREEMPTION_NOTICE"  # a cloud; or CLOUD@ADDRESS:PORT
_ADDRESS = "169.254.169.254"
_POLL_INTERVAL: Seconds = 2.0  # Google and Azure give 30 s, AWS two minutes
_REQUEST_TIMEOUT: Seconds = 1.0
_NUM_TRIES = 5  # until a warning that nothing answers
_AZURE_EVENTS = {"Preempt", "Terminate", "Redeploy", "Reboot"}  # Freeze: for seconds
_MAX_BYTES = 1 << 20


class _UnusableAnswerError(OSError):
    """Not the answer of this cloud's metadata service."""


class _Cloud(Protocol):
    def notice(self) -> str:
        """Return the notice, or an empty text. Raises OSError if the service does not answer."""
        ...


class MetadataService:
    """The HTTP service at one address."""

    def __init__(self, address: str = _ADDRESS) -> None:
        self.address = address

    def request(
        self, path: str, headers: dict[str, str], *, method: str = "GET"
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Return status, body and headers of an answer."""
        try:
            connection = http.client.HTTPConnection(self.address, timeout=_REQUEST_TIMEOUT)
            with contextlib.closing(connection):
                connection.request(method, path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read(_MAX_BYTES).decode(errors="replace"), answer.msg
        except (
            http.client.HTTPException,
            ValueError,
        ) as error:  # a header that no request can have
            raise _UnusableAnswerError(f"{type(error).__name__}: {error}") from None

    def get(self, path: str, headers: dict[str, str]) -> str:
        """Return the body of a successful answer."""
        status, body, _ = self.request(path, headers)
        if status != http.HTTPStatus.OK:
            raise _UnusableAnswerError(f"status {status} for {path}")
        return body


class _Aws:
    def __init__(self, service: MetadataService) -> None:
        self._service, self._token = service, ""

    def notice(self) -> str:
        if not self._token:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            status, body, _ = self._service.request("/latest/api/token", wanted, method="PUT")
            if status != http.HTTPStatus.OK:
                raise _UnusableAnswerError(f"status {status} for a token")
            self._token = body
        path, token = "/latest/meta-data/spot/instance-action", self._token
        status, body, _ = self._service.request(path, {"X-aws-ec2-metadata-token": token})
        if status == http.HTTPStatus.NOT_FOUND:
            return ""
        if status != http.HTTPStatus.OK:
            self._token = ""  # it may have expired
            raise _UnusableAnswerError(f"status {status} for {path}")
        if "action" not in (found := _parsed(body)):
            raise _UnusableAnswerError(f"no action: {body[:80]!r}")
        return f"{found['action']} at {found.get('time', 'once')}"


class _Gcp:
    def __init__(self, service: MetadataService) -> None:
        self._service = service

    def notice(self) -> str:
        path, flavor = "/computeMetadata/v1/instance/preempted", "Metadata-Flavor"
        status, body, headers = self._service.request(path, {flavor: "Google"})
        if status != http.HTTPStatus.OK or headers[flavor] != "Google":
            raise _UnusableAnswerError(f"status {status} for {path}")
        return "preempted" if body.strip() == "TRUE" else ""


class _Azure:
    def __init__(self, service: MetadataService) -> None:
        self._service, self._name = service, ""

    def notice(self) -> str:
        headers = {"Metadata": "true"}
        if not self._name:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._service.get(path, headers)
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        found = _parsed(self._service.get(path, headers))
        try:
            for event in found.get("Events", ()):
                # It lists the events of all machines of an availability set or scale set.
                kind, resources = event.get("EventType"), event.get("Resources", ())
                if kind in _AZURE_EVENTS and self._name in resources:
                    return f"{kind} not before {event.get('NotBefore') or 'now'}"
        except (TypeError, AttributeError) as error:
            raise _UnusableAnswerError(f"no list of events: {error}") from None
        return ""


class _AnyCloud:
    """The first one that answers."""

    def __init__(self, service: MetadataService) -> None:
        self._clouds: list[_Cloud] = [cloud(service) for cloud in _CLOUDS.values()]

    def notice(self) -> str:
        errors = []
        for cloud in self._clouds:
            try:
                found = cloud.notice()
            except OSError as error:
                errors.append(str(error))
            else:
                self._clouds = [cloud]
                return found
        raise _UnusableAnswerError("; ".join(dict.fromkeys(errors)))


_CLOUDS: dict[str, Callable[[MetadataService], _Cloud]] = {
    "aws": _Aws,
    "gcp": _Gcp,
    "azure": _Azure,
}
_ALL = {**_CLOUDS, "auto": _AnyCloud}


def _parsed(body: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(body), dict):
            return found
    raise _UnusableAnswerError(f"no JSON object: {body[:80]!r}")


def _checked(wanted: str, address: str) -> str:
    """Return `address`, a host with or without a port. Raises LaunchError."""
    with contextlib.suppress(http.client.InvalidURL):
        parsed = http.client.HTTPConnection(address)
        if parsed.host and 0 < parsed.port < 1 << 16:
            return address
    raise LaunchError(
        f"preemption notices of {wanted!r}",
        expected="CLOUD@HOST or CLOUD@HOST:PORT",
        fix=f"correct {NOTICE_VARIABLE}, or omit the address",
    )


class NoticeWatch:
    """Asks for a notice in a thread, from `start` until `close`."""

    def __init__(self, wanted: str, *, interval: Seconds = _POLL_INTERVAL) -> None:
        """`wanted` is the value of NOTICE_VARIABLE. Raises LaunchError."""
        name, _, address = wanted.partition("@")
        if name not in _ALL:
            raise LaunchError(
                f"preemption notices of {wanted!r}",
                expected=" or ".join(_ALL),
                fix=f"correct --preemption-notice, or {NOTICE_VARIABLE}",
            )
        self._name, self._address = name, _checked(wanted, address or _ADDRESS)
        self._cloud, self._interval = _ALL[name](MetadataService(self._address)), interval
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_notice: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """Call `on_notice` once, with the notice, or `warn` if nothing answers at first."""
        watch = (on_notice, warn)
        self._thread = threading.Thread(
            target=self._watch, args=watch, name="preemption-notice", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, which may be in a request for a second."""
        self._closing.set()

    def _watch(self, on_notice: Callable[[str], None], warn: Callable[[str], None]) -> None:
        num_failed, has_answered = 0, False
        while not self._closing.is_set():
            try:
                found = self._cloud.notice()
            except OSError as error:
                num_failed += 1
                if num_failed == _NUM_TRIES and not has_answered:
                    what = "no cloud" if self._name == "auto" else f"no service of {self._name}"
                    warn(f"{what} answers at {self._address}: no notice comes from there: {error}")
            else:
                has_answered = True  # it is there: later failures are no news
                if found and not self._closing.is_set():
                    on_notice(f"{self._name}: {found}")
                    return
            self._closing.wait(self._interval)
