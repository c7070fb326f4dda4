"""Ranking of passages with an existing retriever, and losses over retrieval scores."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from revela_hub.errors import UserError
from revela_hub.retrieval.dense import ExactIndex
from revela_hub.retrieval.encoder import load_encoder
from revela_hub.retrieval.ranking import RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.texts import TextList


def multi_label_nce(scores_QN: Tensor, positive_QN: Tensor, negative_QN: Tensor) -> Tensor:
    """Noise-contrastive estimation with several positives, which do not compete with each other.

        loss_q = mean over positives p of  -log( exp(s_qp) / (exp(s_qp) + sum over negatives n of exp(s_qn)) )

    Args:
        scores_QN: (Q, N), divided by the temperature, at least float32.
        positive_QN: (Q, N), True for the positives.
        negative_QN: (Q, N), True for the negatives; other passages are ignored.

    Returns:
        (Q,) losses in nats, zero for a query without positives.
    """
    lowest = torch.finfo(scores_QN.dtype).min
    negatives_Q1 = scores_QN.masked_fill(~negative_QN, lowest).logsumexp(-1, keepdim=True)
    loss_QN = F.softplus(negatives_Q1 - scores_QN) * positive_QN
    return loss_QN.sum(-1) / positive_QN.sum(-1).clamp(min=1)


def kl_to_retrieval(log_likelihood_QC: Tensor, scores_QC: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(P_LM || P_R) over candidates (self-distillation): (Q,) in nats.

    P_LM(c) = softmax_c(log p(answer | prompt, c) / temperature), without gradient     P_R(c) = softmax_c(score)
    """
    target = (log_likelihood_QC.detach() / temperature).log_softmax(-1)
    return F.kl_div(scores_QC.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)


def kl_from_retrieval(likelihood_QC: Tensor, scores_QC: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(P_R || P_LSR) of RA-DIT (arXiv 2310.01352, equation 6): (Q,) in nats.

        P_LSR(c) = softmax_c(p(answer | prompt, c) / temperature), without gradient     P_R(c) = softmax_c(score)

    The exponent is the likelihood itself (equation 4), not its logarithm.
    """
    target = (likelihood_QC.detach() / temperature).log_softmax(-1)
    return F.kl_div(target, scores_QC.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def rank_passages(
    retriever: str | NDArray[np.int32],
    queries: Sequence[str],
    passages: Sequence[str],
    depth: int = 50,
    *,
    trust_remote_code: bool = False,
    show_progress_bar: bool = False,
) -> NDArray[np.int32]:
    """Return the best passages of each query according to an existing retriever: a folder, a Hub id, or "bm25".

    A ranking of the passages for these queries is returned as it is.

    Returns:
        (Q, depth) indices of passages, best first; -1 if there are fewer results.
    """
    if not isinstance(retriever, str):
        if len(retriever) != len(queries):
            raise UserError(f"pseudo_labels has {len(retriever)} rows, but train_dataset has {len(queries)}")
        return retriever
    encoder = None if retriever == "bm25" else load_encoder(retriever, trust_remote_code=trust_remote_code)
    settings = RankerSettings(mode="dense" if encoder else "bm25", show_progress_bar=show_progress_bar)
    with ranking_folder(None, settings) as (folder, settings):
        ranker = build_ranker(TextList(passages), settings, folder, dense=encoder)
        rows_QK = ranker.search(queries, depth).rows_QK
    ranked = np.full((len(queries), depth), -1, np.int32)
    ranked[:, : rows_QK.shape[1]] = rows_QK
    return ranked


def top_rows(queries_Qd: NDArray[np.float32], passages_Md: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """Return (Q, k) indices of the passages with the largest dot products, best first; ties by lower index."""
    return ExactIndex(passages_Md).search(queries_Qd, k).rows_QK.astype(np.int32)
