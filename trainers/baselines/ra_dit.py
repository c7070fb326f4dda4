"""RA-DIT (arXiv 2310.01352): fine-tunes a retriever on the likelihoods of RA-IT's reader (equation 6).

    loss = KL(P_R || P_LSR)      P_LSR(c) = softmax_c(p_LM(answer | c, prompt) / temperature), computed once by the reader

The retriever is a sentence-transformers model (RA-DIT), or the first b + 1 layers of a decoder (RA-DIT-Llama, the baseline of
the ImpRAG paper). The latter computes vectors as ImpRAG does, but does not share weights with the reader.
"""

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

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError, reason
from revela_hub.hub_cards.assemble import forget_origins
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.hub_cards.tokenizers import uses_chat_template
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.modeling.backbones import evaluating, load_backbone
from revela_hub.pickles import refuse_pickles
from revela_hub.retrieval.encoder import text_positions
from revela_hub.trainers.base.models import ModelLike, default_arguments, name_of, unwrapped
from revela_hub.trainers.base.query_route import refuse_routes
from revela_hub.trainers.base.retriever import (
    RetrieverTrainer,
    WrappedRetriever,
    load_retriever,
    refuse_excluded_prompts,
    with_adapters,
)
from revela_hub.trainers.base.weights import load_whole
from revela_hub.trainers.baselines import RA_DIT
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments
from revela_hub.trainers.baselines.language_models import LanguageModel, load_reader, load_tokenizer
from revela_hub.trainers.baselines.pasted import paste, pasted_log_likelihoods, shortened
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder
from revela_hub.trainers.imprag.data import (
    PassageTokens,
    as_prompts,
    as_texts,
    refuse_eval_dataset,
    tokenize_passages,
    tokenize_prompts,
)
from revela_hub.trainers.imprag.retrieval import kl_from_retrieval, multi_label_nce, rank_passages, top_rows

MASKED_SCORE = -1e30
"""Score of a missing candidate; finite, so that its gradient is not NaN."""
COSINE_TEMPERATURE = 0.05
"""Default for cosine similarities; at 1, their softmax is nearly uniform."""


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


def decoder_retriever(
    backbone: str, retrieval_layer: int, tokenizer: PreTrainedTokenizerBase, max_passage_length: int | None = None
) -> Retriever:
    """Load the layers of a decoder up to one as a retriever (RA-DIT-Llama): an ImpRAG model of which only the vectors are used.

    The vectors are the queries and keys of the retrieval layer. `max_passage_length` is stored in the configuration.

    Raises:
        UserError: the decoder does not have this layer, or ImpRAG does not support it.
    """
    backbone = name_of(backbone)
    try:
        whole = AutoConfig.from_pretrained(backbone)
        layers = whole.num_hidden_layers
        if not 0 <= retrieval_layer < layers:
            raise UserError(
                f"--retrieval_layer {retrieval_layer} is beyond the last layer: {backbone} has layers 0 to {layers - 1}"
            )
        positions = text_positions(whole)
        if max_passage_length is not None and positions is not None and max_passage_length > positions:
            raise UserError(
                f"--max_passage_length {max_passage_length} does not fit into {backbone}'s {positions} positions: lower it"
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
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"cannot build a retriever from {backbone!r}: {reason(error, backbone)}") from error
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
            raise UserError(
                f"{name_of(model)} puts texts into a chat template, which RA-DIT does not support: use"
                " `revela-hub train pairs` or `train contriever`"
            )
        return Retriever(loaded, loaded.tokenizer, decoder=False)
    if not isinstance(model, str | Path):
        raise UserError(f"a decoder is cut when it is loaded: pass the Hub id or folder, not a {type(model).__name__}")
    tokenizer = load_tokenizer(str(model), trust_remote_code=trust_remote_code)
    return decoder_retriever(str(model), retrieval_layer, tokenizer, max_passage_length)


@dataclass
class _Candidates:
    """Prompts with the passages to compare, and the reader's log-likelihoods of the answers under them."""

    prompts: Dataset
    passages_NC: NDArray[np.int32]
    log_likelihoods_NC: Tensor


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
        train_dataset: questions with answers, in the columns that `revela_hub.data.prompts.rows` describes, or prompts as
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
        model: Retriever | ModelLike,
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
        if log_likelihoods is None:
            if reader is None:
                raise UserError("RA-DIT needs a language model that answers the prompts: pass it as reader")
            loaded = load_reader(reader, tokenizer=reader_tokenizer, **loading)
            ranked = _ranked(pseudo_labels, args, prompts, texts, loading)
            found = _read_candidates(loaded, args, prompts, texts, ranked, max_length, max_passage_length)
        else:
            ranked = _ranked(pseudo_labels, args, prompts, texts, loading)
            found = _Candidates(prompts, ranked, log_likelihoods)
        self.candidates, self.log_likelihoods = found.passages_NC, found.log_likelihoods_NC
        self.queries = model.tokens(found.prompts["prompt"], max_length, query=True)
        self.passages = model.tokens(texts, max_passage_length, query=False)
        self.adapters = with_adapters(model.retriever, peft_config, args.seed)
        args.ddp_find_unused_parameters = True  # a model may have parameters that its vectors do not use
        rows = _usable_rows(found, args)
        for name, tokens in (("prompts", self.queries), ("passages", self.passages)):
            if tokens.cut:
                args.log(f"{tokens.cut:,} of {len(tokens):,} {name} are truncated to {tokens.max_length} tokens")
        data = Dataset.from_dict({"row": rows, "prompt": [found.prompts["prompt"][row] for row in rows]})
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
            loss = multi_label_nce(scores_BC, positive_BC & present_BC, ~positive_BC & present_BC).mean()
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


def _read_candidates(
    reader: LanguageModel,
    args: RADITTrainingArguments,
    prompts: Dataset,
    passages: Sequence[str],
    ranked: NDArray[np.int32],
    max_length: int,
    max_passage_length: int,
) -> _Candidates:
    """Score the ranked candidates of each prompt with the reader, which is moved to the device and back."""
    kept = tokenize_prompts(prompts, reader.tokenizer, max_length, args.log)["source_row"]
    prompts, candidates_NC = prompts.select(kept), ranked[np.array(kept)]
    reader.model.to(args.device)  # type: ignore[arg-type]  # its decorator hides the signature
    log_likelihoods_NC = reader_likelihoods(
        reader.model,
        reader.tokenizer,
        prompts,
        shortened(passages, reader.tokenizer, max_passage_length, args.log),
        candidates_NC,
        args.likelihood_batch_size,
        show_progress_bar=not args.disable_tqdm,
    )
    reader.model.to("cpu")  # type: ignore[arg-type]
    return _Candidates(prompts, candidates_NC, log_likelihoods_NC)


def _ranked(
    pseudo_labels: NDArray[np.int32] | str,
    args: RADITTrainingArguments,
    prompts: Dataset,
    passages: Sequence[str],
    loading: dict[str, Any],
) -> NDArray[np.int32]:
    """Return the given rankings, or those of the given retriever."""
    depth = args.num_candidates
    if isinstance(pseudo_labels, str) and depth > len(passages):
        raise UserError(
            f"--num_candidates {depth} is more than the {counted(len(passages), 'passage')} of the collection: lower it"
        )
    how = {"show_progress_bar": not args.disable_tqdm}
    return rank_passages(pseudo_labels, prompts["input"], passages, depth, **how, **loading)


def _usable_rows(found: _Candidates, args: RADITTrainingArguments) -> list[int]:
    """Return the indices of the prompts that retrieve and have at least two candidates."""
    retrieve = [row for row, retrieve in enumerate(found.prompts["retrieve"]) if retrieve]
    if not retrieve:
        raise UserError("none of the prompts retrieves: there is nothing to train a retriever on")
    rows = [row for row in retrieve if (found.passages_NC[row] >= 0).sum() > 1]
    if len(rows) < len(retrieve):
        dropped = f"{len(retrieve) - len(rows)} of {len(retrieve)} prompts have fewer than two candidates to compare"
        if not rows:
            raise UserError(f"{dropped}: add passages, or use another retriever for --pseudo_labels")
        args.log(f"{dropped}: dropped")
    return rows
