"""RA-DIT (arXiv 2310.01352): beside the reader of RA-IT, a retriever tuned by what helps that reader (equation 6).

    loss = KL(P_R || P_LSR)      P_LSR(c) = softmax_c(p_LM(answer | c, prompt) / temperature), computed once, by the reader

The retriever is a sentence-transformers model (RA-DIT), or the first b + 1 layers of a decoder (RA-DIT-Llama, the
baseline of the ImpRAG paper), whose vectors are those of ImpRAG but whose weights the reader does not share.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging

from revela_hub.errors import UserError, first_line, reason
from revela_hub.hub_cards.assemble import forget_origins
from revela_hub.hub_cards.export import make_readable, save_backbone, save_tokenizer
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.modeling.backbones import load_backbone
from revela_hub.pickles import refuse_pickles
from revela_hub.retrieval.encoder import similarity_of
from revela_hub.trainers.baselines import RA_DIT
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments
from revela_hub.trainers.baselines.pasted import paste, pasted_log_likelihoods
from revela_hub.trainers.common.passages import PassageTokens, tokenize_passages
from revela_hub.trainers.common.pseudo_labels import top_rows
from revela_hub.trainers.common.retrieval_loss import kl_from_retrieval, multi_label_nce
from revela_hub.trainers.common.retriever import RETRIEVER, load_retriever
from revela_hub.trainers.common.trainer import MethodTrainer
from revela_hub.trainers.common.weights import load_whole

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

NOWHERE = -1e30
COSINE_TEMPERATURE = 0.05  # at 1 the softmax of cosines is nearly uniform, whatever they are


class Retriever(nn.Module):
    """Vectors of queries and passages, by whichever model makes them; `forward` gives the scores of candidates."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, decoder: bool) -> None:
        super().__init__()
        self.model, self.tokenizer, self.decoder = model, tokenizer, decoder
        self.cosine = not decoder and similarity_of(cast("SentenceTransformer", model), "the retriever") == "cosine"
        self.config = getattr(model, "config", None)

    def embed(self, input_ids: Tensor, attention_mask: Tensor, *, query: bool) -> Tensor:
        """(N, E) vectors of (N, L) tokens."""
        model: Any = self.model
        if self.decoder:
            made: Tensor = (model.embed_queries if query else model.embed_passages)(input_ids, attention_mask)
        else:
            made = model({"input_ids": input_ids, "attention_mask": attention_mask})["sentence_embedding"]
        return nn.functional.normalize(made, dim=-1) if self.cosine else made

    def forward(
        self, query_input_ids: Tensor, query_attention_mask: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """(B, C) scores of candidates (B, C, P)."""
        queries_BE = self.embed(query_input_ids, query_attention_mask, query=True)
        passages_NE = self.embed(input_ids.flatten(0, 1), attention_mask.flatten(0, 1), query=False)
        return torch.einsum("be,bce->bc", queries_BE, passages_NE.view(*input_ids.shape[:2], -1))

    def tokens(self, texts: Sequence[str], max_length: int, *, query: bool) -> PassageTokens:
        """The texts as this model reads them: a sentence-transformers model's own prompt before each, and no more of it.

        Cut at `max_length` tokens, or at the sentence-transformers model's own, if that is less.
        """
        if self.decoder:
            return tokenize_passages(self.tokenizer, texts, max_length, end=not query)
        model: Any = self.model
        prompt = model.prompts.get("query" if query else "document") or ""
        length = min(max_length, model.max_seq_length or max_length)
        return tokenize_passages(self.tokenizer, [prompt + text for text in texts], length, end=False)

    @torch.no_grad()
    def encode(self, tokens: PassageTokens, *, query: bool, batch_size: int = 32) -> NDArray[np.float32]:
        """(N, E) vectors."""
        training = self.training
        self.eval()
        device = next(self.parameters()).device
        vectors_NE = tokens.encode(partial(self.embed, query=query), device, batch_size)
        self.train(training)
        return vectors_NE

    def rank(
        self, queries: Sequence[str], passages: Sequence[str], depth: int, *, query_length: int, passage_length: int
    ) -> NDArray[np.int32]:
        """(Q, depth) numbers of the best passages of each query."""
        queries_QE = self.encode(self.tokens(queries, query_length, query=True), query=True)
        passages_ME = self.encode(self.tokens(passages, passage_length, query=False), query=False)
        return top_rows(queries_QE, passages_ME, min(depth, len(passages)))


def decoder_retriever(backbone: str, b: int, tokenizer: PreTrainedTokenizerBase, l_max: int | None = None) -> Retriever:
    """The first b + 1 layers of a decoder as a retriever (RA-DIT-Llama): an ImpRAG model that is used for its vectors alone.

    Args:
        backbone: folder or Hub id of the decoder.
        b: the last of its layers, whose queries and keys are the vectors.
        tokenizer: of the decoder.
        l_max: tokens of a passage, at most, for those who use it later; by default ImpRAG's.

    Raises:
        UserError: the decoder has no layer b, or is none that ImpRAG can be made of.
    """
    try:
        whole = AutoConfig.from_pretrained(backbone)
        layers = whole.num_hidden_layers
        if not 0 <= b < layers:
            raise UserError(f"b={b} is beyond the last layer: {backbone} has layers 0 to {layers - 1}")
        positions = getattr(whole, "max_position_embeddings", None)
        if l_max is not None and positions is not None and l_max > positions:
            raise UserError(
                f"passages of l_max={l_max} tokens do not fit into {backbone}'s {positions} positions: lower it"
            )
        whole.num_hidden_layers = b + 1
        if getattr(whole, "layer_types", None):  # of families whose layers differ; has to be as long
            whole.layer_types = whole.layer_types[: b + 1]
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # or it would list the layers above b as not expected
        try:
            refuse_pickles(backbone)
            cut = load_backbone(AutoModelForCausalLM, backbone, config=whole, dtype=torch.float32)
        finally:
            logging.set_verbosity(verbosity)
        config: dict[str, Any] = {} if l_max is None else {"l_max": l_max}
        model = ImpRAGForCausalLM.from_backbone(cut, b=b, t=b, k=1, **config)
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"cannot make a retriever of {backbone!r}: {reason(error, backbone)}") from error
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
    """(N, C) log p(answer | candidate, prompt) by the reader, each candidate pasted before the prompt.

    Minus infinity for a candidate that is not there (-1), and everywhere for a prompt that does not retrieve.
    """
    pairs, places = [], []
    for place, (row, numbers) in enumerate(zip(prompts, candidates_NC.tolist(), strict=True)):
        for column, number in enumerate(numbers):
            if number >= 0 and row["retrieve"]:
                pairs.append((paste(row["prompt"], [passages[number]]), row["answers"][0]))
                places.append((place, column))
    likelihoods_NC = torch.full(candidates_NC.shape, -torch.inf)
    if pairs:
        flat = pasted_log_likelihoods(
            reader,
            tokenizer,
            [prompt for prompt, _ in pairs],
            [answer for _, answer in pairs],
            batch_size,
            show_progress_bar=show_progress_bar,
        )
        likelihoods_NC[tuple(torch.tensor(places).T)] = flat
    return likelihoods_NC


class RADITTrainer(MethodTrainer):
    """Trainer of a `Retriever` by equation 6, after a warm-up by another retriever's rankings if there is one.

    Args:
        retriever: what is trained.
        args: the run.
        prompts: as `revela_hub.data.prompts.rows.read_prompts` gives them; those that do not retrieve are left out, and, with
            a line that says so, those with fewer than two candidates, which teach nothing.
        passages: the collection.
        candidates: (rows, C) numbers of passages, the best by another retriever first, -1 for none.
        log_likelihoods: (rows, C) of `reader_likelihoods`.
        max_length: tokens of a prompt.
        passage_length: tokens of a passage.
        **kwargs: of `Trainer`.

    Raises:
        UserError: no prompt retrieves, or none has two candidates.
    """

    method = RA_DIT

    args: RADITTrainingArguments

    def __init__(
        self,
        retriever: Retriever,
        args: RADITTrainingArguments,
        *,
        prompts: Dataset,
        passages: Sequence[str],
        candidates: NDArray[np.int32],
        log_likelihoods: Tensor,
        max_length: int = 128,
        passage_length: int = 160,
        **kwargs: Any,
    ) -> None:
        self.candidates, self.log_likelihoods = candidates, log_likelihoods
        self.queries = retriever.tokens(prompts["prompt"], max_length, query=True)
        self.passages = retriever.tokens(passages, passage_length, query=False)
        args.ddp_find_unused_parameters = True  # beyond what makes the vectors, a model may have more
        retrieve = [number for number, retrieve in enumerate(prompts["retrieve"]) if retrieve]
        if not retrieve:
            raise UserError("none of the prompts retrieves: there is nothing for a retriever to learn")
        rows = [number for number in retrieve if (candidates[number] >= 0).sum() > 1]
        if len(rows) < len(retrieve):
            what = f"{len(retrieve) - len(rows)} of {len(retrieve)} prompts have fewer than two candidates to compare"
            if not rows:
                raise UserError(f"{what}: give more passages, or another retriever's --pseudo_labels")
            args.say(f"{what}: left out")
        for name, tokens in (("prompts", self.queries), ("passages", self.passages)):
            if tokens.cut:
                args.say(
                    f"{tokens.cut:,} of {len(tokens):,} {name} are cut for the retriever, at {tokens.max_length} tokens"
                )
        data = Dataset.from_dict({"row": rows, "prompt": [prompts["prompt"][row] for row in rows]})
        super().__init__(model=retriever, args=args, train_dataset=data, data_collator=self._collate, **kwargs)

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`row` (B,), `query_*` (B, L), `input_ids` and `attention_mask` (B, C, P)."""
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
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Equation 6, or the warm-up's multi-label NCE over the candidates of each prompt."""
        rows = inputs.pop("row").cpu().numpy()
        scores_BC = model(**inputs)
        there_BC = torch.from_numpy(self.candidates[rows] >= 0).to(scores_BC.device)
        scores_BC = scores_BC.float() / (self.args.temperature or self._temperature(model))
        if (self.state.epoch or 0.0) < self.args.retrieval_warmup_epochs:
            positive_BC = torch.zeros_like(scores_BC, dtype=torch.bool)
            positive_BC[:, : self.args.num_positives] = True
            loss = multi_label_nce(scores_BC, positive_BC & there_BC, ~positive_BC & there_BC).mean()
        else:
            likelihood_BC = self.log_likelihoods[rows].to(scores_BC.device).exp()
            # What is not there has no share in either distribution; finite, or the gradient would be none.
            scores_BC = scores_BC.masked_fill(~there_BC, NOWHERE)
            likelihood_BC = likelihood_BC.masked_fill(~there_BC, NOWHERE * self.args.likelihood_temperature)
            loss = kl_from_retrieval(likelihood_BC, scores_BC, self.args.likelihood_temperature).mean()
        return (loss, {"scores": scores_BC}) if return_outputs else loss

    def _temperature(self, model: nn.Module) -> float:
        inner: Any = self.accelerator.unwrap_model(model)
        if not inner.decoder:
            return COSINE_TEMPERATURE if inner.cosine else 1.0
        config = inner.model.config.backbone
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return sqrt((config.num_key_value_heads or config.num_attention_heads) * width)

    @property
    def retriever(self) -> Any:
        """What is trained: a sentence-transformers model, or an ImpRAG model of the first layers."""
        return self.accelerator.unwrap_model(self.model).model

    def trained_config(self) -> PreTrainedConfig:
        """That of the model inside."""
        inner = self.retriever
        config: PreTrainedConfig = inner.config if isinstance(inner, PreTrainedModel) else inner[0].auto_model.config
        return config

    def model_names(self) -> str:
        """The retriever's."""
        return f"RA-DIT's retriever, of type {self.trained_config().model_type}"

    def settings(self) -> dict[str, Any]:
        """What the run learns from, the reader's likelihoods among it."""
        learnt = hashlib.sha256(self.log_likelihoods.numpy().tobytes() + self.candidates.tobytes()).hexdigest()[:12]
        return super().settings() | {"likelihoods": learnt}

    def write_models(self, output: Path) -> list[Path]:
        """Writes `retriever/`."""
        return [self.export(output / RETRIEVER)] if self.args.should_save else []

    def export(self, folder: Path) -> Path:
        """Writes the retriever: a sentence-transformers folder, or an ImpRAG model that is there for its vectors."""
        wrapped: Any = self.accelerator.unwrap_model(self.model)
        if wrapped.decoder:
            save_backbone(wrapped.model, folder)
            forget_origins(folder, "backbone")
            save_tokenizer(wrapped.tokenizer, folder)
        else:
            wrapped.model.save_pretrained(str(folder), create_model_card=False)
            make_readable(folder)
        return folder

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self.export(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        try:
            saved: nn.Module = (
                load_whole(ImpRAGForCausalLM, resume_from_checkpoint, dtype=torch.float32)
                if isinstance(self.retriever, PreTrainedModel)
                else load_retriever(resume_from_checkpoint)
            )
            self.retriever.load_state_dict(saved.state_dict())
        except (KeyError, OSError, RuntimeError) as error:
            raise UserError(
                f"{resume_from_checkpoint} is not a checkpoint of this run ({first_line(error)})"
            ) from error
