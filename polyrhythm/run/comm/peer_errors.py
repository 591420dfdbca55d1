"""Turn failures of torch.distributed into PeerErrors that name the peer."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from polyrhythm.errors import PeerError
from polyrhythm.types import Worker


@contextmanager
def peer_errors(peer: Worker | str, action: str) -> Iterator[None]:
    """Turn a lost connection or a timeout of the process group into a PeerError."""
    start = time.monotonic()
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:  # gloo raises plain RuntimeErrors; torch's DistError is one
        waited = time.monotonic() - start
        raise PeerError(str(peer), action=action, waited=waited, cause=short_cause(error)) from None


def short_cause(error: RuntimeError) -> str:
    """Shorten an error of torch.distributed to one line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = line.split(" This is typically")[0]  # gloo continues with a guess
    return re.sub(r"^\[\S+:\d+\] ", "", line)  # without the line of gloo's source
