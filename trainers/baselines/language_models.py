"""The language models of the baselines: REPLUG's teacher, and the reader of RA-IT and RA-DIT."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError, loading
from revela_hub.loading import varying_shapes
from revela_hub.modeling.backbones import load_backbone
from revela_hub.output import progress_bar
from revela_hub.retrieval.encoder import text_positions
from revela_hub.trainers.base.models import ModelLike, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import is_encoder


def load_lm(
    lm: ModelLike, *, tokenizer: PreTrainedTokenizerBase | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder in float32 and its tokenizer; a loaded model is returned unchanged. A bidirectional one is a `UserError`."""
    model, name = unwrapped(lm), name_of(lm)
    with loading(f"cannot load the language model {name!r}", name):
        if is_encoder(model, trust_remote_code=trust_remote_code):
            raise UserError(f"the language model {name!r} is an encoder: use a decoder, which predicts the next token")
        tokenizer = tokenizer_of(lm, tokenizer, trust_remote_code=trust_remote_code)
        if isinstance(model, str):
            model = load_backbone(AutoModelForCausalLM, name, trust_remote_code=trust_remote_code, dtype=torch.float32)
    return model, tokenizer


def check_room(lm: PreTrainedModel, tokens: int) -> None:
    """Raise a `UserError` if a text of this length does not fit into the positions of a language model."""
    positions = text_positions(lm.config)
    if positions is not None and tokens > positions:
        raise UserError(
            f"texts of up to {tokens} tokens do not fit into the {positions} positions of the language model: lower"
            " max_length or max_passage_length, or read fewer passages"
        )


@varying_shapes()
@torch.no_grad()
def log_likelihoods(
    lm: PreTrainedModel,
    pairs: Sequence[tuple[list[int], list[int]]],
    batch_size: int,
    *,
    show_progress_bar: bool = False,
) -> Tensor:
    """Return log p(second | first) of pairs of texts, given as token ids, summed over the tokens of the second: (N,) in nats."""
    lm.eval()
    lengths = np.array([len(first) + len(second) for first, second in pairs], dtype=np.int64)
    check_room(lm, int(lengths.max(initial=0)))
    total_N = torch.zeros(len(pairs), device=lm.device)
    order = np.argsort(lengths, kind="stable")  # for little padding
    starts = range(0, len(pairs), batch_size)
    for start in progress_bar(starts, desc="Reading", unit=" batches", show=show_progress_bar):
        rows = order[start : start + batch_size]
        read = [pairs[row] for row in rows]
        # Padding on the right, which no earlier token attends to.
        ids = pad_sequence([torch.tensor([*first, *second]) for first, second in read], batch_first=True).to(lm.device)
        scored = torch.zeros_like(ids, dtype=torch.bool)
        for number, (first, second) in enumerate(read):
            scored[number, len(first) : len(first) + len(second)] = True
        keep = scored.any(0).nonzero()[:, 0] - 1  # the positions that predict a token of a second text
        logits = lm(input_ids=ids, use_cache=False, logits_to_keep=keep).logits.float()
        log_p = logits.log_softmax(-1).gather(-1, ids[:, keep + 1, None])[..., 0]
        total_N[torch.from_numpy(rows).to(lm.device)] = (log_p * scored[:, keep + 1]).sum(-1)
    return total_N
