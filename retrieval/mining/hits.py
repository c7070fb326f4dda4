"""The best texts of each anchor, found block by block and kept on disk."""

import logging
import zipfile
from pathlib import Path

import numpy as np

from revela_hub.retrieval.disk import key_of, make_folder, whole_file
from revela_hub.retrieval.mining.negatives import Found
from revela_hub.retrieval.scores import Scores
from revela_hub.retrieval.top_k import best_hits

logger = logging.getLogger(__name__)


class HitsOnDisk:
    """The best texts of blocks of anchors.

    Args:
        folder: Where hits are kept; these get a folder of their own in it.
        scores: How well each text fits each anchor.
        depth: How many texts to keep of each anchor.

    Raises:
        UserError: The folder cannot be made.
    """

    def __init__(self, folder: Path, scores: Scores, depth: int) -> None:
        """Finds nothing yet."""
        self._folder = make_folder(folder / f"hits-{key_of(scores.key, depth)}")
        self._scores = scores
        self._depth = depth

    def best(self, start: int, stop: int) -> Found:
        """The best texts of the anchors from `start` to before `stop`.

        Raises:
            UserError: The disk is full.
        """
        path = self._folder / f"{start}-{stop}.npz"
        if path.is_file():
            try:
                with np.load(path, allow_pickle=False) as arrays:
                    return Found(arrays["scores"], arrays["rows"])
            except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
                logger.warning("%s is damaged (%s): its anchors are searched for again", path, error)
        hits = best_hits(self._scores.score_blocks(start, stop), self._depth, self._scores.floor)
        found = Found(hits.scores_QK, hits.rows_QK)
        with whole_file(path) as stream:
            np.savez(stream, scores=found.scores_AK, rows=found.rows_AK)
        return found
