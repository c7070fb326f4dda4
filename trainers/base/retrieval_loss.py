"""Losses over retrieval scores, and gathering of batches across processes."""

import torch
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor
from torch.nn import functional as F

from revela_hub.trainers.base.processes import is_distributed


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


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate the rows of all processes, with gradients; every process must have the same number of rows."""
    return all_gather_with_grad(rows) if is_distributed() else rows
