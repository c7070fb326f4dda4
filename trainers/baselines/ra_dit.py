r"""Tune a retriever with the likelihoods of a reader: RA-DIT (arXiv 2310.01352, equation 6), a baseline.

The frozen reader of `revela-hub train ra-it` computes how likely the answer is after each of the best passages of
--pseudo_labels, and the retriever's scores are trained to match. --retriever is a sentence-transformers model. With
--backbone instead, the retriever is the first layers of a decoder, up to --retrieval_layer (RA-DIT-Llama in the
ImpRAG paper); it needs --retrieval_warmup_epochs.

The loss is KL(P_R || P_LSR) with P_LSR(c) = softmax_c(p_LM(answer | c, prompt) / temperature), computed once.

Writes to --output_dir: retriever/ for SentenceTransformer(...), or with --backbone an ImpRAG model for `revela-hub
index`; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --retriever sentence-transformers/all-MiniLM-L6-v2
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model \
      --backbone Qwen/Qwen3-0.6B-Base --retrieval_layer 7 --retrieval_warmup_epochs 1
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from peft import PeftConfig
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import forget_origins
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.hub_cards.tokenizers import uses_chat_template
from revela_hub.loading import refuse_pickles
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.modeling.backbones import evaluating, load_backbone
from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TwoOrMore
from revela_hub.retrieval.encoder import text_positions
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.in_batch import first_of_same
from revela_hub.trainers.base.models import ModelLike, default_arguments, name_of, unwrapped
from revela_hub.trainers.base.query_route import refuse_routes
from revela_hub.trainers.base.retriever import (
    RETRIEVER,
    RetrieverTrainer,
    WrappedRetriever,
    load_retriever,
    refuse_excluded_prompts,
    with_adapters,
)
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.weights import load_whole
from revela_hub.trainers.baselines import RA_DIT
from revela_hub.trainers.baselines.language_models import load_reader, load_tokenizer
from revela_hub.trainers.baselines.ra_it import paste, pasted_log_likelihoods, shortened
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder
from revela_hub.trainers.imprag.data import (
    ImpRAGDataArguments,
    PassageTokens,
    as_prompts,
    as_texts,
    load_data,
    refuse_eval_dataset,
    tokenize_passages,
    tokenize_prompts,
)
from revela_hub.trainers.imprag.retrieval import kl_from_retrieval, multi_label_nce, rank_passages, top_rows

MASKED_SCORE = -1e30
"""Score of a missing candidate; finite, so that its gradient is not NaN."""
COSINE_TEMPERATURE = 0.05
"""Default for cosine similarities; at 1, their softmax is nearly uniform."""


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
    likelihood_temperature: PositiveFloat = option(0.01, "Temperature that divides the likelihoods (equation 4).")
    likelihood_batch_size: PositiveInt = option(
        16, "Number of prompts with a passage per forward pass of the reader; affects memory only."
    )

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a value is out of range, or the warm-up has no negatives."""
        super().__post_init__()
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
    max_passage_length: PositiveInt = option(160, "Maximum number of tokens per passage.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")

    def __post_init__(self) -> None:
        """Raise a `UserError` if options conflict; see also the base classes."""
        super().__post_init__()
        if self.push_to_hub:
            raise UserError("this baseline has no --push_to_hub: publish its retriever folder with revela-hub publish")
        if (self.retriever is None) == (self.backbone is None) or (self.backbone is None) != (
            self.retrieval_layer is None
        ):
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
    with open_run(RA_DIT, arguments) as run:
        if run.finished:
            return run.output
        data, report = run.read("reading prompts and passages", lambda: load_data(arguments, arguments.seed))
        trainer = RADITTrainer(
            arguments.retriever or arguments.backbone or "",
            arguments,
            train_dataset=data.prompts,
            passages=data.passages,
            reader=arguments.reader,
            pseudo_labels=arguments.pseudo_labels,
            retrieval_layer=arguments.retrieval_layer,
            max_length=arguments.max_length,
            max_passage_length=arguments.max_passage_length,
            model_init_kwargs={"trust_remote_code": arguments.trust_remote_code},
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=[*arguments.data, *arguments.corpus])
        return run.output


class RADITTrainer(RetrieverTrainer):
    """Trainer of a retriever by equation 6, optionally after a warm-up with another retriever's rankings.

        questions = Dataset.from_dict({"question": ["Who wrote Emma?", ...], "answer": ["Jane Austen", ...]})
        trainer = RADITTrainer("my-retriever", reader="outputs/ra-it/model", train_dataset=questions, passages=passages)
        trainer.train()
        trainer.write_models("outputs")  # for SentenceTransformer("outputs/retriever")

    Args:
        model: Hub id or folder of a retriever, or a loaded `SentenceTransformer`; or, with `retrieval_layer`, the Hub id or
            folder of a decoder. Also a `Retriever`.
        args: training arguments; by default, the output folder is named after the model.
        train_dataset: questions with answers, in the columns that `revela_hub.data.prompts` describes, or prompts as
            `read_prompts` returns them. Prompts that do not retrieve are dropped; so are, with a log message, those with
            fewer than two candidates.
        passages: the collection: texts, or a data set with a column text.
        reader: decoder that `revela-hub train ra-it` trained: Hub id, folder or loaded model. It is not trained.
        reader_tokenizer: tokenizer of the reader, by default its own.
        pseudo_labels: retriever that finds the candidates (bm25, Hub id or folder), or its rankings: (rows, C) indices of
            passages, best first, -1 for none.
        log_likelihoods: (rows, C) return value of `reader_likelihoods`, instead of a reader.
        retrieval_layer: last layer of a decoder to use as a retriever (RA-DIT-Llama), counted from 0.
        max_length: tokens of a prompt; with a reader, of prompt and answer.
        max_passage_length: tokens of a passage.
        peft_config: configuration of LoRA adapters; by default, all weights of the retriever are trained.
        model_init_kwargs: for loading the models: `trust_remote_code`.
        **kwargs: passed to `Trainer`.

    Raises:
        UserError: a model cannot be loaded, no prompt retrieves, or none has two candidates.
    """

    method = RA_DIT

    args: RADITTrainingArguments

    def __init__(
        self,
        model: "Retriever | ModelLike",
        args: RADITTrainingArguments | None = None,
        *,
        train_dataset: Dataset | IterableDataset,
        passages: Sequence[str] | Dataset,
        reader: ModelLike | None = None,
        reader_tokenizer: PreTrainedTokenizerBase | None = None,
        pseudo_labels: NDArray[np.int32] | str = "bm25",
        log_likelihoods: Tensor | None = None,
        retrieval_layer: int | None = None,
        max_length: int = 128,
        max_passage_length: int = 160,
        peft_config: PeftConfig | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_eval_dataset(kwargs, "RADITTrainer")
        loading = model_init_kwargs or {}
        inner: Any = model.retriever if isinstance(model, Retriever) else model
        args = args or default_arguments(RADITTrainingArguments, inner, self.method)
        if not isinstance(model, Retriever):
            model = open_retriever(model, retrieval_layer, max_passage_length, **loading)
        prompts, texts = as_prompts(train_dataset), as_texts(passages)
        if isinstance(pseudo_labels, str) and args.num_candidates > len(texts):
            raise UserError(f"--num_candidates {args.num_candidates} is more than the {len(texts)} passages: lower it")
        show = not args.disable_tqdm
        self.candidates = rank_passages(
            pseudo_labels, prompts["input"], texts, args.num_candidates, show_progress_bar=show, **loading
        )
        if log_likelihoods is None:
            if reader is None:
                raise UserError("RA-DIT needs a language model that answers the prompts: pass it as reader")
            loaded = load_reader(reader, tokenizer=reader_tokenizer, **loading)
            kept = tokenize_prompts(prompts, loaded.tokenizer, max_length, args.log)["source_row"]
            prompts, self.candidates = prompts.select(kept), self.candidates[np.array(kept)]
            short = shortened(texts, loaded.tokenizer, max_passage_length, args.log)
            read = loaded.model.to(args.device), loaded.tokenizer  # type: ignore[arg-type]  # its decorator hides the signature
            size = args.likelihood_batch_size
            log_likelihoods = reader_likelihoods(*read, prompts, short, self.candidates, size, show_progress_bar=show)
            loaded.model.to("cpu")  # type: ignore[arg-type]
        self.log_likelihoods = log_likelihoods
        self.queries = model.tokens(prompts["prompt"], max_length, query=True)
        self.same_M = first_of_same(texts)  # a copy of a positive is no negative
        self.passages = model.tokens(texts, max_passage_length, query=False)
        self.adapters = with_adapters(model.retriever, peft_config, args.seed)
        args.ddp_find_unused_parameters = True  # a model may have parameters that its vectors do not use
        rows = _usable_rows(prompts, self.candidates, args)
        for name, tokens in (("prompts", self.queries), ("passages", self.passages)):
            if tokens.cut:
                args.log(f"{tokens.cut:,} of {len(tokens):,} {name} are truncated to {tokens.max_length} tokens")
        data = Dataset.from_dict({"row": rows, "prompt": [prompts["prompt"][row] for row in rows]})
        super().__init__(model=model, args=args, train_dataset=data, data_collator=self._collate, **kwargs)

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return `row` (B,), `query_*` (B, L), `input_ids` and `attention_mask` (B, C, P)."""
        numbers = np.array([row["row"] for row in rows])
        query_ids, query_mask = self.queries.batch(numbers)
        ids, mask = self.passages.batch(self.candidates[numbers])
        return {
            "row": torch.from_numpy(numbers),
            "query_input_ids": query_ids,
            "query_attention_mask": query_mask,
            "input_ids": ids,
            "attention_mask": mask,
        }

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute equation 6 or, during warm-up, multi-label NCE over the candidates of each prompt."""
        rows = inputs.pop("row").cpu().numpy()
        scores_BC = model(**inputs)
        present_BC = torch.from_numpy(self.candidates[rows] >= 0).to(scores_BC.device)
        scores_BC = scores_BC.float() / (self.args.temperature or self._temperature(model))
        if (self.state.epoch or 0.0) < self.args.retrieval_warmup_epochs:
            positive_BC = torch.zeros_like(scores_BC, dtype=torch.bool)
            positive_BC[:, : self.args.num_positives] = True
            same_BC = torch.from_numpy(self.same_M[self.candidates[rows]]).to(scores_BC.device)
            known_BC = (same_BC[:, :, None] == same_BC[:, None, : self.args.num_positives]).any(-1)
            loss = multi_label_nce(scores_BC, positive_BC & present_BC, ~known_BC & present_BC).mean()
        else:
            likelihood_BC = self.log_likelihoods[rows].to(scores_BC.device).exp()
            scores_BC = scores_BC.masked_fill(~present_BC, MASKED_SCORE)
            likelihood_BC = likelihood_BC.masked_fill(~present_BC, MASKED_SCORE * self.args.likelihood_temperature)
            loss = kl_from_retrieval(likelihood_BC, scores_BC, self.args.likelihood_temperature).mean()
        return (loss, {"scores": scores_BC}) if return_outputs else loss

    def _temperature(self, model: nn.Module) -> float:
        inner: Any = self.accelerator.unwrap_model(model)
        if not inner.decoder:
            return COSINE_TEMPERATURE if inner.cosine else 1.0
        config = inner.retriever.config.backbone
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return sqrt((config.num_key_value_heads or config.num_attention_heads) * width)

    def retriever_now(self) -> Any:
        """Return the retriever; that of a decoder encodes as an ImpRAG model does."""
        inner = self.accelerator.unwrap_model(self.model)
        return ImpRAGEncoder(inner.retriever, inner.tokenizer) if inner.decoder else inner.retriever

    def write_retriever(self, folder: Path) -> None:
        """Write the retriever: a sentence-transformers folder, or an ImpRAG model to use for its vectors."""
        wrapped = self.accelerator.unwrap_model(self.model)
        if not wrapped.decoder:
            super().write_retriever(folder)
            return
        save_backbone(wrapped.retriever, folder)
        forget_origins(folder, "backbone")
        save_tokenizer(wrapped.tokenizer, folder)

    def saved_retriever(self, folder: Path) -> nn.Module:
        """Load what `write_retriever` wrote."""
        if isinstance(self.retriever, PreTrainedModel):
            return load_whole(ImpRAGForCausalLM, folder, dtype=torch.float32)
        return super().saved_retriever(folder)


class Retriever(WrappedRetriever):
    """Computes vectors of queries and passages with either kind of model; `forward` returns the scores of candidates."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, decoder: bool) -> None:
        super().__init__(model)
        self.tokenizer, self.decoder = tokenizer, decoder
        self.config = getattr(model, "config", None)

    def embed(self, input_ids: Tensor, attention_mask: Tensor, *, query: bool) -> Tensor:
        """Return (N, E) vectors of (N, L) tokens."""
        model = self.retriever
        if self.decoder:
            made: Tensor = (model.embed_queries if query else model.embed_passages)(input_ids, attention_mask)
        else:
            made = model({"input_ids": input_ids, "attention_mask": attention_mask})["sentence_embedding"]
        return nn.functional.normalize(made, dim=-1) if self.cosine else made

    def forward(
        self, query_input_ids: Tensor, query_attention_mask: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """Return (B, C) scores of candidates (B, C, P)."""
        queries_BE = self.embed(query_input_ids, query_attention_mask, query=True)
        passages_NE = self.embed(input_ids.flatten(0, 1), attention_mask.flatten(0, 1), query=False)
        passages_BCE = passages_NE.view(*input_ids.shape[:2], -1)
        with torch.autocast(queries_BE.device.type, enabled=False):
            return torch.einsum("be,bce->bc", queries_BE.float(), passages_BCE.float())

    def tokens(self, texts: Sequence[str], max_length: int, *, query: bool) -> PassageTokens:
        """Tokenise texts for this model. A sentence-transformers model adds its own prompt.

        Texts are truncated to `max_length` tokens, or to the limit of the sentence-transformers model if that is lower.
        """
        if self.decoder:
            return tokenize_passages(self.tokenizer, texts, max_length, end=not query)
        prompt = self.retriever.prompts.get("query" if query else "document") or ""
        length = min(max_length, self.retriever.max_seq_length or max_length)
        return tokenize_passages(self.tokenizer, [prompt + text for text in texts], length, end=False)

    @torch.no_grad()
    def encode(self, tokens: PassageTokens, *, query: bool, batch_size: int = 32) -> NDArray[np.float32]:
        """Return (N, E) vectors."""
        device = next(self.parameters()).device
        with evaluating(self):
            return tokens.encode(partial(self.embed, query=query), device, batch_size)

    def rank(
        self, queries: Sequence[str], passages: Sequence[str], depth: int, *, query_length: int, passage_length: int
    ) -> NDArray[np.int32]:
        """Return (Q, depth) indices of the best passages of each query."""
        queries_QE = self.encode(self.tokens(queries, query_length, query=True), query=True)
        passages_ME = self.encode(self.tokens(passages, passage_length, query=False), query=False)
        return top_rows(queries_QE, passages_ME, min(depth, len(passages)))


def open_retriever(
    model: ModelLike,
    retrieval_layer: int | None = None,
    max_passage_length: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> Retriever:
    """Load the retriever to train: a sentence-transformers model, or the layers of a decoder up to `retrieval_layer`."""
    if retrieval_layer is None:
        loaded = load_retriever(model, trust_remote_code=trust_remote_code)
        refuse_routes(loaded, name_of(model), "RA-DIT")
        refuse_excluded_prompts(loaded, name_of(model), "RA-DIT")
        unwrapped(loaded)  # raises an error for a model without a transformer
        if uses_chat_template(loaded):
            raise UserError(f"{name_of(model)} puts texts into a chat template, which RA-DIT does not support")
        return Retriever(loaded, loaded.tokenizer, decoder=False)
    tokenizer = load_tokenizer(name_of(model), trust_remote_code=trust_remote_code)
    return decoder_retriever(name_of(model), retrieval_layer, tokenizer, max_passage_length)


def decoder_retriever(
    backbone: str, retrieval_layer: int, tokenizer: PreTrainedTokenizerBase, max_passage_length: int | None = None
) -> Retriever:
    """Load the layers of a decoder up to one as a retriever (RA-DIT-Llama): an ImpRAG model of which only the vectors are used.

    The vectors are the queries and keys of the retrieval layer. `max_passage_length` is stored in the configuration.
    """
    whole = AutoConfig.from_pretrained(backbone)
    positions = text_positions(whole)
    if not 0 <= retrieval_layer < whole.num_hidden_layers:
        raise UserError(
            f"--retrieval_layer {retrieval_layer}: {backbone} has layers 0 to {whole.num_hidden_layers - 1}"
        )
    if max_passage_length is not None and positions is not None and max_passage_length > positions:
        raise UserError(
            f"--max_passage_length {max_passage_length} does not fit into the {positions} positions of {backbone}"
        )
    whole.num_hidden_layers = retrieval_layer + 1
    if getattr(whole, "layer_types", None):  # one entry per layer
        whole.layer_types = whole.layer_types[: retrieval_layer + 1]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # suppress the warning about unused layers
    try:
        refuse_pickles(backbone)
        cut = load_backbone(AutoModelForCausalLM, backbone, config=whole, dtype=torch.float32)
    finally:
        logging.set_verbosity(verbosity)
    config: dict[str, Any] = {} if max_passage_length is None else {"l_max": max_passage_length}
    model = ImpRAGForCausalLM.from_backbone(cut, b=retrieval_layer, t=retrieval_layer, k=1, **config)
    return Retriever(model, tokenizer, decoder=True)


def reader_likelihoods(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    passages: Sequence[str],
    candidates_NC: NDArray[np.int32],
    batch_size: int = 16,
    *,
    show_progress_bar: bool = False,
) -> Tensor:
    """Return (N, C) log p(answer | candidate, prompt) of the reader, with each candidate in front of the prompt.

    Missing candidates (-1) and prompts that do not retrieve get minus infinity.
    """
    pairs, places = [], []
    for place, (row, numbers) in enumerate(zip(prompts, candidates_NC.tolist(), strict=True)):
        for column, number in enumerate(numbers):
            if number >= 0 and row["retrieve"]:
                pairs.append((paste(row["prompt"], [passages[number]]), row["answers"][0]))
                places.append((place, column))
    likelihoods_NC = torch.full(candidates_NC.shape, -torch.inf)
    if pairs:
        texts, answers = zip(*pairs, strict=True)
        likelihoods_NC[tuple(torch.tensor(places).T)] = pasted_log_likelihoods(
            reader, tokenizer, texts, answers, batch_size, show_progress_bar=show_progress_bar
        )
    return likelihoods_NC


def _usable_rows(prompts: Dataset, candidates_NC: NDArray[np.int32], args: RADITTrainingArguments) -> list[int]:
    """Return the indices of the prompts that retrieve and have at least two candidates."""
    retrieve = [row for row, retrieve in enumerate(prompts["retrieve"]) if retrieve]
    rows = [row for row in retrieve if (candidates_NC[row] >= 0).sum() > 1]
    few = f"{len(retrieve) - len(rows)} of {len(retrieve)} prompts have fewer than two candidates to compare"
    if not rows:
        raise UserError(f"{few}: add passages, or use another retriever for --pseudo_labels")
    if len(rows) < len(retrieve):
        args.log(f"{few}: dropped")
    return rows
