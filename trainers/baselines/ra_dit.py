r"""Tune a retriever with the likelihoods of a reader: RA-DIT (arXiv 2310.01352, equation 6), a baseline.

The frozen reader of `revela-hub train ra-it` computes how likely the answer is after each of the best passages of
--pseudo_labels, and the retriever's scores are trained to match. --retriever is a sentence-transformers model. With
--backbone instead, the retriever is the first layers of a decoder, up to --retrieval_layer (RA-DIT-Llama in the
ImpRAG paper); it needs --retrieval_warmup_epochs.

The loss is KL(P_R || P_LSR) with P_LSR(c) = softmax_c(p_LM(answer | c, prompt) / temperature), computed once; with
--loss imprag KL(P_T || P_R) with the log-likelihoods in P_T, as the ImpRAG paper trains this baseline (its equation 6).
Its order: this command first, with the untuned decoder as --reader, then `train ra-it --pseudo_labels` with the result.

Writes to --output_dir: retriever/ for SentenceTransformer(...), or with --backbone an ImpRAG model for `revela-hub
index`; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --retriever sentence-transformers/all-MiniLM-L6-v2
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --backbone Qwen/Qwen3-0.6B-Base --retrieval_layer 7 --retrieval_warmup_epochs 1
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from peft import PeftConfig
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import forget_origins
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.modeling.backbones import layers_name
from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TwoOrMore
from revela_hub.retrieval.texts import TextSource
from revela_hub.trainers.base.adapters import with_adapters
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.distributed import is_distributed, rank
from revela_hub.trainers.base.models import ModelLike, default_arguments
from revela_hub.trainers.base.retriever import (
    RETRIEVER,
    RetrieverTrainer,
    WrappedRetriever,
    adapted,
    inputs_of,
    load_retriever,
)
from revela_hub.trainers.base.weights import load_whole
from revela_hub.trainers.baselines import RA_DIT
from revela_hub.trainers.baselines.language_models import check_room, load_lm
from revela_hub.trainers.baselines.ra_it import passages_read, paste, pasted_log_likelihoods
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder, load_imprag
from revela_hub.trainers.imprag.data import (
    ImpRAGDataArguments,
    as_prompts,
    as_texts,
    padded,
    passage_hashes,
    tokenize_prompts,
    train_on_prompts,
)
from revela_hub.trainers.imprag.retrieval import kl_divergence, multi_label_nce, prompt_ranking

MASKED_SCORE = -1e30  # of a missing candidate; finite, so that its gradient is not NaN
COSINE_TEMPERATURE = 0.05  # default for cosine similarities; at 1, their softmax is nearly uniform


@dataclass
class RADITTrainingArguments(RunArguments):
    """`TrainingArguments` of RA-DIT's retriever (arXiv 2310.01352, section 2.3)."""

    learning_rate: float = option(1e-5, "Peak learning rate.")
    per_device_train_batch_size: int = option(16, "Number of prompts per device and forward pass.")
    retrieval_warmup_epochs: NonNegativeFloat = option(
        0, "Number of warm-up epochs with the ranking of --pseudo_labels as labels; needed with --backbone."
    )
    num_candidates: TwoOrMore = option(
        10, "Number of top passages of --pseudo_labels whose likelihoods are compared for each prompt."
    )
    num_positives: PositiveInt = option(
        5, "Warm-up: Number of top passages that are positives; the other candidates are negatives."
    )
    temperature: PositiveFloat | None = option(
        None, "Temperature that divides the scores (default: 0.05 for cosine, else 1 or the root of the dimension)."
    )
    loss: Literal["ra-dit", "imprag"] = option(
        "ra-dit", "KL divergence from likelihoods (RA-DIT), or to log-likelihoods (equation 6 of ImpRAG)."
    )
    likelihood_temperature: PositiveFloat | None = option(
        None, "Temperature that divides the likelihoods (default: 0.01, equation 4) or log-likelihoods (1)."
    )
    likelihood_batch_size: PositiveInt = option(
        16, "Number of prompts with a passage per forward pass of the reader; affects memory only."
    )

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a value is out of range, or the warm-up has no negatives."""
        super().__post_init__()
        if self.likelihood_temperature is None:
            self.likelihood_temperature = 0.01 if self.loss == "ra-dit" else 1.0
        if self.retrieval_warmup_epochs and self.num_positives >= self.num_candidates:
            raise ValueError(
                f"num_positives {self.num_positives} leaves no negatives among num_candidates {self.num_candidates}"
            )


@dataclass(kw_only=True)
class Arguments(ImpRAGDataArguments, RADITTrainingArguments):
    """Arguments of `revela-hub train ra-dit`: the models, then the data's, then those of every transformers Trainer."""

    reader: str = required("Frozen decoder that reads the passages: the output of `revela-hub train ra-it`.")
    retriever: str | None = option(None, "Retriever to train: Hub id or folder of a sentence-transformers model.")
    backbone: str | None = option(
        None, "Decoder whose first layers, up to --retrieval_layer, are the retriever, instead of --retriever."
    )
    retrieval_layer: NonNegativeInt | None = option(None, "Index of the last layer of --backbone to use.")
    output_dir: str = option("outputs/ra-dit", "Output folder.")
    max_passage_length: PositiveInt = option(160, "Maximum number of tokens per passage, of the reader and --backbone.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")

    def __post_init__(self) -> None:
        """Raise a `UserError` if options conflict; see also the base classes."""
        super().__post_init__()
        decoder = self.backbone is not None
        if decoder == (self.retriever is not None) or decoder != (self.retrieval_layer is not None):
            raise UserError("give the model to train: either --retriever, or --backbone with --retrieval_layer")


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    folder = train(arguments)
    if arguments.should_save:
        words = ["index", folder / RETRIEVER, "--max_words", arguments.max_words, "--output_dir", "my-index"]
        following = command_line(*words, "--corpus", *arguments.corpus)
        sys.stdout.write(f"\nretriever: {folder / RETRIEVER}\nnext:  {following}\n")


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `RADITTrainer`, such as `callbacks`."""
    return train_on_prompts(
        RA_DIT,
        arguments,
        RADITTrainer,
        arguments.retriever or arguments.backbone or "",
        reader=arguments.reader,
        retrieval_layer=arguments.retrieval_layer,
        max_passage_length=arguments.max_passage_length,
        **trainer_options,
    )


class RADITTrainer(RetrieverTrainer):
    """Trainer of a retriever by equation 6, optionally after a warm-up with another retriever's rankings.

        questions = Dataset.from_dict({"question": ["Who wrote Emma?", ...], "answer": ["Jane Austen", ...]})
        trainer = RADITTrainer("my-retriever", reader="outputs/ra-it/model", train_dataset=questions, passages=passages)
        trainer.train()
        trainer.write_models("outputs")  # for SentenceTransformer("outputs/retriever")

    Args:
        model: Hub id or folder of a retriever, or a loaded `SentenceTransformer`; or, with `retrieval_layer`, the Hub id or
            folder of a decoder. Also a `DecoderRetriever`.
        args: training arguments; by default, the output folder is named after the model.
        train_dataset: questions with answers, in the columns that `revela_hub.data.prompts` describes, or prompts as
            `read_prompts` returns them. Prompts that do not retrieve are dropped; so are, with a log message, those with
            fewer than two candidates.
        passages, pseudo_labels, ranking: as for `ImpRAGTrainer`.
        reader: decoder that `revela-hub train ra-it` trained: Hub id, folder or loaded model. It is not trained.
        reader_tokenizer: tokenizer of the reader, by default its own.
        query_text: column of the queries, also of the retriever that is trained: `prompt`, or `input` without the template.
        log_likelihoods: (rows, C) return value of `reader_likelihoods`, instead of a reader.
        retrieval_layer: last layer of a decoder to use as a retriever (RA-DIT-Llama), counted from 0.
        max_length: tokens of prompt and answer that the reader reads; longer rows are dropped, with a log message.
        max_passage_length: tokens of a passage, of the reader and a decoder.
        peft_config: configuration of LoRA adapters; by default, all weights of the retriever are trained.
        model_init_kwargs: for loading the models: `trust_remote_code`.
        **kwargs: passed to `Trainer`.

    Raises:
        UserError: a model cannot be loaded.
    """

    method = RA_DIT

    args: RADITTrainingArguments

    def __init__(
        self,
        model: "DecoderRetriever | ModelLike",
        args: RADITTrainingArguments | None = None,
        *,
        train_dataset: Dataset | IterableDataset,
        passages: Sequence[str] | Dataset | TextSource,
        reader: ModelLike | None = None,
        reader_tokenizer: PreTrainedTokenizerBase | None = None,
        pseudo_labels: NDArray[np.int32] | str = "bm25",
        query_text: Literal["prompt", "input"] = "prompt",
        ranking: str | None = None,
        log_likelihoods: Tensor | None = None,
        retrieval_layer: int | None = None,
        max_length: int = 128,
        max_passage_length: int = 160,
        peft_config: PeftConfig | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loading = model_init_kwargs or {}
        start = model.model if isinstance(model, DecoderRetriever) else model
        args = args or default_arguments(RADITTrainingArguments, start, self.method)
        retriever: Any = model
        if retrieval_layer is not None:
            retriever = decoder_retriever(str(model), retrieval_layer, None, max_passage_length, **loading)
        elif not isinstance(model, DecoderRetriever):
            retriever = load_retriever(model, **loading)
        prompts, self.passages = as_prompts(train_dataset), as_texts(passages)
        show = {"show_progress_bar": not args.disable_tqdm}
        how = {"query_text": query_text, "file": ranking} | show | loading
        self.candidates = prompt_ranking(pseudo_labels, prompts, self.passages, args.num_candidates, args, **how)
        if log_likelihoods is None:
            lm, tokenizer = load_lm(reader or "", tokenizer=reader_tokenizer, **loading)
            kept = tokenize_prompts(prompts, tokenizer, max_length, args.log)["source_row"]
            prompts, self.candidates = prompts.select(kept), self.candidates[np.array(kept)]
            short = passages_read(self.passages, self.candidates, tokenizer, max_passage_length)
            lm.to(args.device)  # type: ignore[arg-type]  # its decorator hides the signature
            size = args.likelihood_batch_size
            log_likelihoods = reader_likelihoods(lm, tokenizer, prompts, short, self.candidates, size, **show)
        self.log_likelihoods = log_likelihoods
        decoder = isinstance(retriever, DecoderRetriever)
        add: Any = with_adapters if decoder else adapted
        self.adapters = add(retriever.model if decoder else retriever, peft_config, args)
        args.ddp_find_unused_parameters = True  # a model may have parameters that its vectors do not use
        retrieve, found = np.array(prompts["retrieve"]), (self.candidates >= 0).sum(1) > 1
        if few := int((retrieve & ~found).sum()):
            args.log(f"{few} of {retrieve.sum()} prompts have fewer than two candidates to compare: dropped")
        rows = (retrieve & found).nonzero()[0]
        data = Dataset.from_dict({"row": rows, "query": prompts.select(rows)[query_text]})
        scores = CandidateScores(retriever, args.temperature)
        super().__init__(model=scores, args=args, train_dataset=data, data_collator=self._collate, **kwargs)

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return `row` (B,), and the inputs `query` (B, L) and `passage` (B * C, P)."""
        numbers = np.array([row["row"] for row in rows])
        candidates = self.candidates[numbers].ravel()
        found = iter(self.passages.read(candidates[candidates >= 0].tolist()))
        texts = [next(found) if number >= 0 else "" for number in candidates]
        return {
            "row": torch.from_numpy(numbers),
            "query": inputs_of(self.retriever, [row["query"] for row in rows], "query"),
            "passage": inputs_of(self.retriever, texts, "document"),
        }

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute equation 6 or, during warm-up, multi-label NCE over the candidates of each prompt."""
        rows = inputs.pop("row").cpu().numpy()
        scores_BC = model(**inputs)
        present_BC = torch.from_numpy(self.candidates[rows] >= 0).to(scores_BC.device)
        if (self.state.epoch or 0.0) < self.args.retrieval_warmup_epochs:
            positive_BC = torch.arange(scores_BC.shape[1], device=scores_BC.device) < self.args.num_positives
            # A copy of a positive is no negative.
            same_BC = torch.from_numpy(passage_hashes(self.passages, self.candidates[rows])).to(scores_BC.device)
            known_BC = (same_BC[:, :, None] == same_BC[:, None, : self.args.num_positives]).any(-1)
            loss = multi_label_nce(scores_BC, positive_BC & present_BC, ~known_BC & present_BC).mean()
        else:
            scores_BC = scores_BC.masked_fill(~present_BC, MASKED_SCORE)
            target_BC = self.log_likelihoods[rows].to(scores_BC.device)
            # RA-DIT's exponents are the likelihoods themselves (its equation 4), ImpRAG's their logarithms.
            target_BC = target_BC.exp() if self.args.loss == "ra-dit" else target_BC
            temperature: Any = self.args.likelihood_temperature
            target_BC = (target_BC / temperature).masked_fill(~present_BC, MASKED_SCORE)
            pair = scores_BC, target_BC
            loss = kl_divergence(*(pair if self.args.loss == "ra-dit" else pair[::-1])).mean()
        return (loss, {"scores": scores_BC}) if return_outputs else loss

    def saved_retriever(self, folder: Path) -> nn.Module:
        """Load what `write_retriever` wrote."""
        if isinstance(self.retriever, SentenceTransformer):
            return super().saved_retriever(folder)
        return DecoderRetriever(load_whole(ImpRAGForCausalLM, folder, dtype=torch.float32), self.retriever.tokenizer)


class CandidateScores(WrappedRetriever):
    """Computes the scores of candidates for queries."""

    def __init__(self, retriever: nn.Module, temperature: float | None = None) -> None:
        super().__init__(retriever)
        self.temperature = temperature

    def forward(self, query: dict[str, Any], passage: dict[str, Any]) -> Tensor:
        """Return (B, C) scores, divided by the temperature, of B queries and C candidates for each."""
        query_BE, passage_NE = self.embed(query), self.embed(passage)
        dot = sqrt(query_BE.shape[1]) if isinstance(self.retriever, DecoderRetriever) else 1.0
        default = COSINE_TEMPERATURE if self.cosine else dot
        with torch.autocast(query_BE.device.type, enabled=False):
            scores = torch.einsum("be,bce->bc", query_BE, passage_NE.view(len(query_BE), -1, query_BE.shape[1]))
            return scores / (self.temperature or default)


class DecoderRetriever(ImpRAGEncoder, nn.Module):
    """The first layers of a decoder as a retriever (RA-DIT-Llama), with the methods of a sentence-transformers model.

    It is an ImpRAG model of which only the vectors are used: the queries and keys of its last layer.
    """

    prompts: Mapping[str, str] = {}

    def __init__(self, model: ImpRAGForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        nn.Module.__init__(self)
        ImpRAGEncoder.__init__(self, model, tokenizer)

    def preprocess(self, texts: list[str], prompt: str | None = None, task: str = "query") -> dict[str, Any]:
        """Return the inputs of `forward`."""
        ids, mask = padded(self.tokenize(texts, task))
        return {"input_ids": ids, "attention_mask": mask, "task": task}

    def forward(self, features: dict[str, Any]) -> dict[str, Tensor]:
        """Return the (N, E) vectors `sentence_embedding`."""
        embed = self.model.embed_queries if features["task"] == "query" else self.model.embed_passages
        return {"sentence_embedding": embed(features["input_ids"], features["attention_mask"])}

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute activations in the backward pass (`--gradient_checkpointing`)."""
        self.model.gradient_checkpointing_enable(*args, **kwargs)

    def save_pretrained(self, folder: str, create_model_card: bool = False) -> None:
        """Save an ImpRAG model for `revela-hub index` and `search`."""
        save_backbone(self.model, Path(folder))
        forget_origins(Path(folder), "backbone")
        save_tokenizer(self.tokenizer, Path(folder))


def decoder_retriever(
    backbone: str,
    retrieval_layer: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_passage_length: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> DecoderRetriever:
    """Load the layers of a decoder up to one as a retriever. `max_passage_length` is stored in its configuration."""
    loaded = load_imprag(
        backbone,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        retrieval_layer=retrieval_layer,
        last_reading_layer=retrieval_layer,
        num_passages=1,
        max_passage_length=max_passage_length,
    )
    check_room(loaded.model.backbone, loaded.model.config.l_max)
    decoder = loaded.model.get_decoder()
    config: Any = decoder.config.get_text_config()
    layers: Any = decoder.get_submodule(layers_name(decoder))
    del layers[retrieval_layer + 1 :]
    config.num_hidden_layers = retrieval_layer + 1
    if getattr(config, "layer_types", None):  # one entry per layer
        config.layer_types = config.layer_types[: retrieval_layer + 1]
    return DecoderRetriever(loaded.model, loaded.tokenizer)


def reader_likelihoods(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    passages: Mapping[int, str] | Sequence[str],
    candidates_NC: NDArray[np.int32],
    batch_size: int = 16,
    *,
    show_progress_bar: bool = False,
) -> Tensor:
    """Return (N, C) log p(answer | candidate, prompt) of the reader, with each candidate in front of the prompt.

    Missing candidates (-1) and prompts that do not retrieve get minus infinity. Each process computes some of the values.
    """
    present_NC = (candidates_NC >= 0) & np.array(prompts["retrieve"])[:, None]
    places = np.argwhere(present_NC)[rank() :: dist.get_world_size() if is_distributed() else 1]
    likelihoods_NC = torch.full(candidates_NC.shape, -torch.inf, device=reader.device)
    if len(places):
        rows, numbers = prompts.select(places[:, 0]), candidates_NC[tuple(places.T)].tolist()
        texts = [paste(prompt, [passages[number]]) for prompt, number in zip(rows["prompt"], numbers, strict=True)]
        answers = [answers[0] for answers in rows["answers"]]
        likelihoods_NC[tuple(places.T)] = pasted_log_likelihoods(
            reader, tokenizer, texts, answers, batch_size, show_progress_bar=show_progress_bar
        )
    if is_distributed():
        dist.all_reduce(likelihoods_NC, dist.ReduceOp.MAX)
    return likelihoods_NC.cpu()
