"""Use the models on this machine at once if the Hub cannot be reached.

Otherwise `huggingface_hub` repeats the request for each file that is not in its cache six times. To load a model takes five
minutes then, even one that is in the cache.
"""

import logging
import threading
from functools import cache

_logger = logging.getLogger(__name__)
_LOCK = threading.Lock()
_ours = False  # whether we have switched offline mode on


def prefer_cache() -> None:
    """Switch to the offline mode of `huggingface_hub` if the Hub cannot be reached. Call it before loading from the Hub."""
    from huggingface_hub import constants, is_offline_mode

    global _ours
    with _LOCK:
        if not is_offline_mode() and (fault := _fault(constants.ENDPOINT)):
            _logger.warning("the Hub cannot be reached (%s): only models on this machine are used", fault)
            constants.HF_HUB_OFFLINE = _ours = True


def reconnect() -> None:
    """Undo `prefer_cache`: later requests, such as those of an upload, try to reach the Hub again."""
    from huggingface_hub import constants

    global _ours
    with _LOCK:
        if _ours:
            constants.HF_HUB_OFFLINE = _ours = False


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
        get_session().head(address, timeout=10)
    except Exception:
        get_session().head(address, timeout=10)
