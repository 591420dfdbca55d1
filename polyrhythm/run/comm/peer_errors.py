"""Waiting for other workers: a failure of torch.distributed becomes a PeerError with its who."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from polyrhythm.errors import PeerError
from polyrhythm.types import Worker


@contextmanager
def peer_errors(peer: Worker | str, action: str) -> Iterator[None]:
    """Turn a lost connection or a passed deadline of the process group into a PeerError."""
    start = time.monotonic()
    try:
        yield
    except PeerError:  # says it already
        raise
    except RuntimeError as error:  # gloo raises plain ones; torch's DistError is one too
        waited = time.monotonic() - start
        raise PeerError(str(peer), action=action, waited=waited, cause=short_cause(error)) from None


def short_cause(error: RuntimeError) -> str:
    """What torch.distributed complained of, in a line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = line.split(" This is typically")[0]  # gloo guesses on
    return re.sub(r"^\[\S+:\d+\] ", "", line)  # without the place in gloo's source
