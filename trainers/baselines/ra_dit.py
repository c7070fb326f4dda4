"""RA-DIT (arXiv 2310.01352): beside the reader of RA-IT, a retriever tuned by what helps that reader (equation 6).

    loss = KL(P_R || P_LSR)      P_LSR(c) = softmax_c(p_LM(answer | c, prompt) / temperature), computed once, by the reader

The retriever is a sentence-transformers model (RA-DIT), or the first b + 1 layers of a decoder (RA-DIT-Llama, the
baseline of the ImpRAG paper), whose vectors are those of ImpRAG but whose weights the reader does not share.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer

from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGModel
from revela_hub.trainers.baselines.arguments import RADITTrainingArguments
from revela_hub.trainers.baselines.pasted import paste, pasted_log_likelihoods
from revela_hub.trainers.common.passages import PassageTokens, tokenize_passages
from revela_hub.trainers.common.pseudo_labels import top_rows
from revela_hub.trainers.common.retrieval_loss import kl_from_retrieval, multi_label_nce


class Retriever(nn.Module):
    """Vectors of queries and passages, by whichever model makes them; `forward` gives the scores of candidates."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, decoder: bool) -> None:
        super().__init__()
        self.model, self.tokenizer, self.decoder = model, tokenizer, decoder
        self.config = getattr(model, "config", None)

    def embed(self, input_ids: Tensor, attention_mask: Tensor, *, query: bool) -> Tensor:
        """(N, E) vectors of (N, L) tokens."""
        model: Any = self.model
        if self.decoder:
            made: Tensor = (model.embed_queries if query else model.embed_passages)(input_ids, attention_mask)
        else:
            made = model({"input_ids": input_ids, "attention_mask": attention_mask})["sentence_embedding"]
        return made

    def forward(
        self, query_input_ids: Tensor, query_attention_mask: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """(B, C) scores of candidates (B, C, P)."""
        queries_BE = self.embed(query_input_ids, query_attention_mask, query=True)
        passages_NE = self.embed(input_ids.flatten(0, 1), attention_mask.flatten(0, 1), query=False)
        return torch.einsum("be,bce->bc", queries_BE, passages_NE.view(*input_ids.shape[:2], -1))

    def tokens(self, texts: Sequence[str], max_length: int) -> PassageTokens:
        """The texts as this model reads them."""
        return tokenize_passages(self.tokenizer, texts, max_length, end=self.decoder)

    @torch.no_grad()
    def encode(self, tokens: PassageTokens, *, query: bool, batch_size: int = 32) -> NDArray[np.float32]:
        """(N, E) vectors."""
        training = self.training
        self.eval()
        device = next(self.parameters()).device
        order = np.argsort(-np.diff(tokens.starts), kind="stable")
        parts = []
        for start in range(0, len(order), batch_size):
            ids, mask = tokens.batch(order[start : start + batch_size])
            parts.append(self.embed(ids.to(device), mask.to(device), query=query).float().cpu().numpy())
        self.train(training)
        vectors = np.empty((len(tokens), parts[0].shape[1]), np.float32)
        vectors[order] = np.concatenate(parts)
        return vectors

    def rank(
        self, queries: Sequence[str], passages: Sequence[str], depth: int, *, query_length: int, passage_length: int
    ) -> NDArray[np.int32]:
        """(Q, depth) numbers of the best passages of each query."""
        queries_QE = self.encode(self.tokens(queries, query_length), query=True)
        passages_ME = self.encode(self.tokens(passages, passage_length), query=False)
        return top_rows(queries_QE, passages_ME, min(depth, len(passages)))


def decoder_retriever(backbone: str, b: int, tokenizer: PreTrainedTokenizerBase) -> Retriever:
    """The first b + 1 layers of a decoder as a retriever (RA-DIT-Llama).

    Raises:
        UserError: the decoder has no layer b.
    """
    whole = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
    layers = whole.config.num_hidden_layers
    if not 0 <= b < layers:
        raise UserError(f"b={b} is beyond the last layer: {backbone} has layers 0 to {layers - 1}")
    cut: PreTrainedModel = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32, num_hidden_layers=b + 1)
    return Retriever(ImpRAGModel.from_backbone(cut, b=b, t=b), tokenizer, decoder=True)


def reader_likelihoods(
    reader: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    passages: Sequence[str],
    candidates_NC: NDArray[np.int32],
    batch_size: int = 16,
) -> Tensor:
    """(N, C) log p(answer | candidate, prompt) by the reader, each candidate pasted before the prompt."""
    pairs = [
        (paste(row["prompt"], [passages[number]]), row["answers"][0])
        for row, numbers in zip(prompts, candidates_NC.tolist(), strict=True)
        for number in numbers
    ]
    flat = pasted_log_likelihoods(reader, tokenizer, [p for p, _ in pairs], [a for _, a in pairs], batch_size)
    return flat.view(candidates_NC.shape)


class RADITTrainer(Trainer):
    """Trainer of a `Retriever` by equation 6, after a warm-up by another retriever's rankings if there is one.

    Args:
        retriever: what is trained.
        args: the run.
        prompts: as `revela_hub.data.prompts.rows.read_prompts` gives them; those that do not retrieve are left out.
        passages: the collection.
        candidates: (rows, C) numbers of passages.
        log_likelihoods: (rows, C) of `reader_likelihoods`.
        positives: warm-up: how many of the candidates, the first ones, are positives; the others are negatives.
        max_length: tokens of a prompt.
        passage_length: tokens of a passage.
        **kwargs: of `Trainer`.
    """

    def __init__(
        self,
        retriever: Retriever,
        args: RADITTrainingArguments,
        *,
        prompts: Dataset,
        passages: Sequence[str],
        candidates: NDArray[np.int32],
        log_likelihoods: Tensor,
        positives: int = 1,
        max_length: int = 128,
        passage_length: int = 160,
        **kwargs: Any,
    ) -> None:
        self.args: RADITTrainingArguments
        self.positives, self.candidates, self.log_likelihoods = positives, candidates, log_likelihoods
        self.queries = retriever.tokens(prompts["prompt"], max_length)
        self.passages = retriever.tokens(passages, passage_length)
        rows = [number for number, retrieve in enumerate(prompts["retrieve"]) if retrieve]
        data = Dataset.from_dict({"row": rows})
        collate = lambda batch: {"row": torch.tensor([entry["row"] for entry in batch])}  # noqa: E731
        super().__init__(model=retriever, args=args, train_dataset=data, data_collator=collate, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Equation 6, or the warm-up's multi-label NCE over the candidates of each prompt."""
        rows = inputs["row"].cpu().numpy()
        numbers = self.candidates[rows]
        tensors = [*self.queries.batch(rows), *self.passages.batch(numbers)]
        scores_BC = model(*(tensor.to(inputs["row"].device) for tensor in tensors))
        scores_BC = scores_BC.float() / (self.args.temperature or sqrt(self._dimension(model)))
        if (self.state.epoch or 0.0) < self.args.retrieval_warmup_epochs:
            positive_BC = torch.zeros_like(scores_BC, dtype=torch.bool)
            positive_BC[:, : self.positives] = True
            there_BC = torch.from_numpy(numbers >= 0).to(scores_BC.device)
            loss = multi_label_nce(scores_BC, positive_BC & there_BC, ~positive_BC & there_BC).mean()
        else:
            likelihood_BC = self.log_likelihoods[rows].to(scores_BC.device).exp()
            loss = kl_from_retrieval(likelihood_BC, scores_BC, self.args.likelihood_temperature).mean()
        return (loss, {"scores": scores_BC}) if return_outputs else loss

    def _dimension(self, model: nn.Module) -> int:
        inner: Any = self.accelerator.unwrap_model(model)
        if not inner.decoder:
            return 1  # cosines, or as the model was made
        backbone = inner.model.config.backbone
        return int(backbone.num_key_value_heads * backbone.head_dim)
