"""Revela (arXiv 2506.16552): a retriever trained on raw text by language modelling with in-batch attention.

A language model (LM) predicts the next tokens of a chunk and attends to the other chunks of its group, each weighted by the
retriever's similarity. Lowering the LM loss thus trains the retriever to find chunks that help to predict others.

    Sim[i, j] = softmax_{j != i}(cos(Q_i, E_j) / temperature)      E = retriever("Passage: " + chunk)
    loss      = next-token cross-entropy of stream h               (h is defined in in_batch_attention.py)

In the authors' code, Q = retriever("Query: " + first half of the chunk, or the whole chunk for code). Without query inputs, the
form is symmetric: Q = E.

The cosine and its softmax are computed in float32 or wider. The authors computed them in bf16, where cosines of 0.5 to 1 have steps of
0.004, 39 temperatures of 1e-4: similar chunks tie and share the weight. `similarity_dtype="bfloat16"` rounds as there.

Shapes: G groups, B chunks of a group, N = G * B rows, L tokens of the LM, M tokens of the retriever, d embedding dimension,
V vocabulary, P pairs. A row with an attention mask of zeros is an absent chunk: no chunk attends to it, and it has no loss.
"""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from .backbones import ComposedModel, body, check_interface, check_mask, load_backbone, use_attention
from .configuration_revela import RevelaConfig
from .in_batch_attention import every_pair, in_batch_pass
from .in_batch_kernels import InBatch, StreamE
from .joint_reading import ReadingBias
from .linear_cross_entropy import next_token_loss

# On a GPU, listing pairs waits for the device, which pays off for groups of this size or more (benchmarks/gpu.md).
PAIRS_FROM_SIZE = 16


@dataclass
class RevelaOutput(ModelOutput):
    """Output of `RevelaForCausalLM.forward`.

    Attributes:
        loss: scalar, mean next-token cross-entropy of stream h in nats; None without labels.
        logits: (N, L, V) of stream h; None in training unless requested.
        similarity: (G, B, B), rows sum to one over j != i, zero on the diagonal.
        embeddings: (N, d) unit vectors of the passages in float32 or wider; None if `similarity` was given.
        query_embeddings: (N, d) those of the queries; None in the symmetric form.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    similarity: Tensor | None = None
    embeddings: Tensor | None = None
    query_embeddings: Tensor | None = None


class RevelaForCausalLM(ComposedModel):
    """A retriever (`.retriever`, the part that is published) and a language model (`.lm`) trained together."""

    config_class = RevelaConfig
    config: RevelaConfig

    def __init__(
        self, config: RevelaConfig, retriever: PreTrainedModel | None = None, lm: PreTrainedModel | None = None
    ) -> None:
        """Build both models from `config`, or use the given ones, whose configurations `config` contains."""
        super().__init__(config)
        self.retriever = AutoModel.from_config(config.retriever) if retriever is None else retriever
        self.lm = AutoModelForCausalLM.from_config(config.lm) if lm is None else lm
        layers = self.lm.config.get_text_config().num_hidden_layers
        self.reading_bias = ReadingBias(layers, config.reading_bias) if config.reading == "joint" else None
        self._retriever_has_cache = "use_cache" in inspect.signature(self.retriever.forward).parameters
        # Only stream h needs logits. Dropping stream e before the output projection keeps what each family does after its
        # decoder (soft caps, logit scales), and halves the cost of the projection.
        decoder = body(self.lm)
        if _keep_stream_h not in decoder._forward_hooks.values():  # else from another model of this LM
            decoder.register_forward_hook(_keep_stream_h, with_kwargs=True)
        self.post_init()

    @classmethod
    def from_backbones(
        cls,
        retriever: str | PreTrainedModel,
        lm: str | PreTrainedModel,
        *,
        trust_remote_code: bool = False,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> "RevelaForCausalLM":
        """Combine two pre-trained models.

        Args:
            retriever: Hub id, folder or loaded model (anything `AutoModel` loads).
            lm: Hub id, folder or loaded decoder (anything `AutoModelForCausalLM` loads).
            trust_remote_code: whether to run model code from the repositories.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: `"sdpa"` or `"eager"`; None for the default of transformers.
            **config: other fields of `RevelaConfig`.

        Raises:
            ValueError: a checkpoint lacks weights, such as those of the LM's head; the LM is not a causal decoder; or both models
                are the same object.
        """
        load: Any = {"trust_remote_code": trust_remote_code, "dtype": dtype, "attn_implementation": attn_implementation}
        if isinstance(retriever, str):
            retriever = load_backbone(AutoModel, retriever, **load)
        if isinstance(lm, str):
            lm = load_backbone(AutoModelForCausalLM, lm, **load)
        if any(part is retriever for part in lm.modules()):
            raise ValueError("retriever and lm are the same object: load the model twice, because each is trained")
        if lm.get_output_embeddings() is None:
            raise ValueError(f"{type(lm).__name__} has no language-model head: load it with AutoModelForCausalLM")
        check_interface(lm, "in-batch attention")
        model = cls(RevelaConfig(retriever=retriever.config, lm=lm.config, **config), retriever, lm)
        model.config.dtype = lm.dtype
        check_mask(lm, causal=True)
        return model

    def get_input_embeddings(self) -> nn.Module:
        """Return the language model's token embeddings, for which FSDP checks whether they are tied to its projection."""
        return self.lm.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the language model's output projection."""
        return self.lm.get_output_embeddings()  # type: ignore[no-any-return]

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the (N, d) unit vectors, in float32 or wider, of (N, M) retriever tokens padded on either side."""
        # Move padding to the right, so that positions start at 0 in every family.
        order = attention_mask.argsort(dim=-1, descending=True, stable=True)
        input_ids, attention_mask = input_ids.gather(-1, order), attention_mask.gather(-1, order)
        extra = {"use_cache": False} if self._retriever_has_cache else {}
        hidden_NMd = self.retriever(input_ids=input_ids, attention_mask=attention_mask, **extra).last_hidden_state
        hidden_NMd = hidden_NMd.to(torch.promote_types(hidden_NMd.dtype, torch.float32))
        return F.normalize(pool(hidden_NMd, attention_mask, self.config.pooling), dim=-1)

    def published(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the vectors of the published retriever, as `embed`, with the first `config.truncate_dim` components only."""
        return self.embed(input_ids, attention_mask)[:, : self.config.truncate_dim]

    def similarity(
        self, embeddings: Tensor, present_GB: Tensor | None = None, query_embeddings: Tensor | None = None
    ) -> Tensor:
        """Return (G, B, B) Sim of queries i and passages j from (N, d) embeddings, each chunk with its own group.

        Args:
            embeddings: of the passages.
            present_GB: False for absent chunks.
            query_embeddings: of the queries; by default those of the passages (symmetric form).

        Returns:
            Rows that sum to one over j != i, to the precision of `config.similarity_dtype`. The row of a chunk that has no other
            chunk to attend to is zero.
        """
        size = self.config.group_size
        with torch.autocast(embeddings.device.type, enabled=False):
            passages_GBd = self._unit_vectors(embeddings)
            queries_GBd = passages_GBd if query_embeddings is None else self._unit_vectors(query_embeddings)
            cosine_GBB = self._rounded(queries_GBd @ passages_GBd.transpose(1, 2))
            allowed_GBB = ~torch.eye(size, dtype=torch.bool, device=embeddings.device)[None]
            if present_GB is not None:
                allowed_GBB = allowed_GBB & present_GB[:, None, :] & present_GB[:, :, None]
            scores = self._rounded(cosine_GBB / self.config.temperature)
            scores = scores.masked_fill(~allowed_GBB, torch.finfo(scores.dtype).min)
            # Mask again after the softmax, which makes rows with nothing allowed uniform.
            return self._rounded(scores.softmax(-1)) * allowed_GBB

    def _unit_vectors(self, embeddings: Tensor) -> Tensor:
        """Return (G, B, d) unit vectors of (N, d) embeddings, in float32 or wider."""
        vectors = F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=-1)
        return self._rounded(vectors).view(-1, self.config.group_size, vectors.shape[-1])

    def _rounded(self, x: Tensor) -> Tensor:
        """Round values, and in the backward pass gradients, to `config.similarity_dtype`; the dtype stays, because CPUs lack bf16."""
        return x.to(torch.bfloat16).to(x.dtype) if self.config.similarity_dtype == "bfloat16" else x

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        retriever_input_ids: Tensor | None = None,
        retriever_attention_mask: Tensor | None = None,
        retriever_query_input_ids: Tensor | None = None,
        retriever_query_attention_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        query_embeddings: Tensor | None = None,
        similarity: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> RevelaOutput:
        """Compute the next-token loss of every chunk, given the other chunks of its group.

        Args:
            input_ids: (N, L) tokens of the LM; every `config.group_size` consecutive rows are a group.
            attention_mask: (N, L), zero on padding, which may be on either side; all zero for an absent chunk.
            labels: (N, L), -100 where there is no loss; shifted inside, as in every causal LM.
            retriever_input_ids: (N, M) tokens of the retriever, for each chunk as a passage.
            retriever_attention_mask: (N, M), zero on padding.
            retriever_query_input_ids: (N, M') tokens of the retriever, for each chunk as a query; without them, the passages'
                embeddings are compared with each other (symmetric form).
            retriever_query_attention_mask: (N, M'), zero on padding.
            embeddings: (N, d), used instead of the retriever's of the passages.
            query_embeddings: (N, d), used instead of the retriever's of the queries.
            similarity: (G, B, B), used instead of all of these; its diagonal is ignored.
            num_items_in_batch: number of labels to divide the summed loss by (gradient accumulation).
            return_logits: whether to return logits; by default in evaluation and without labels. Without them the logits,
                which need most of the memory of a step, are never held as a whole.
            **kwargs: accepted so that the Trainer passes `num_items_in_batch`; unknown arguments raise a TypeError.

        Raises:
            ValueError: N is not a multiple of the group size, there is no input to compute similarities from, or a layer of the
                LM did not receive the other chunks.
        """
        if kwargs:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(kwargs))}")
        size = self.config.group_size
        if input_ids.shape[0] % size:
            raise ValueError(f"{input_ids.shape[0]} rows are not a multiple of group_size={size}")
        if similarity is None:
            if embeddings is None:
                embeddings = self._embed_in_training(retriever_input_ids, retriever_attention_mask)
            if query_embeddings is None and retriever_query_input_ids is not None:
                query_embeddings = self._embed_in_training(retriever_query_input_ids, retriever_query_attention_mask)
            present_GB = attention_mask.any(-1).view(-1, size)
            similarity = self.similarity(embeddings, present_GB, query_embeddings)
            lowest = self._resolution(similarity)
        else:  # may be a leaf, whose zeros need a gradient, too
            lowest = 0.0
        output = self._predict(similarity, lowest, input_ids, attention_mask, labels, num_items_in_batch, return_logits)
        output.embeddings, output.query_embeddings = embeddings, query_embeddings
        return output

    def _embed_in_training(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """Return the embeddings of (N, M) retriever tokens."""
        if input_ids is None or attention_mask is None:
            raise ValueError("give the retriever's input ids and attention mask, or embeddings, or similarity")
        return self.embed(input_ids, attention_mask)

    def _predict(
        self,
        similarity: Tensor,
        lowest: float,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        return_logits: bool | None,
    ) -> RevelaOutput:
        """Return the output of `forward` given Sim; pairs at or below the lowest similarity are skipped."""
        in_batch = InBatch(
            similarity_GBB=similarity,
            lengths_N=attention_mask.sum(-1),
            pairs_2P=self._pairs(similarity, lowest),
            v_normalization=self.config.v_normalization,
            eps=self.config.v_normalization_eps,
            bias=None if self.reading_bias is None else self.reading_bias(similarity),
        )
        run = partial(self._language_model, input_ids, attention_mask, in_batch)
        with_logits = not self.training if return_logits is None else return_logits
        head, count = self.lm.get_output_embeddings(), num_items_in_batch
        loss, predicted = next_token_loss(head, run, labels, attention_mask, count, with_logits=with_logits)
        return RevelaOutput(loss=loss, logits=predicted.logits, similarity=similarity)

    def _language_model(self, input_ids: Tensor, attention_mask: Tensor, in_batch: InBatch) -> Any:
        """Return the LM's output, with (N, L, V) logits of stream h.

        Both streams run as one batch of 2N rows; if the LM is not trained, stream e runs first, without gradients.
        """
        use_attention(self.lm, "revela")
        # Move padding to the right: causality then hides it, positions start at 0, kernels need no mask, and nothing waits
        # for the device. `_keep_stream_h` restores the order of the states.
        order_NL = attention_mask.argsort(dim=-1, descending=True, stable=True)
        in_batch.places_NL = order_NL.argsort(dim=-1)
        input_ids = input_ids.gather(-1, order_NL)
        if not any(parameter.requires_grad for parameter in self.lm.parameters()):
            stream_e = StreamE()
            with torch.no_grad(), in_batch_pass(self.lm, stream_e):
                body(self.lm)(input_ids=input_ids, use_cache=False, in_batch=stream_e)
            in_batch.stream_e = None if stream_e.repeated else stream_e
        if in_batch.stream_e is None:
            input_ids = torch.cat([input_ids, input_ids])
        with in_batch_pass(self.lm, in_batch):
            return self.lm(input_ids=input_ids, use_cache=False, in_batch=in_batch)

    def _resolution(self, similarity: Tensor) -> float:
        """Return the similarity at or below which pairs are skipped; by default what rounding loses in a sum of 1.

        A tolerance applies to Sim / temperature, which is the factor of the gradient to a cosine.
        """
        if self.config.similarity_tolerance is None:
            return torch.finfo(similarity.dtype).eps / 8
        return float(self.config.similarity_tolerance * self.config.temperature)

    def _pairs(self, similarity: Tensor, lowest: float) -> Tensor | None:
        """Return the (2, P) rows i, j of the pairs above the lowest similarity; None for all pairs without a list."""
        groups, size, _ = similarity.shape
        on_cpu = similarity.device.type == "cpu"
        if self.config.similarity_tolerance is not None:  # set by the user: also applies to given similarities
            lowest = self._resolution(similarity)
        elif not on_cpu and size < PAIRS_FROM_SIZE:
            return None
        if not lowest:
            return every_pair(similarity) if on_cpu else None
        off_diagonal = ~torch.eye(size, dtype=torch.bool, device=similarity.device)
        group, i, j = ((similarity.detach() > lowest) & off_diagonal).nonzero(as_tuple=True)
        if not on_cpu and 2 * len(group) > groups * size * size:
            return None
        return torch.stack([group * size + i, group * size + j])


def pool(hidden_NMd: Tensor, attention_mask: Tensor, pooling: Literal["last", "mean", "cls"]) -> Tensor:
    """Pool (N, M, d) token states, padded on either side, into one vector per row: (N, d)."""
    mask = attention_mask.bool()
    if pooling == "mean":
        weight_NM1 = mask[:, :, None].to(hidden_NMd.dtype)
        return (hidden_NMd * weight_NM1).sum(1) / weight_NM1.sum(1).clamp(min=1.0)
    positions = torch.arange(mask.shape[1], device=mask.device)
    index_N = mask.long().argmax(-1) if pooling == "cls" else (positions * mask).argmax(-1)
    return hidden_NMd[torch.arange(len(index_N), device=mask.device), index_N]


def _keep_stream_h(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ANN401 (the decoder's own output class)
    """Drop stream e from the decoder's output and restore the order of the tokens, as a forward hook of the decoder."""
    in_batch: InBatch | StreamE | None = kwargs.get("in_batch")
    if isinstance(in_batch, InBatch):
        states_NLD = output.last_hidden_state
        if in_batch.stream_e is None:
            states_NLD = states_NLD.chunk(2)[1]
        assert in_batch.places_NL is not None  # see _language_model
        output.last_hidden_state = states_NLD.gather(1, in_batch.places_NL[..., None].expand_as(states_NLD))
    return output


RevelaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
