"""Inputs of in-batch attention besides queries, keys and values.

Shapes: G groups, B chunks of a group, N = G * B rows, L tokens, K key/value heads, D head dimension, P pairs of chunks.
"""

from dataclasses import dataclass

from torch import Tensor


class StreamE(dict[int, tuple[Tensor, Tensor]]):
    """Keys and values (N, K, L, D) of stream e by layer: filled by a forward pass that gets it as `in_batch`."""

    repeated = False
    """Whether a layer runs several times, so that its states cannot be found by its index."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the states of a layer."""
        self.repeated |= layer in self
        self[layer] = key, value


@dataclass
class InBatch:
    """Inputs of the cross-document part besides queries, keys and values.

    Attributes:
        similarity_GBB: weight of chunk j for chunk i, in float32 or wider; its diagonal is ignored.
        lengths_N: number of tokens of each chunk; the rest of its row is padding. None without padding.
        pairs_2P: rows (i, j) of the pairs to compute, as indices into all N rows; None for all pairs.
        places_NL: column of each of the caller's tokens in the rows here; None if unchanged.
        v_normalization: whether b_ij is divided by the weighted norm of its values.
        eps: added to that divisor.
        bias: (layers,) for joint reading (`joint_reading.py`); None for the paper's added reads.
        stream_e: keys and values of stream e, if it was run before; None if both streams are run as one batch.
    """

    similarity_GBB: Tensor
    lengths_N: Tensor | None = None
    pairs_2P: Tensor | None = None
    places_NL: Tensor | None = None
    v_normalization: bool = False
    eps: float = 1e-6
    bias: Tensor | None = None
    stream_e: StreamE | None = None
