"""ImpRAG (arXiv 2506.02279): one decoder that retrieves with its lower layers, reads with its middle layers, and answers.

Layers b and t (counted from 0, both inclusive) divide the decoder:

    query vector     query-projection state of the prompt's last token at layer b, averaged over the heads of each
                     key/value group, before rotary embedding
    passage vector   key-projection state of the passage's last token at layer b, before rotary embedding; the passage is
                     encoded alone
    score            dot product of the two
    reading          the k passages are concatenated without padding and run through layers 0..t from position 0; layers b..t
                     of the prompt attend in one softmax to [passage states; prompt tokens so far], the other layers to
                     prompt tokens only; the prompt's positions start at k * l_max

If a family normalises its queries and keys (Qwen 3, Gemma 3), the vectors are taken after that norm, because the rotary
embedding and the family's own attention scores are computed from its result.

Shapes: N texts, B prompts, L tokens of a prompt, k passages of P tokens, S tokens of all passages of a prompt, C candidate
passages, H heads, K key/value heads, D head dimension, E = K * D embedding dimension, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.utils import ModelOutput

from .backbones import CACHE, cache_of
from .linear_cross_entropy import next_token_loss
from .passage_attention import PassageStates, Reading
from .reading_decoder import ImpRAGModel


@dataclass
class ImpRAGOutput(ModelOutput):
    """Output of `ImpRAGForCausalLM.forward`.

    Attributes:
        loss: scalar, mean next-token cross-entropy in nats; None without labels.
        logits: (B, L, V); None with `return_logits=False`.
        cache: cache of the prompt, without passages (before transformers 5.24: `past_key_values`).
        passage_states: keys and values of the passages that were read; pass them to the next call.
        query_vectors: (N, E) of `query_input_ids`.
        passage_vectors: (M, E) of `candidate_input_ids`.
        hidden_states: as for every decoder, if requested.
        attentions: as for every decoder, if requested; over [passages; prompt tokens] in layers b..t.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    if CACHE == "cache":
        cache: Cache | None = None
    else:
        past_key_values: Cache | None = None
    passage_states: PassageStates | None = None
    query_vectors: Tensor | None = None
    passage_vectors: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ImpRAGForCausalLM(ImpRAGModel, GenerationMixin):
    """ImpRAG with its output projection: computes the loss, and generates with passages or an index."""

    def get_output_embeddings(self) -> nn.Module:
        """Return the backbone's output projection."""
        return self.backbone.get_output_embeddings()  # type: ignore[no-any-return]

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
        """Compute the logits of prompts that read passages, and their next-token loss.

        Args:
            input_ids: (B, L) tokens of the prompts, padded on either side. Without prompts, only vectors are returned.
            attention_mask: (B, L), zero on padding; with a cache (B, cached tokens + L).
            passage_input_ids: (B, k, P), best first; without passages the model is equal to its backbone.
            passage_attention_mask: (B, k, P), zero on padding, and everywhere in a missing passage.
            passage_states: states from `encode_passages` or an earlier call, used instead of tokens. B prompts may share
                B / n sets of passages, each used by n consecutive prompts.
            labels: (B, L), -100 where there is no loss; shifted inside, as in every causal LM.
            position_ids: (B, L), starting at 0; the shift by k * l_max is added here.
            past_key_values: cache of the prompt; also accepted as `cache`, its name since transformers 5.24.
            inputs_embeds: (B, L, d), used instead of `input_ids`.
            use_cache: whether to return a cache.
            query_input_ids: (N, M) prompts whose vectors are returned. Part of this call so that wrappers
                (DistributedDataParallel) see all computations of a step.
            query_attention_mask: (N, M), zero on padding.
            candidate_input_ids: (M, P) passages whose vectors are returned.
            candidate_attention_mask: (M, P), zero on padding.
            num_items_in_batch: number of labels to divide the summed loss by (gradient accumulation).
            return_logits: set to False if only the loss is needed; the logits are then never held as a whole.
            **kwargs: arguments of the backbone.

        Raises:
            ValueError: passages or prompts are too long, or there are too many passages.
        """
        vectors: dict[str, Any] = {}
        if query_input_ids is not None:
            vectors["query_vectors"] = self.embed_queries(query_input_ids, query_attention_mask)
        if candidate_input_ids is not None:
            vectors["passage_vectors"] = self.embed_passages(candidate_input_ids, candidate_attention_mask)
        if input_ids is None and inputs_embeds is None and vectors:
            return ImpRAGOutput(**vectors)
        if passage_states is None and passage_input_ids is not None:
            passage_states = self.encode_passages(passage_input_ids, passage_attention_mask)
        cache = kwargs.pop("cache", past_key_values)
        other = {"position_ids": position_ids, "inputs_embeds": inputs_embeds}
        inputs = self._reading_inputs(input_ids, attention_mask, passage_states, cache, kwargs | other)
        run, head = partial(self._run, self.backbone, inputs, use_cache=use_cache), self.get_output_embeddings()
        count = num_items_in_batch
        loss, outputs = next_token_loss(head, run, labels, attention_mask, count, with_logits=return_logits)
        vectors |= {name: outputs.get(name) for name in ("hidden_states", "attentions")}
        return ImpRAGOutput(loss, outputs.logits, cache_of(outputs), passage_states=passage_states, **vectors)

    @torch.no_grad()
    def generate(  # the mixin's, with passages
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
        """Generate with passages, which are retrieved and encoded once, before the first token.

        Args:
            inputs: (B, L) prompts; also accepted as `input_ids=`.
            generation_config: as in `GenerationMixin.generate`.
            index: index to search with the vectors of the prompts; see `retrieve`.
            k: passages to retrieve per prompt; by default the configuration's.
            passage_input_ids: (B, k, P) passages to read; with an index, (M, P) tokens of all its passages.
            passage_attention_mask: mask of `passage_input_ids`, zero on padding.
            passage_states: used instead of passages.
            **kwargs: arguments of `GenerationMixin.generate`.
        """
        if index is not None:
            prompts: Any = kwargs.get("input_ids") if inputs is None else inputs
            assert passage_input_ids is not None, "passage_input_ids are the tokens of all passages of the index"
            passage_input_ids, passage_attention_mask = self.retrieve(
                prompts, kwargs.get("attention_mask"), index, passage_input_ids, passage_attention_mask, k
            )
        if passage_states is None and passage_input_ids is not None:
            passage_states = self.encode_passages(passage_input_ids, passage_attention_mask)
        if passage_states is not None:
            kwargs["passage_states"] = passage_states
        return super().generate(inputs, generation_config, **kwargs)

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
        """Return log P(answer | prompt, passage) for each candidate passage, without gradient.

        The layers below b do not depend on the passages and run once per prompt; the others run on blocks of passages.

        Args:
            input_ids: (B, L) prompt and answer, padded on the right.
            attention_mask: (B, L), zero on padding.
            labels: (B, L), the answer's tokens, -100 elsewhere.
            candidate_input_ids: (B, C, P).
            candidate_attention_mask: (B, C, P), zero on padding.
            block_size: passages per forward pass.

        Returns:
            (B, C) sums over the answer's tokens in nats, float32.
        """
        rows = []
        for row in range(len(input_ids)):
            length = int(attention_mask[row].sum())
            ids_1L, labels_L = input_ids[row : row + 1, :length], labels[row, :length]
            at = (labels_L[1:] != -100).nonzero()[:, 0]  # positions that predict a token of the answer
            candidates = (candidate_input_ids[row], candidate_attention_mask[row])
            blocks = zip(*(part.split(block_size) for part in candidates), strict=True)
            parts = [self._log_likelihood(ids_1L, at, labels_L[at + 1], ids, mask) for ids, mask in blocks]
            rows.append(torch.cat(parts))
        return torch.stack(rows)

    def _log_likelihood(self, ids_1L: Tensor, at: Tensor, answer: Tensor, ids_CP: Tensor, mask_CP: Tensor) -> Tensor:
        """Return (C,) log-likelihoods for one prompt and a block of passages."""
        states = self.encode_passages(ids_CP[:, None], mask_CP[:, None])
        if states is None or not bool(states.mask.any(-1).all()):
            raise ValueError("a candidate passage is empty: leave it out")
        inputs = self._reading_inputs(ids_1L, None, states.select(at.new_zeros(1)), None, {})
        inputs["imprag"] = Reading(states=states, layer_b=self._layer_b, repeats=len(ids_CP))
        logits = self._run(self.backbone, inputs, use_cache=False, logits_to_keep=at).logits.float()
        log_p: Tensor = logits.log_softmax(-1).gather(-1, answer.expand(len(ids_CP), -1)[..., None])[..., 0].sum(-1)
        return log_p


ImpRAGForCausalLM.register_for_auto_class("AutoModelForCausalLM")
