r"""Train a retriever on raw text with a frozen language model as teacher: REPLUG LSR (arXiv 2301.12652), a baseline.

The language model computes the likelihood of each chunk given each other chunk of its group, and the retriever's
similarities are trained to match that distribution. It starts from a sentence-transformers model, or from an encoder
or decoder with mean pooling. A group of n chunks costs n (n - 1) forward passes of the language model.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train replug --data path/to/texts --retriever HuggingFaceTB/SmolLM2-135M \
      --lm HuggingFaceTB/SmolLM2-135M --max_steps 200
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.text.groups import GroupSettings, build_groups
from revela_hub.errors import UserError
from revela_hub.options import option, required
from revela_hub.ranges import GroupSize, PositiveFloat, PositiveInt, TextLength
from revela_hub.retrieval.encoder import truncates
from revela_hub.trainers.base.models import ModelLike, default_arguments, name_of
from revela_hub.trainers.base.retriever import (
    WrappedRetriever,
    WrappedRetrieverTrainer,
    adapted,
    inputs_of,
    load_retriever,
    print_retriever,
)
from revela_hub.trainers.base.rows import prepare_datasets, prepared_rows
from revela_hub.trainers.baselines import REPLUG
from revela_hub.trainers.baselines.language_models import check_room, load_lm, log_likelihoods
from revela_hub.trainers.baselines.raw_text import RawTextArguments, RetrieverTrainingArguments, train_on_text


@dataclass
class ReplugTrainingArguments(RetrieverTrainingArguments):
    """`TrainingArguments` of REPLUG; each row of the data set is a group of chunks."""

    per_device_train_batch_size: int = option(1, "Number of groups per device and forward pass.")
    gradient_accumulation_steps: int = option(8, "Number of batches per training step.")
    temperature: PositiveFloat = option(1e-3, "Temperature that divides the similarities.")
    lm_temperature: PositiveFloat = option(1e-3, "Temperature that divides the log-likelihoods.")
    likelihood: Literal["sum", "mean"] = option(
        "mean", "Log-likelihood of a chunk: mean over its tokens, or their sum (the paper)."
    )
    similarity_sides: Literal["query_passage", "symmetric"] = option(
        "symmetric",
        "Compare each chunk as a query with the others as passages, or passages with each other (symmetric).",
    )
    similarity_span: Literal["full", "first_half"] = option(
        "full", "Part of a chunk that is its query, by words; in the symmetric form, its passage."
    )
    lm_batch_size: PositiveInt = option(
        16, "Number of pairs per forward pass of the language model; affects memory only."
    )


@dataclass(kw_only=True)
class Arguments(RawTextArguments, ReplugTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train replug`: the models, the data's, then those of every transformers Trainer."""

    lm: str = required("Frozen language model that teaches the retriever: Hub id or folder of a decoder.")
    output_dir: str = option("outputs/replug", "Output folder.")
    group_size: GroupSize = option(16, "Number of chunks per group.")
    max_words: PositiveInt = option(120, "Maximum number of words per chunk.")
    max_length: TextLength = option(160, "Maximum number of tokens per chunk.")


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    print_retriever(train(arguments), arguments)


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `ReplugTrainer`, such as `callbacks`."""
    cut = GroupSettings(arguments.group_size, max_words=arguments.max_words, language=arguments.language)
    build = partial(build_groups, settings=cut)
    return train_on_text(REPLUG, arguments, build, ReplugTrainer, lm=arguments.lm, **trainer_options)


class GroupCollator:
    """Tokenises rows of `build_groups` for both models. A missing chunk is `""`, and has no tokens of the language model."""

    def __init__(
        self,
        retriever: SentenceTransformer,
        lm_tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        args: ReplugTrainingArguments,
    ) -> None:
        self.retriever, self.lm_tokenizer, self.max_length = retriever, lm_tokenizer, max_length
        self.queries, self.halve = args.similarity_sides == "query_passage", args.similarity_span == "first_half"
        self.begin = [] if lm_tokenizer.bos_token_id is None else [lm_tokenizer.bos_token_id]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the inputs `passage` and, if there are queries, `query`, (N, L) each, and `tokens`.

        The latter are the language model's token ids of each chunk of each group, without special tokens.
        """
        texts = [text for row in rows for text in row["text"]]
        asked = [first_half(text) for text in texts] if self.halve else texts
        room = self.max_length - len(self.begin)
        batch: dict[str, Any] = {
            "passage": inputs_of(self.retriever, texts if self.queries else asked, "document"),
            "tokens": [
                [self.lm_tokenizer(text, add_special_tokens=False)["input_ids"][:room] for text in row["text"]]
                for row in rows
            ],
        }
        return batch | {"query": inputs_of(self.retriever, asked, "query")} if self.queries else batch


def first_half(text: str) -> str:
    """Return the first half of a text's words, rounded up, with the white space in front of each."""
    words = list(re.finditer(r"\S+", text))
    return text[: words[(len(words) - 1) // 2].end()] if words else text


class Replug(WrappedRetriever):
    r"""Computes the loss of groups, with the retriever in training and the language model, which gets frozen.

    For chunk i of a group and every other chunk j, with L_ij the log-likelihood of the tokens of D_i after D_j:

        Q_i = softmax_{j != i}( L_ij / t_lm )        P_i = softmax_{j != i}( sim(e_i, e_j) / t_retriever )
        loss = mean_i KL(Q_i || P_i)

    sim is the retriever's similarity, cosine or dot product. As in the baseline of Revela's paper (appendix B.3), both temperatures
    are 0.001 and the candidates are chunks of a group, so no index is needed. The KL divergence has the same direction as there.
    Unlike there, a chunk is no candidate for itself. With `likelihood="sum"`, L_ij is the sum over tokens, as there; the mean does
    not give long chunks sharper distributions. `begin` are the token ids in front of every text that the language model reads.

    Letters: G groups, B chunks of a group, N = G B, L tokens.
    """

    def __init__(
        self,
        retriever: SentenceTransformer,
        lm: PreTrainedModel,
        args: ReplugTrainingArguments,
        begin: Sequence[int] = (),
    ) -> None:
        super().__init__(retriever)
        self.lm: Any = lm.requires_grad_(False)
        self.begin, self.likelihood, self.lm_batch_size = begin, args.likelihood, args.lm_batch_size
        self.temperature, self.lm_temperature = args.temperature, args.lm_temperature

    def forward(
        self, passage: dict[str, Any], tokens: list[list[list[int]]], query: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Return the scalar `loss` of a batch of `GroupCollator`, and `agreement`: how often both models rank the same chunk first."""
        passage_ND = self.embed(passage)
        query_ND = passage_ND if query is None else self.embed(query)
        present_GB = torch.tensor([[bool(chunk) for chunk in group] for group in tokens], device=passage_ND.device)
        groups, size = present_GB.shape
        with torch.autocast(passage_ND.device.type, enabled=False):
            query_GBD, passage_GBD = (vectors.view(groups, size, -1) for vectors in (query_ND, passage_ND))
            similarity_GBB = query_GBD @ passage_GBD.transpose(1, 2)
            likelihood_GBB = self.likelihoods(tokens).to(similarity_GBB)
            other_GBB = present_GB[:, None] & present_GB[:, :, None] & ~torch.eye(size, device=passage_ND.device).bool()
            read_GB = other_GBB.any(-1)
            masked = torch.finfo(similarity_GBB.dtype).min
            log_p = (similarity_GBB / self.temperature).masked_fill(~other_GBB, masked).log_softmax(-1)
            log_q = (likelihood_GBB / self.lm_temperature).masked_fill(~other_GBB, masked).log_softmax(-1)
            divergence_GBB = torch.where(other_GBB, log_q.exp() * (log_q - log_p), 0.0)
            loss = divergence_GBB.sum() / read_GB.sum().clamp(min=1)
        agree = ((log_p.argmax(-1) == log_q.argmax(-1)) & read_GB).sum() / read_GB.sum().clamp(min=1)
        return {"loss": loss, "agreement": agree.float().detach()}

    def likelihoods(self, tokens: list[list[list[int]]]) -> Tensor:
        """Return the (G, B, B) log-likelihoods of chunk i after chunk j, 0 if i = j or a chunk is missing."""
        places = [
            (g, i, j)
            for g, group in enumerate(tokens)
            for i, j in permutations(range(len(group)), 2)
            if group[i] and group[j]
        ]
        pairs = [([*self.begin, *tokens[g][j]], tokens[g][i]) for g, i, j in places]
        found = log_likelihoods(self.lm, pairs, self.lm_batch_size)
        if self.likelihood == "mean":
            found = found / torch.tensor([len(chunk) for _, chunk in pairs], device=found.device)
        likelihood_GBB = found.new_zeros(len(tokens), len(tokens[0]), len(tokens[0]))
        likelihood_GBB[tuple(torch.tensor(places, dtype=torch.long, device=found.device).view(-1, 3).T)] = found
        return likelihood_GBB


class ReplugTrainer(WrappedRetrieverTrainer):
    """Trainer of `Replug`.

        trainer = ReplugTrainer("HuggingFaceTB/SmolLM2-135M", lm="HuggingFaceTB/SmolLM2-135M", train_dataset=texts)
        trainer.train()
        vectors = trainer.retriever.encode(["a passage"])
        trainer.write_models("outputs")  # for SentenceTransformer(...) of the folder that it returns

    Args:
        model: Hub id or folder of the retriever, or a loaded `SentenceTransformer`, which is trained in place.
        args: training arguments; by default, the output folder is named after the retriever.
        lm: language model, which is frozen: Hub id, folder or loaded model.
        lm_tokenizer: tokenizer of the language model, by default its own.
        peft_config: configuration of LoRA adapters of the retriever, instead of the LoRA settings in `args`.
        max_length: maximum number of tokens of a chunk.
        group_size: chunks per group, for raw text.
        model_init_kwargs: passed to `load_retriever`: `pooling`, `prompts`, and `trust_remote_code`, which also applies to the
            language model.
        **kwargs: passed to `Trainer`: `train_dataset` (raw text in a column text, or rows of `build_groups`), `callbacks`, ...

    Raises:
        UserError: a model cannot be loaded, the data set has the wrong columns, or two chunks do not fit into the language model.
    """

    method = REPLUG
    metric = "agreement"

    args: ReplugTrainingArguments

    def __init__(
        self,
        model: ModelLike,
        args: ReplugTrainingArguments | None = None,
        *,
        lm: ModelLike,
        lm_tokenizer: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        max_length: int = 160,
        group_size: int = 16,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loading = model_init_kwargs or {}
        args = args or default_arguments(ReplugTrainingArguments, model, self.method)
        retriever = load_retriever(model, **loading)
        if isinstance(retriever[0], Router):
            raise UserError(f"{name_of(model)} has a query and a document route, but REPLUG trains a single encoder")
        if truncates(retriever) and not isinstance(model, SentenceTransformer):
            retriever = load_retriever(retriever, max_length=max_length)
        code = bool(loading.get("trust_remote_code"))
        lm, lm_tokenizer = load_lm(lm, tokenizer=lm_tokenizer, trust_remote_code=code)
        check_room(lm, 2 * max_length)
        groups = partial(build_groups, settings=GroupSettings(group_size))
        prepare_datasets(kwargs, lambda rows: prepared_rows(rows, ("group", "document"), args, groups))
        self.adapters = adapted(retriever, peft_config, args)
        collator = GroupCollator(retriever, lm_tokenizer, max_length, args)
        distilled = Replug(retriever, lm, args, collator.begin)
        super().__init__(model=distilled, args=args, data_collator=collator, **kwargs)
