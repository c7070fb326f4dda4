"""RA-IT: a decoder tuned on prompts into which the retrieved passages are pasted, by trl's `SFTTrainer`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTTrainer

from revela_hub.errors import UserError
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.trainers.baselines import RA_IT
from revela_hub.trainers.baselines.arguments import RAITTrainingArguments
from revela_hub.trainers.common.adapters import add_adapters, merged_copy
from revela_hub.trainers.common.passages import PassageTokens, tokenize_passages
from revela_hub.trainers.common.prompts import tokenize_prompts
from revela_hub.trainers.common.trainer import MethodTrainer

MODEL = "model"  # folder of the reader


def paste(prompt: str, passages: Sequence[str]) -> str:
    r"""The prompt after its passages.

    >>> paste("Question: Who?\nAnswer:", ["Jane did.", "Ann did not."])
    'Passage: Jane did.\nPassage: Ann did not.\nQuestion: Who?\nAnswer:'
    """
    return "".join(f"Passage: {' '.join(passage.split())}\n" for passage in passages) + prompt


def shortened(
    passages: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """The texts of passages, cut after `max_length` tokens, so that they say what ImpRAG with that `l_max` reads."""
    tokens: PassageTokens = tokenize_passages(tokenizer, passages, max_length, end=False)
    if tokens.cut:
        say(tokens.what_is_cut)
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
        raise UserError(f"k={k} passages are to be read, but the collection has {len(passages)}: lower --num_passages")

    def pasted(row: dict[str, Any], number: int) -> dict[str, str]:
        read = [passages[at] for at in ranking[number, :k].tolist() if at >= 0] if row["retrieve"] else []
        return {"prompt": paste(row["prompt"], read), "completion": f" {row['answers'][0]}"}

    return prompts.map(pasted, with_indices=True, remove_columns=prompts.column_names, desc="Pasting passages")


class RAITTrainer(MethodTrainer, SFTTrainer):
    """trl's `SFTTrainer` on prompts into which their passages are pasted; the loss is on the answers alone.

    Args:
        model: a decoder; it gets adapters in place, unless all weights are trained.
        args: the run.
        tokenizer: of the decoder, with an EOS token.
        prompts: as `revela_hub.data.prompts.rows.read_prompts` gives them.
        passages: the collection.
        ranking: (rows, at least k) numbers of passages, best first, -1 for none.
        k: passages for a prompt that retrieves.
        l_max: tokens of a passage, at most.
        max_length: tokens of prompt and answer without passages; longer rows are left out, with a line that says so.
        **kwargs: of `SFTTrainer`: `callbacks`, ...

    Raises:
        UserError: k is more than there are passages, an answer has no token, no row is short enough, or one is too long
            for the decoder with its passages.
    """

    method = RA_IT
    smooths_labels = True

    args: RAITTrainingArguments
    _tag_names = ["ra-it"]  # noqa: RUF012 (as in trl)

    def __init__(
        self,
        model: PreTrainedModel,
        args: RAITTrainingArguments,
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Dataset,
        passages: Sequence[str],
        ranking: NDArray[np.int32],
        k: int,
        l_max: int = 160,
        max_length: int = 256,
        **kwargs: Any,
    ) -> None:
        kept = tokenize_prompts(prompts, tokenizer, max_length, args.say)["source_row"]
        short = shortened(passages, tokenizer, l_max, args.say)
        data = tokenized_pairs(pasted_prompts(prompts.select(kept), short, ranking[np.array(kept)], k), tokenizer)
        _check_room(model, max(map(len, data["input_ids"])))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked wherever it pads
        set_seed(args.seed)  # as trl does, but before the adapters are drawn
        adapters = args.lora_config(model)
        super().__init__(
            model=model if adapters is None else add_adapters(model, adapters),
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            **kwargs,
        )

    def model_names(self) -> str:
        """The decoder's."""
        return f"RA-IT on {self.trained_config()._name_or_path or 'a decoder'}"

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None beside the checkpoints: trl's would name folders of this machine."""

    def write_models(self, output: Path) -> list[Path]:
        """Writes `model/`, the reader."""
        return [self.export(output / MODEL)] if self.args.should_save else []

    def export(self, folder: Path) -> Path:
        """Writes the reader, adapters merged: a plain decoder with its tokenizer."""
        model: Any = self.accelerator.unwrap_model(self.model)
        tokenizer: Any = self.processing_class
        save_backbone(merged_copy(model.get_base_model(), model) if isinstance(model, PeftModel) else model, folder)
        save_tokenizer(tokenizer, folder)
        return folder


def _check_room(model: PreTrainedModel, longest: int) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise UserError(
            f"with its passages a prompt has up to {longest} tokens, answer included, and the decoder has {positions}"
            " positions: lower --max_passage_length or --max_length, or read fewer passages"
        )


def tokenized_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Columns `input_ids` and `labels` of prompts and completions, which EOS ends; labels are -100 on the prompts.

    An empty prompt (plain text) is the tokenizer's own beginning, or EOS: something has to be read first.
    """

    def tokenized(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        end = tokenizer.eos_token_id
        prompts = [ids or [end] for ids in tokenizer(rows["prompt"])["input_ids"]]
        answers = [[*ids, end] for ids in tokenizer(rows["completion"], add_special_tokens=False)["input_ids"]]
        both = list(zip(prompts, answers, strict=True))
        return {"input_ids": [p + a for p, a in both], "labels": [[-100] * len(p) + a for p, a in both]}

    return pairs.map(tokenized, batched=True, remove_columns=pairs.column_names, desc="Tokenizing prompts")


@torch.no_grad()
def pasted_log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    answers: Sequence[str],
    batch_size: int = 16,
    *,
    show_progress_bar: bool = False,
) -> Tensor:
    """Log p(answer, EOS | prompt) of each pair, summed over the answer's tokens, in nats: (N,) float32.

    Raises:
        UserError: a pair is too long for the decoder.
    """
    model.eval()
    prompt_ids = tokenizer(list(prompts))["input_ids"]
    answer_ids = tokenizer([f" {answer}" for answer in answers], add_special_tokens=False)["input_ids"]
    _check_room(model, max((len(p) + len(a) + 1 for p, a in zip(prompt_ids, answer_ids, strict=True)), default=0))
    parts = []
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, desc="Reading answers", unit=" batches", disable=not show_progress_bar):
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
