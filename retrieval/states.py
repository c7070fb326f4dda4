"""Keys and values of passages on disk, as they are or by a product quantiser, for readers that encode passages alone.

A token has, for each of the L layers that read, H key and H value vectors of D numbers: `vectors = L * 2 * H`. As they are
they take 2 bytes a number (float16). Compressed, each of these `vectors` kinds has a quantiser of its own, trained on a
sample: FAISS' OPQ (a rotation) and PQ, D / m numbers to a byte.

    states.json          what it is
    starts.npy           (M + 1,) the first token of each passage
    codes.npy            (tokens, vectors, bytes of a vector)
    codec-<n>.faiss      the quantisers

Model-agnostic: what a vector means is the caller's knowledge; `key` names it (model, passages), and is compared.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.errors import UserError

FACTS = "states.json"
MIN_SAMPLE = 256  # a byte's centroids: with fewer vectors there is nothing to quantise
SAMPLE = 65_536


@dataclass(frozen=True)
class StatesFacts:
    """What `states.json` says.

    Attributes:
        key: what the states belong to.
        vectors: vectors of a token.
        dimension: numbers of a vector.
        pq: bytes of a compressed vector; 0 for float16.
        kept: the share of each passage's tokens that was kept.
    """

    key: str
    vectors: int
    dimension: int
    pq: int = 0
    kept: float = 1.0


class TokenStates:
    """States that are on disk.

    Args:
        folder: what `write_states` wrote.
        key: what they have to belong to; None: not compared.

    Raises:
        UserError: there are none, they belong to something else, or they are damaged.
    """

    def __init__(self, folder: str | Path, key: str | None = None) -> None:
        self.folder = Path(folder)
        try:
            self.facts = StatesFacts(**json.loads((self.folder / FACTS).read_text(encoding="utf-8")))
            self.starts = np.load(self.folder / "starts.npy")
            self.codes = np.load(self.folder / "codes.npy", mmap_mode="r")
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder} holds no stored states ({error}): make the index again with --states") from error
        if key is not None and key != self.facts.key:
            raise UserError(f"{folder} has the states of another model or other passages: make the index again")
        self.codecs = [
            _read_codec(self.folder / f"codec-{n}.faiss") for n in range(self.facts.vectors * bool(self.facts.pq))
        ]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def bytes(self) -> int:
        """What they take on the disk, quantisers included."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())

    def read(self, row: int) -> NDArray[np.float32]:
        """The (tokens, vectors, dimension) states of a passage."""
        codes = np.ascontiguousarray(self.codes[self.starts[row] : self.starts[row + 1]])
        if not self.facts.pq:
            return codes.astype(np.float32)
        parts = [codec.sa_decode(np.ascontiguousarray(codes[:, n])) for n, codec in enumerate(self.codecs)]
        return np.stack(parts, axis=1).astype(np.float32)


def write_states(
    passages: Iterable[NDArray[np.float32]],
    folder: str | Path,
    facts: StatesFacts,
    sample: NDArray[np.float32] | None = None,
    *,
    show_progress_bar: bool = False,
) -> TokenStates:
    """Writes the states of passages, one after the other, without holding them all.

    Args:
        passages: (tokens, vectors, dimension) for each passage.
        folder: where to.
        facts: what they are.
        sample: (tokens, vectors, dimension) to train the quantisers on.
        show_progress_bar: whether to show one on standard error while they are trained.

    Raises:
        UserError: FAISS is not installed, the vectors cannot be cut into `pq` parts, or the sample is too small.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).unlink(missing_ok=True)  # not complete until it is written last
    codecs = [] if not facts.pq else _train(sample, facts, show_progress_bar)
    for number, codec in enumerate(codecs):
        _write_codec(codec, folder / f"codec-{number}.faiss")
    starts = [0]
    raw = folder / "codes.part"
    with raw.open("wb") as stream:
        for states in passages:
            if codecs:
                flat = [codec.sa_encode(np.ascontiguousarray(states[:, n])) for n, codec in enumerate(codecs)]
                codes: NDArray[Any] = np.stack(flat, axis=1)
            else:
                codes = states.astype(np.float16)
            stream.write(codes.tobytes())
            starts.append(starts[-1] + len(states))
    dtype, width = (np.uint8, facts.pq) if facts.pq else (np.float16, facts.dimension)
    shape = (starts[-1], facts.vectors, width)
    written = np.lib.format.open_memmap(folder / "codes.npy", mode="w+", dtype=dtype, shape=shape)
    if starts[-1]:
        written[:] = np.memmap(raw, dtype=dtype, mode="r", shape=shape)
    written.flush()
    raw.unlink()
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    (folder / FACTS).write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")
    return TokenStates(folder, facts.key)


def _train(sample: NDArray[np.float32] | None, facts: StatesFacts, show_progress_bar: bool) -> list[Any]:
    if facts.dimension % facts.pq:
        raise UserError(f"vectors of {facts.dimension} numbers cannot be cut into {facts.pq} parts: choose a divisor")
    if sample is None or len(sample) < MIN_SAMPLE:
        raise UserError(
            f"compressing states needs at least {MIN_SAMPLE} tokens to learn from, there are"
            f" {0 if sample is None else len(sample)}: store them as they are (--states float16)"
        )
    faiss = _faiss()
    codecs = []
    bar = tqdm(range(facts.vectors), desc="Learning codebooks", disable=not show_progress_bar)
    for number in bar:
        # np: no polysemous training, which serves searching among codes, and takes most of the time.
        codec = faiss.index_factory(facts.dimension, f"OPQ{facts.pq},PQ{facts.pq}x8np")
        rotation = faiss.downcast_VectorTransform(codec.chain.at(0))
        rotation.pq = faiss.ProductQuantizer(facts.dimension, facts.pq, 8)
        for quantiser in (rotation.pq, faiss.downcast_index(codec.index).pq):
            quantiser.cp.min_points_per_centroid = 1  # a small collection is no reason to warn for each of many
        codec.train(np.ascontiguousarray(sample[:SAMPLE, number]))
        codecs.append(codec)
    return codecs


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UserError(f"compressed states need FAISS ({error}): pip install 'revela-hub[search]'") from error
    return faiss


def _read_codec(path: Path) -> Any:
    return _faiss().read_index(str(path))


def _write_codec(codec: Any, path: Path) -> None:
    _faiss().write_index(codec, str(path))
