"""RA-IT: a decoder tuned on prompts into which the retrieved passages are pasted, by trl's `SFTTrainer`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from revela_hub.errors import UserError
from revela_hub.trainers.common.passages import PassageTokens, tokenize_passages


def paste(prompt: str, passages: Sequence[str]) -> str:
    r"""The prompt after its passages.

    >>> paste("Question: Who?\nAnswer:", ["Jane did.", "Ann did not."])
    'Passage: Jane did.\nPassage: Ann did not.\nQuestion: Who?\nAnswer:'
    """
    return "".join(f"Passage: {' '.join(passage.split())}\n" for passage in passages) + prompt


def shortened(passages: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[str]:
    """The texts of passages, cut after `max_length` tokens, so that they say what ImpRAG with that `l_max` reads."""
    tokens: PassageTokens = tokenize_passages(tokenizer, passages, max_length, end=False)
    rows = np.split(tokens.tokens, tokens.starts[1:-1])
    return [str(tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in rows]


def pasted_prompts(prompts: Dataset, passages: Sequence[str], ranking: NDArray[np.int32], k: int) -> Dataset:
    """Columns `prompt` and `completion`, as `SFTTrainer` reads them: the k best passages of the ranking, then the prompt.

    Args:
        prompts: as `revela_hub.data.prompts.rows.read_prompts` gives them.
        passages: the collection.
        ranking: (rows, at least k) numbers of passages, best first, -1 for none.
        k: passages for a prompt that retrieves.

    Raises:
        UserError: k is more than there are passages.
    """
    if k > len(passages):
        raise UserError(f"k={k} passages are to be read, but the collection has {len(passages)}: lower --k")

    def pasted(row: dict[str, Any], number: int) -> dict[str, str]:
        read = [passages[at] for at in ranking[number, :k].tolist() if at >= 0] if row["retrieve"] else []
        return {"prompt": paste(row["prompt"], read), "completion": f" {row['answers'][0]}"}

    return prompts.map(pasted, with_indices=True, remove_columns=prompts.column_names, desc="Pasting passages")


def ra_it_trainer(
    model: PreTrainedModel,
    args: SFTConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    passages: Sequence[str],
    ranking: NDArray[np.int32],
    k: int,
    **kwargs: Any,
) -> SFTTrainer:
    """A trainer of RA-IT, whose loss is on the answers alone; the arguments of `pasted_prompts` and of `SFTTrainer`."""
    data = pasted_prompts(prompts, passages, ranking, k)
    return SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer, **kwargs)


@torch.no_grad()
def pasted_log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    answers: Sequence[str],
    batch_size: int = 16,
) -> Tensor:
    """Log p(answer, EOS | prompt) of each pair, summed over the answer's tokens, in nats: (N,) float32."""
    model.eval()
    prompt_ids = tokenizer(list(prompts))["input_ids"]
    answer_ids = tokenizer([f" {answer}" for answer in answers], add_special_tokens=False)["input_ids"]
    parts = []
    for start in range(0, len(prompts), batch_size):
        pairs = list(zip(prompt_ids[start : start + batch_size], answer_ids[start : start + batch_size], strict=True))
        rows = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in pairs]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
        scored = torch.zeros_like(ids, dtype=torch.bool)
        for number, (row, (prompt, _)) in enumerate(zip(rows, pairs, strict=True)):
            scored[number, len(prompt) : len(row)] = True
        keep = scored.any(0).nonzero()[:, 0] - 1  # the positions that predict an answer token of any row
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits.float()
        log_p = logits.log_softmax(-1).gather(-1, ids[:, keep + 1, None])[..., 0]
        parts.append((log_p * scored[:, keep + 1]).sum(-1).cpu())
    return torch.cat(parts)
