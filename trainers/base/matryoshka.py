"""Matryoshka training: the first components of each vector are vectors of their own (Kusupati et al. 2022, arXiv 2205.13147).

    L = 1 / |M| * sum_{m in M} L_m        L_m: the method's loss, with the first m components of each vector, normalized again

Afterwards vectors can be truncated to any m in M (`SentenceTransformer(..., truncate_dim=m)`, `revela-hub index --truncate_dim m`).
"""

from dataclasses import dataclass

from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.ranges import PositiveInt


@dataclass
class MatryoshkaArguments:
    """The option of the methods that train truncated vectors."""

    matryoshka_dims: list[PositiveInt] | None = option(
        None, "Also train the first N components of each vector for these N, e.g. 384 192 96 (default: whole vectors)."
    )

    def checked_dims(self, dimension: int | None, similarity: str) -> list[int]:
        """Return the sizes, the largest first; empty if only whole vectors are trained."""
        dims = sorted(self.matryoshka_dims or (), reverse=True)
        if not dims:
            return []
        shown = " ".join(map(str, self.matryoshka_dims or ()))
        if len(set(dims)) < len(dims):
            raise UserError(f"--matryoshka_dims {shown} contains a number twice: remove one")
        if dimension and dims[0] > dimension:
            raise UserError(f"--matryoshka_dims {shown}: the model's vectors have only {dimension} dimensions")
        if similarity != "cosine":
            raise UserError(f"--matryoshka_dims requires a model that compares by cosine, not by {similarity}")
        return dims
