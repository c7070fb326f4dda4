r"""Train a retriever on raw text with a frozen language model as teacher: REPLUG LSR (arXiv 2301.12652), a baseline.

The language model computes the likelihood of each chunk given each other chunk of its group, and the retriever's
similarities are trained to match that distribution. It starts from a sentence-transformers model, or from an encoder
or decoder with mean pooling. A group of n chunks costs n (n - 1) forward passes of the language model.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train replug --data path/to/texts --retriever HuggingFaceTB/SmolLM2-135M \
      --lm HuggingFaceTB/SmolLM2-135M --max_steps 200
  accelerate launch -m revela_hub train replug --config examples/revela/baselines/replug-wikipedia.yaml
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft import PeftConfig
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everywhere)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.text.groups import GroupSettings, build_groups
from revela_hub.errors import UserError
from revela_hub.options import option, required
from revela_hub.ranges import GroupSize, NonNegativeInt, PositiveFloat, PositiveInt, TextLength
from revela_hub.retrieval.encoder import text_positions, truncates
from revela_hub.trainers.base.adapters import freeze_pooler
from revela_hub.trainers.base.arguments import (
    WARMUP,
    AdapterArguments,
    ProbeArguments,
    RunArguments,
    StreamedTextArguments,
    text_rows,
)
from revela_hub.trainers.base.models import ModelLike, default_arguments, name_of
from revela_hub.trainers.base.query_route import refuse_routes
from revela_hub.trainers.base.retriever import (
    RetrieverArguments,
    WrappedRetriever,
    WrappedRetrieverTrainer,
    inputs_of,
    load_retriever,
    print_retriever,
    with_adapters,
)
from revela_hub.trainers.base.rows import prepare_datasets, prepared_rows
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_text
from revela_hub.trainers.baselines import REPLUG
from revela_hub.trainers.baselines.language_models import load_lm
from revela_hub.trainers.imprag.data import token_rows


@dataclass
class ReplugTrainingArguments(AdapterArguments, RunArguments):
    """`TrainingArguments` of REPLUG; each row of the data set is a group of chunks."""

    learning_rate: float = option(2e-5, "Peak learning rate (as in the paper).")
    per_device_train_batch_size: int = option(1, "Number of groups per device and forward pass.")
    gradient_accumulation_steps: int = option(8, "Number of batches per training step.")
    warmup_steps: float = option(0.1, WARMUP)
    temperature: PositiveFloat = option(1e-3, "Temperature that divides the similarities.")
    lm_temperature: PositiveFloat = option(1e-3, "Temperature that divides the log-likelihoods.")
    likelihood: Literal["sum", "mean"] = option(
        "mean", "Log-likelihood of a chunk: mean over its tokens, or their sum (the paper)."
    )
    lora_rank: NonNegativeInt = option(0, "Rank of the LoRA adapters; 0 trains all weights.")
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
class Arguments(ProbeArguments, RetrieverArguments, StreamedTextArguments, ReplugTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train replug`: the models, the data's, then those of every transformers Trainer."""

    retriever: str = required("Model to train: Hub id or folder.")
    lm: str = required("Frozen language model that teaches the retriever: Hub id or folder of a decoder.")
    output_dir: str = option("outputs/replug", "Output folder.")
    kind: Literal["auto", "text", "code"] = option(
        "auto", "How to split chunks: at sentences (text), at lines (code), or by file extension (auto)."
    )
    group_size: GroupSize = option(16, "Number of chunks per group.")
    max_words: PositiveInt = option(120, "Maximum number of words per chunk.")
    max_length: TextLength = option(160, "Maximum number of tokens per chunk.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    print_retriever(train(arguments), arguments)


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `ReplugTrainer`, such as `callbacks`."""
    with open_run(REPLUG, arguments) as run:
        if run.finished:
            return run.output
        held_out = hold_out_text(arguments)
        cut = GroupSettings(arguments.group_size, max_words=arguments.max_words, language=arguments.language)
        groups, report = run.read(
            "reading and grouping the text", lambda: text_rows(arguments, build_groups, held_out.folder, settings=cut)
        )
        trainer = ReplugTrainer(
            arguments.retriever,
            arguments,
            lm=arguments.lm,
            max_length=arguments.max_length,
            model_init_kwargs={"trust_remote_code": arguments.trust_remote_code},
            retriever_init_kwargs=arguments.loading(),
            train_dataset=groups,
            retrieval_task=held_out.task,
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
        return run.output


def load_chunk_encoder(model: ModelLike, max_length: int | None, **loading: Any) -> SentenceTransformer:
    """Load a retriever that truncates chunks to `max_length` tokens, unless it reads texts of any length (static embeddings)."""
    retriever = load_retriever(model, **loading)
    refuse_routes(retriever, name_of(model), "REPLUG")
    return load_retriever(retriever, max_length=max_length) if truncates(retriever) else retriever


class GroupCollator:
    """Tokenises rows of `build_groups` for both models; missing chunks (`""`) are masked.

    Of the language model's special tokens, only BOS is added.
    """

    def __init__(
        self,
        retriever: SentenceTransformer,
        lm_tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        queries: bool = False,
        halve: bool = False,
    ) -> None:
        self.retriever, self.lm_tokenizer, self.max_length = retriever, lm_tokenizer, max_length
        self.queries, self.halve = queries, halve
        self.begin = [] if lm_tokenizer.bos_token_id is None else [lm_tokenizer.bos_token_id]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return `retriever_*` and, with queries, `query_*` (N, L), `lm_input_ids` and `lm_attention_mask` (N, L), `present` (G, B)."""
        texts = [text for row in rows for text in row["text"]]
        asked = [first_half(text) for text in texts] if self.halve else texts
        passages = texts if self.queries else asked
        batch = {f"retriever_{k}": value for k, value in inputs_of(self.retriever, passages, "document").items()}
        if self.queries:
            batch |= {f"query_{name}": value for name, value in inputs_of(self.retriever, asked, "query").items()}
        room = self.max_length - len(self.begin)
        ids = [self.lm_tokenizer(text, add_special_tokens=False)["input_ids"][:room] for text in texts]
        tokens_NL, mask_NL = token_rows(ids).batch(np.arange(len(ids)))
        present = torch.tensor([bool(text.strip()) for text in texts]) & (mask_NL.sum(1) > 0)
        return batch | {
            "lm_input_ids": tokens_NL,
            "lm_attention_mask": mask_NL,
            "present": present.view(len(rows), -1),
        }


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

    Letters: G groups, B chunks of a group, N = G B, P pairs, L tokens.
    """

    def __init__(
        self,
        retriever: SentenceTransformer,
        lm: PreTrainedModel,
        *,
        temperature: float = 1e-3,
        lm_temperature: float = 1e-3,
        lm_batch_size: int = 16,
        begin: list[int] | None = None,
        likelihood: Literal["sum", "mean"] = "mean",
    ) -> None:
        super().__init__(retriever)
        self.lm: Any = lm.requires_grad_(False).eval()
        self.temperature, self.lm_temperature, self.lm_batch_size = temperature, lm_temperature, lm_batch_size
        self.begin, self.likelihood = begin or [], likelihood

    def train(self, mode: bool = True) -> "Replug":
        """Set the retriever's mode; the language model's dropout stays off."""
        super().train(mode)
        self.lm.eval()
        return self

    def forward(
        self, lm_input_ids: Tensor, lm_attention_mask: Tensor, present: Tensor, **inputs: Any
    ) -> dict[str, Tensor]:
        """Return the scalar `loss` of a batch of `GroupCollator`, and `agreement`: how often both models rank the same chunk first."""
        passage_ND = self._embed(inputs, "retriever_")
        query_ND = self._embed(inputs, "query_") if "query_input_ids" in inputs else passage_ND
        groups, size = present.shape
        with torch.autocast(passage_ND.device.type, enabled=False):
            query_GBD, passage_GBD = (vectors.view(groups, size, -1) for vectors in (query_ND, passage_ND))
            similarity_GBB = query_GBD @ passage_GBD.transpose(1, 2)
            likelihood_GBB = self.likelihoods(lm_input_ids, lm_attention_mask, present).to(similarity_GBB.dtype)
            other_GBB = (
                ~torch.eye(size, dtype=torch.bool, device=present.device) & present[:, None] & present[:, :, None]
            )
            read_GB = other_GBB.any(-1)
            masked = torch.finfo(similarity_GBB.dtype).min
            log_p = (similarity_GBB / self.temperature).masked_fill(~other_GBB, masked).log_softmax(-1)
            log_q = (likelihood_GBB / self.lm_temperature).masked_fill(~other_GBB, masked).log_softmax(-1)
            divergence_GBB = torch.where(other_GBB, log_q.exp() * (log_q - log_p), 0.0)
            loss = divergence_GBB.sum() / read_GB.sum().clamp(min=1)
        agree = ((log_p.argmax(-1) == log_q.argmax(-1)) & read_GB).sum() / read_GB.sum().clamp(min=1)
        return {"loss": loss, "agreement": agree.float().detach()}

    def _embed(self, inputs: dict[str, Any], prefix: str) -> Tensor:
        """Return the (N, D) vectors of one side, in float32 or wider."""
        features = {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}
        vector_ND: Tensor = self.retriever(features)["sentence_embedding"]
        vector_ND = vector_ND.to(torch.promote_types(vector_ND.dtype, torch.float32))
        return F.normalize(vector_ND, dim=-1) if self.cosine else vector_ND

    @torch.no_grad()
    def likelihoods(self, tokens_NL: Tensor, mask_NL: Tensor, present_GB: Tensor) -> Tensor:
        """Return the log-likelihood of chunk i after chunk j, mean or sum over tokens (G, B, B), 0 if i = j or a chunk is missing."""
        groups, size = present_GB.shape
        likelihood = torch.zeros(groups, size, size, device=tokens_NL.device)
        pairs = [
            (g, i, j)
            for g, row in enumerate(present_GB.tolist())
            for i in range(size)
            for j in range(size)
            if i != j and row[i] and row[j]
        ]
        lengths = mask_NL.sum(1).clamp(min=1).tolist()
        # Sort by length to reduce padding.
        pairs.sort(key=lambda pair: lengths[pair[0] * size + pair[1]] + lengths[pair[0] * size + pair[2]])
        blocks = [pairs[start : start + self.lm_batch_size] for start in range(0, len(pairs), self.lm_batch_size)]
        for block in blocks:
            values_P = self._read([(g * size + j, g * size + i) for g, i, j in block], tokens_NL, lengths)
            index = torch.tensor(block, device=tokens_NL.device).unbind(1)
            likelihood[index] = values_P
        return likelihood

    def _read(self, pairs: list[tuple[int, int]], tokens_NL: Tensor, lengths: list[int]) -> Tensor:
        """Return the log-likelihood (P,) of the second text of each pair after the first."""
        begin = torch.tensor(self.begin, dtype=torch.long, device=tokens_NL.device)
        rows = [torch.cat([begin, tokens_NL[a, : lengths[a]], tokens_NL[b, : lengths[b]]]) for a, b in pairs]
        ids_PL = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        place_L = torch.arange(ids_PL.shape[1], device=ids_PL.device)
        total_P1 = torch.tensor([[len(row)] for row in rows], device=ids_PL.device)
        read_P1 = total_P1 - torch.tensor([[lengths[b]] for _, b in pairs], device=ids_PL.device)
        mask_PL = (place_L < total_P1).long()
        logits = self.lm(input_ids=ids_PL, attention_mask=mask_PL, use_cache=False).logits[:, :-1]
        token = -F.cross_entropy(logits.float().transpose(1, 2), ids_PL[:, 1:], reduction="none")
        of_second = (place_L[1:] >= read_P1) & (place_L[1:] < total_P1)
        total_P = (token * of_second).sum(1)
        return total_P if self.likelihood == "sum" else total_P / of_second.sum(1)


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
        model_init_kwargs: for loading both models: `trust_remote_code`.
        retriever_init_kwargs: for loading the retriever alone: `pooling`, `prompts`.
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
        retriever_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loading = model_init_kwargs or {}
        args = args or default_arguments(ReplugTrainingArguments, model, self.method)
        own_length = None if isinstance(model, SentenceTransformer) else max_length
        retriever = load_chunk_encoder(model, own_length, **loading, **(retriever_init_kwargs or {}))
        loaded = load_lm(lm, tokenizer=lm_tokenizer, **loading)
        lm, lm_tokenizer = loaded.model, loaded.tokenizer
        if getattr(lm.config.get_text_config(), "is_causal", None) is False:
            raise UserError(
                "the language model attends to later tokens (is_causal in its configuration is false), as after NVEmbedTrainer:"
                " load it again, or use another decoder"
            )
        groups = partial(build_groups, settings=GroupSettings(group_size))
        prepare_datasets(kwargs, lambda rows: prepared_rows(rows, ("group", "document"), args, groups))
        positions = text_positions(lm.config)
        if positions is not None and 2 * max_length > positions:
            raise UserError(
                f"the language model has {positions} positions, fewer than two chunks of --max_length {max_length}: lower it"
            )
        self.adapters = with_adapters(retriever, peft_config, args.seed, args)
        freeze_pooler(retriever)
        halve, queries = args.similarity_span == "first_half", args.similarity_sides == "query_passage"
        collator = GroupCollator(retriever, lm_tokenizer, max_length, queries=queries, halve=halve)
        distilled = Replug(
            retriever,
            lm,
            temperature=args.temperature,
            lm_temperature=args.lm_temperature,
            lm_batch_size=args.lm_batch_size,
            begin=collator.begin,
            likelihood=args.likelihood,
        )
        super().__init__(model=distilled, args=args, data_collator=collator, **kwargs)
