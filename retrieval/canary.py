"""Sixteen passages of an index with their vectors, to notice that the same model computes other vectors today.

The fingerprint of a model covers its files, but not the libraries, the device or the server that compute its vectors. The
canary does: `search` and `answer` encode its passages, in one batch, and compare. It is a JSON file, `canary-<hash>.json`:

    texts      16 passages, spread evenly over the index
    vectors    their vectors as stored, before scaling to unit length and before quantisation
    versions   the versions of the libraries when the index was built
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.retrieval.disk import checksum
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.whole_files import whole_file

SAMPLE_SIZE = 16
SAME_COSINE = 0.999
"""Similarity from which vectors count as equal: float32 batches differ by 1e-6, bfloat16 by 1e-4."""
ROUNDED_COSINE = 0.95
"""Mean similarity from which a difference may be rounding: int8 models reach 0.95 to 0.99. Below it, search is wrong."""

LIBRARIES = ("torch", "transformers", "sentence-transformers", "tokenizers")


@dataclass(frozen=True)
class Canary:
    """Passages and their vectors.

    Attributes:
        texts: The passages.
        vectors: Their vectors.
        versions: Library -> version when the vectors were stored.
    """

    texts: list[str]
    vectors: list[list[float]]
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: list[str], vectors_ND: NDArray[np.float32]) -> "Canary":
        """Return the canary of passages with the versions of the installed libraries."""
        return cls(texts, vectors_ND.tolist(), installed())

    @classmethod
    def read(cls, folder: Path, name: str) -> "Canary":
        """Read the canary of an index, by the name that `write` returned."""
        path = _path(folder, name)
        try:
            content = path.read_bytes()
            if checksum(content) != name:
                raise ValueError("its content does not match its name")
            return cls(**json.loads(content))
        except (OSError, ValueError, TypeError) as error:
            reason = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({error})"
            raise UserError(
                f"{path} is {reason}: write it again by running revela-hub index with the same model, corpus and folder"
                " (the vectors are reused)"
            ) from error

    def write(self, folder: Path, option: str = "--output_dir") -> str:
        """Write the canary to the folder of an index, and return its name there."""
        content = (json.dumps(asdict(self), ensure_ascii=False) + "\n").encode()
        with whole_file(_path(folder, checksum(content)), option) as stream:
            stream.write(content)
        return checksum(content)

    def similarities(
        self, encoder: Encoder, similarity: str, *, prompt: str | None = None, truncate_dim: int | None = None
    ) -> NDArray[np.float64]:
        """Return how similar the vectors of each passage then and now are: (N,), 1 for equal vectors.

        This is the cosine; if the model compares by dot product, times the ratio of the lengths. `truncate_dim` is the number of
        components that the index keeps (None: all).
        """
        then_ND = np.array(self.vectors, dtype=np.float64)
        now_ND = encode_texts(encoder, self.texts, "document", batch_size=SAMPLE_SIZE, prompt=prompt)[:, :truncate_dim]
        if now_ND.shape != then_ND.shape:
            raise UserError(
                f"the vectors have {then_ND.shape[-1]} dimensions in the index, but the model computes {now_ND.shape[1]} now:"
                " build the index in a new folder"
            )
        now_ND = now_ND.astype(np.float64)
        then_N, now_N = np.linalg.norm(then_ND, axis=1), np.linalg.norm(now_ND, axis=1)
        scale_N = then_N * now_N if similarity == "cosine" else np.maximum(then_N, now_N) ** 2
        products_N = (then_ND * now_ND).sum(axis=1)
        found_N: NDArray[np.float64] = products_N / np.maximum(scale_N, 1e-30)
        found_N[scale_N == 0] = (then_N == now_N)[scale_N == 0]  # two zero vectors are equal
        return found_N

    def changes(self) -> list[str]:
        """Return the libraries whose version is another one now: `transformers 5.17.0 -> 5.23.0`."""
        now = installed()
        return [f"{name} {then} -> {now.get(name)}" for name, then in self.versions.items() if now.get(name) != then]


def finding(similarities_N: NDArray[np.float64], similarity: str, causes: Sequence[str]) -> tuple[bool, str]:
    """Return whether vectors with these `Canary.similarities` are usable, and a sentence about their difference, or ""."""
    lowest, mean = float(similarities_N.min(initial=1.0)), float(similarities_N.mean()) if len(similarities_N) else 1.0
    if lowest >= SAME_COSINE:
        return True, ""
    changed = int((similarities_N < SAME_COSINE).sum())
    measure = "cosine" if similarity == "cosine" else "similarity (cosine times ratio of lengths)"
    sentence = (
        f"{changed} of {len(similarities_N)} of its passages have other vectors now than when it was built ({measure} to the"
        f" stored ones {mean:.4f} on average, {lowest:.4f} at the lowest)"
    )
    if causes:
        sentence += f"; changed since: {', '.join(causes)}"
    return mean >= ROUNDED_COSINE, sentence


def spread(count: int) -> NDArray[np.int64]:
    """Return the numbers of up to 16 passages, spread evenly over an index of `count` passages.

    >>> spread(5).tolist(), spread(31).tolist()[:4], int(spread(1000)[-1])
    ([0, 1, 2, 3, 4], [0, 2, 4, 6], 999)
    """
    return np.unique(np.linspace(0, count - 1, min(SAMPLE_SIZE, count)).round().astype(np.int64))


def installed() -> dict[str, str]:
    """Return the versions of the libraries that affect vectors."""
    return {name: version(name) for name in LIBRARIES}


def server_change(built: str | None, encoder: Any) -> list[str]:
    """Return the change of the server that computes the vectors, if there is one."""
    now = getattr(encoder, "description", None)
    return [] if built == now else [f"server {built} -> {now}"]


def _path(folder: Path, name: str) -> Path:
    return folder / f"canary-{name}.json"
