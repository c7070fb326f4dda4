"""ImpRAG (arXiv 2506.02279): one decoder that retrieves with its bottom layers, reads with its middle ones and answers.

Layers are cut at b and t (counted from 0, both inclusive):

    query vector     query-projection state of the prompt's last token at layer b, averaged over the heads of each
                     key/value group, before rotary embedding
    passage vector   key-projection state of the passage's last token at layer b, the passage encoded alone, as above
    score            dot product of the two
    reading          the k passages, one after the other without padding, go through layers 0..t from position 0; layers
                     b..t of the prompt attend in one softmax to [passage states; own tokens so far], the other layers to
                     own tokens; the prompt's positions start at k * l_max

Where a family norms its queries and keys (Qwen 3, Gemma 3) the vectors are taken after that norm: it is what the rotary
embedding, and so the family's own attention scores, start from.

Shapes: N texts, B prompts, L tokens of a prompt, k passages of P tokens, S tokens of all passages of a prompt, C candidate
passages, H heads, K key/value heads, D head dimension, E = K * D embedding dimension, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_imprag import ImpRAGConfig
from .linear_cross_entropy import IGNORED, HeadLoss, linear_cross_entropy, watch_head
from .passage_attention import PassageStates, Reading
from .reading_decoder import ImpRAGModel


@dataclass
class ImpRAGOutput(ModelOutput):
    """Result of `ImpRAGForCausalLM.forward`.

    Attributes:
        loss: scalar, mean next-token cross-entropy in nats; None without labels.
        logits: (B, L, V); None with `return_logits=False`.
        past_key_values: the prompt's own cache; passages are not in it.
        passage_states: keys and values of the passages that were read, to be passed to the next call.
        query_vectors: (N, E) of `query_input_ids`.
        passage_vectors: (M, E) of `candidate_input_ids`.
        hidden_states: as every decoder, if asked for.
        attentions: as every decoder, if asked for; over [passages; own tokens] in layers b..t.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    passage_states: PassageStates | None = None
    query_vectors: Tensor | None = None
    passage_vectors: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ImpRAGForCausalLM(ImpRAGModel, GenerationMixin):
    """ImpRAG with its output projection: the loss, and `generate` with passages or an index."""

    def __init__(self, config: ImpRAGConfig, backbone: PreTrainedModel | None = None) -> None:
        """As `ImpRAGModel`."""
        super().__init__(config, backbone)
        watch_head(self.get_output_embeddings())
        self._loss_at_head = True  # until the family is seen to change its logits after the projection

    def get_output_embeddings(self) -> nn.Module:
        """The backbone's output projection."""
        head: nn.Module = self.backbone.get_output_embeddings()
        return head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the backbone's output projection."""
        self.backbone.set_output_embeddings(new_embeddings)
        watch_head(new_embeddings)

    def forward(  # type: ignore[override]  # adds labels and the rest of a causal LM
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        passage_input_ids: Tensor | None = None,
        passage_attention_mask: Tensor | None = None,
        passage_states: PassageStates | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        query_input_ids: Tensor | None = None,
        query_attention_mask: Tensor | None = None,
        candidate_input_ids: Tensor | None = None,
        candidate_attention_mask: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool = True,
        **kwargs: Any,
    ) -> ImpRAGOutput:
        """Logits of prompts that read passages, and their next-token loss.

        Args:
            input_ids: (B, L) tokens of the prompts, padded on either side.
            attention_mask: (B, L), zero on padding; with a cache (B, cached tokens + L).
            passage_input_ids: (B, k, P), best first; without passages the model is exactly its backbone.
            passage_attention_mask: (B, k, P), zero on padding, and everywhere in a passage that is not there.
            passage_states: of `encode_passages` or of an earlier call, in place of tokens; B prompts may share the
                states of fewer sets, n consecutive prompts each.
            labels: (B, L), -100 where there is no loss; shifted inside, as in every causal LM.
            position_ids: (B, L), counted from 0 at the prompt's first token: the shift by k * l_max is added here.
            past_key_values: the prompt's own cache.
            inputs_embeds: (B, L, d), in place of `input_ids`.
            use_cache: whether to return a cache.
            query_input_ids: (N, M) prompts to return the vectors of, in the same call, so that a wrapped model
                (DistributedDataParallel) sees all of a step's computation.
            query_attention_mask: (N, M).
            candidate_input_ids: (M, P) passages to return the vectors of.
            candidate_attention_mask: (M, P).
            num_items_in_batch: number of labels that the sum of losses is divided by (gradient accumulation).
            return_logits: False in training, where only the loss is wanted: it then never has the logits of all tokens.
            **kwargs: of the backbone.

        Raises:
            ValueError: if passages or prompts are too long, or too many.
        """
        if passage_states is None and passage_input_ids is not None:
            passage_states = self.encode_passages(passage_input_ids, passage_attention_mask)
        other = {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        inputs = self._reading_inputs(input_ids, attention_mask, passage_states, kwargs | other)
        if labels is not None and attention_mask is not None:
            # After padding on the left comes a first token, which no token predicts.
            first_BL = F.pad(attention_mask[:, 1:] > attention_mask[:, :-1], (1, 0))
            labels = labels.masked_fill(first_BL, IGNORED)
        if labels is None or return_logits:
            outputs = self.backbone(**inputs, use_cache=use_cache)
            loss, logits = self._loss_of(outputs.logits, labels, num_items_in_batch), outputs.logits
        else:
            loss, outputs = self._loss_without_logits(inputs, use_cache, labels, num_items_in_batch)
            logits = None
        output = ImpRAGOutput(loss, logits, outputs.past_key_values, passage_states)
        if query_input_ids is not None:
            output["query_vectors"] = self.embed_queries(query_input_ids, query_attention_mask)
        if candidate_input_ids is not None:
            output["passage_vectors"] = self.embed_passages(candidate_input_ids, candidate_attention_mask)
        for name in ("hidden_states", "attentions"):
            if outputs.get(name) is not None:
                output[name] = outputs[name]
        return output

    def _loss_of(self, logits: Tensor, labels: Tensor | None, count: Tensor | int | None) -> Tensor | None:
        if labels is None:
            return None
        loss: Tensor = self.backbone.loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=count
        )
        return loss

    def _loss_without_logits(
        self, inputs: dict[str, Any], use_cache: bool | None, labels: Tensor, count: Tensor | int | None
    ) -> tuple[Tensor | None, Any]:
        """The loss and the backbone's output: by blocks of labelled tokens, where the projection can be watched."""
        head = self.get_output_embeddings()
        following_P = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
        asked = HeadLoss(
            lambda hidden, weight, bias: linear_cross_entropy(hidden.flatten(0, 1), weight, bias, following_P)
        )
        if self._loss_at_head:
            asked.ask(head)
        try:
            outputs = self.backbone(**inputs, use_cache=use_cache)
        finally:
            head.__dict__.pop("head_loss", None)
        if asked.result is None:  # a projection that is not watched has given all logits
            return self._loss_of(outputs.logits, labels, count), outputs
        self._loss_at_head = outputs.logits is asked.output
        if not self._loss_at_head:  # a family that changes its logits behind the projection
            return self._loss_without_logits(inputs, use_cache, labels, count)
        return asked.result / ((following_P != IGNORED).sum() if count is None else count), outputs

    @torch.no_grad()
    def generate(  # type: ignore[override]  # the mixin's, with passages
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        index: Any = None,  # noqa: ANN401 (anything that searches)
        k: int | None = None,
        passage_input_ids: Tensor | None = None,
        passage_attention_mask: Tensor | None = None,
        passage_states: PassageStates | None = None,
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (as in GenerationMixin)
        """`GenerationMixin.generate` with passages: encoded once, before the first token.

        Args:
            inputs: (B, L) prompts; also as `input_ids=`.
            generation_config: how to generate.
            index: what to retrieve from, once, with the prompts' vectors; see `retrieve`.
            k: passages to retrieve for a prompt; by default the configuration's.
            passage_input_ids: (B, k, P) passages to read; with an index that returns rows, (M, P) of all its passages.
            passage_attention_mask: as `passage_input_ids`.
            passage_states: in place of passages.
            **kwargs: of `GenerationMixin.generate`.
        """
        prompts = kwargs.get("input_ids") if inputs is None else inputs
        if index is not None:
            if prompts is None:
                raise ValueError("an index is searched with the prompt: give input_ids")
            found = self.retrieve(
                prompts, kwargs.get("attention_mask"), index, k, passage_input_ids, passage_attention_mask
            )
            passage_input_ids, passage_attention_mask = found.passage_input_ids, found.passage_attention_mask
            passage_states = found.passage_states
        if passage_states is None and passage_input_ids is not None:
            passage_states = self.encode_passages(passage_input_ids, passage_attention_mask)
        if passage_states is not None:
            kwargs["passage_states"] = passage_states
        return super().generate(inputs, generation_config, **kwargs)  # type: ignore[misc]  # typed for a protocol

    @torch.no_grad()
    def answer_log_likelihoods(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        candidate_input_ids: Tensor,
        candidate_attention_mask: Tensor,
        block_size: int = 16,
    ) -> Tensor:
        """Log P(answer | prompt, one passage) under each candidate passage, without gradient.

        The layers below b do not see the passages: they are run once for each prompt, and the rest in blocks.

        Args:
            input_ids: (B, L) prompt and answer, padded on the right.
            attention_mask: (B, L).
            labels: (B, L), -100 but on the answer.
            candidate_input_ids: (B, C, P).
            candidate_attention_mask: (B, C, P).
            block_size: passages that are in memory at a time.

        Returns:
            (B, C) sums over the answer's tokens, in nats, float32.
        """
        rows = []
        for row in range(len(input_ids)):
            length = int(attention_mask[row].sum())
            ids_1L, labels_L = input_ids[row : row + 1, :length], labels[row, :length]
            at = (labels_L[1:] != -100).nonzero()[:, 0]  # positions that predict an answer token
            blocks = zip(
                candidate_input_ids[row].split(block_size), candidate_attention_mask[row].split(block_size), strict=True
            )
            parts = [self._log_likelihood(ids_1L, at, labels_L[at + 1], ids, mask) for ids, mask in blocks]
            rows.append(torch.cat(parts))
        return torch.stack(rows)

    def _log_likelihood(self, ids_1L: Tensor, at: Tensor, answer: Tensor, ids_CP: Tensor, mask_CP: Tensor) -> Tensor:
        """(C,) for one prompt and a block of passages."""
        states = self.encode_passages(ids_CP[:, None], mask_CP[:, None])
        if states is None or not bool(states.mask.any(-1).all()):
            raise ValueError("a candidate passage has no token")
        inputs = self._reading_inputs(ids_1L, None, states.select(at.new_zeros(1)), {})
        inputs["imprag"] = Reading(states=states, repeats=len(ids_CP))
        logits = self.backbone(**inputs, use_cache=False, logits_to_keep=at).logits.float()
        log_p: Tensor = logits.log_softmax(-1).gather(-1, answer.expand(len(ids_CP), -1)[..., None])[..., 0].sum(-1)
        return log_p


ImpRAGForCausalLM.register_for_auto_class("AutoModelForCausalLM")
