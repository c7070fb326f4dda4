"""Use the models on this machine at once if the Hub cannot be reached.

Otherwise `huggingface_hub` repeats the request for each file that is not in its cache six times. To load a model takes five
minutes then, even one that is in the cache.
"""

import logging
import threading
import time
from functools import cache
from importlib import import_module

_logger = logging.getLogger(__name__)
_LOCK = threading.Lock()
_TIMEOUT, _AGAIN = 10.0, 60.0  # seconds that a request takes at most, and until the Hub is tried again
_since: float | None = None  # when we switched offline mode on


def prefer_cache() -> None:
    """Switch to the offline mode of `huggingface_hub` if the Hub cannot be reached. Call it before loading from the Hub.

    A call after more than a minute tries again.
    """
    from huggingface_hub import constants, is_offline_mode

    global _since
    with _LOCK:
        if _since is not None and time.monotonic() > _since + _AGAIN:
            constants.HF_HUB_OFFLINE, _since = False, None
        if not is_offline_mode() and (fault := _fault(constants.ENDPOINT)):
            _logger.warning("the Hub cannot be reached (%s): only models on this machine are used", fault)
            import_module("datasets")  # before the switch, because it keeps the mode in which it was imported
            constants.HF_HUB_OFFLINE, _since = True, time.monotonic()


def reconnect() -> None:
    """Undo `prefer_cache`: later requests, such as those of an upload, try to reach the Hub again."""
    from huggingface_hub import constants

    global _since
    with _LOCK:
        if _since is not None:
            constants.HF_HUB_OFFLINE, _since = False, None


def _fault(address: str) -> str | None:
    try:
        _request(address)
    except Exception as error:  # httpx or httpx2, depending on the version of huggingface_hub
        return str(error) or type(error).__name__
    return None


@cache  # of addresses that have answered
def _request(address: str) -> None:
    """Send a request, and once more if that fails; any response will do."""
    from huggingface_hub import get_session

    try:
        get_session().head(address, timeout=_TIMEOUT)
    except Exception:
        get_session().head(address, timeout=_TIMEOUT)
