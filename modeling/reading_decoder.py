"""ImpRAG below the output projection: vectors of queries and passages, and hidden states of prompts that read passages.

The equations are in modeling_imprag.py, which adds the output projection.

Shapes: N texts, B prompts, L tokens of a prompt, k passages of P tokens, S tokens of all passages of a prompt, C candidate
passages, H heads, K key/value heads, D head dimension, E = K * D embedding dimension, V vocabulary.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .backbones import (
    ComposedModel,
    body,
    cache_argument,
    cache_of,
    check_backbone,
    check_mask,
    layers_name,
    load_backbone,
    use_attention,
)
from .configuration_imprag import ImpRAGConfig
from .passage_attention import PassageStates, Reading, right_padded


class ImpRAGModel(ComposedModel):
    """A decoder that computes the vectors of queries and passages, and hidden states of prompts that read passages."""

    config_class = ImpRAGConfig
    config: ImpRAGConfig

    def __init__(self, config: ImpRAGConfig, backbone: PreTrainedModel | None = None) -> None:
        """Build the backbone from `config`, or use the given one, whose configuration `config` contains."""
        super().__init__(config)
        self.backbone = AutoModelForCausalLM.from_config(config.backbone) if backbone is None else backbone
        check_backbone(self.backbone)
        self._no_split_modules = self.backbone._no_split_modules
        if _at_layer_b not in self._layer_b._forward_pre_hooks.values():  # else from another model of this backbone
            self._layer_b.register_forward_pre_hook(_at_layer_b, with_kwargs=True)
        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        backbone: str | PreTrainedModel,
        *,
        trust_remote_code: bool = False,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> "ImpRAGModel":
        """Create an ImpRAG model from a pre-trained decoder. No weights are added.

        Args:
            backbone: Hub id, folder or loaded decoder (anything `AutoModelForCausalLM` loads).
            trust_remote_code: whether to run model code from the repository.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: `"sdpa"` or `"eager"`; None for the default of transformers.
            **config: other fields of `ImpRAGConfig`: b, t, k, l_max, passage_encoding.

        Raises:
            ValueError: the checkpoint lacks weights, such as those of the head; it is not a causal decoder; or a field is out of
                range. If a layer cannot read passages, the first forward pass raises one.
        """
        load: Any = {"trust_remote_code": trust_remote_code, "dtype": dtype, "attn_implementation": attn_implementation}
        loaded = load_backbone(AutoModelForCausalLM, backbone, **load) if isinstance(backbone, str) else backbone
        check_backbone(loaded)
        model = cls(ImpRAGConfig(backbone=loaded.config, **config), loaded)
        check_mask(loaded, causal=True)
        model.config.dtype = loaded.dtype
        if loaded.generation_config is not None:
            model.generation_config = copy.deepcopy(loaded.generation_config)
        return model

    def get_decoder(self) -> PreTrainedModel:
        """Return the backbone without its output projection."""
        return body(self.backbone)

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's token embeddings."""
        return self.backbone.get_input_embeddings()

    def embed_queries(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vectors of prompts, running only layers 0..b.

        Args:
            input_ids: (N, L), padded on either side.
            attention_mask: (N, L), zero on padding.

        Returns:
            (N, E) vectors in float32 or wider, not normalised.
        """
        query_NHD, key_NKD = self._last_token(input_ids, attention_mask)
        vectors: Tensor = query_NHD.unflatten(1, (key_NKD.shape[1], -1)).mean(2).flatten(1)
        return vectors

    def embed_passages(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vectors of passages, each encoded alone; arguments and result as in `embed_queries`."""
        return self._last_token(input_ids, attention_mask)[1].flatten(1)

    @staticmethod
    def score(query_vectors: Tensor, passage_vectors: Tensor) -> Tensor:
        """Return (N, M) dot products of (N, E) queries and (M, E) passages, or (N, C) for (N, C, E) candidates per query."""
        if passage_vectors.dim() == 3:
            return torch.einsum("ne,nce->nc", query_vectors, passage_vectors)
        return query_vectors @ passage_vectors.T

    def encode_passages(
        self, passage_input_ids: Tensor, passage_attention_mask: Tensor | None = None
    ) -> PassageStates | None:
        """Return the keys and values that prompts attend to, running only layers 0..t.

        Args:
            passage_input_ids: (B, k, P), best first; padding may be on either side.
            passage_attention_mask: (B, k, P), zero on padding, and everywhere in a missing passage.

        Returns:
            The states; None if all passages are missing.

        Raises:
            ValueError: a passage is longer than `l_max`, or there are more than `k`.
        """
        ids_BkP = passage_input_ids
        mask_BkP = torch.ones_like(ids_BkP) if passage_attention_mask is None else passage_attention_mask
        mask_BkP = mask_BkP.bool()
        count = ids_BkP.shape[1]
        if count > self.config.k:
            raise ValueError(
                f"{count} passages were given for a prompt, but the model reads at most k={self.config.k}: raise config.k"
            )
        lengths_Bk = mask_BkP.sum(-1)
        longest = int(lengths_Bk.max()) if mask_BkP.numel() else 0
        if longest > self.config.l_max:
            raise ValueError(f"a passage of {longest} tokens is longer than l_max={self.config.l_max}: cut it")
        if longest == 0:
            return None
        reads_B = lengths_Bk.any(-1)
        ids_BkP, mask_BkP, lengths_Bk = (part[reads_B] for part in (ids_BkP, mask_BkP, lengths_Bk))
        if self.config.passage_encoding == "full":
            states = self.passage_states(*right_padded(ids_BkP.flatten(1), mask_BkP.flatten(1)))
        else:
            ids, mask = right_padded(ids_BkP.flatten(0, 1), mask_BkP.flatten(0, 1))
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            if self.config.passage_encoding == "segmented":
                positions = positions + (lengths_Bk.cumsum(-1) - lengths_Bk).view(-1, 1)
            states = self.passage_states(ids, mask, positions).side_by_side(len(ids_BkP))
        return states if len(states) == len(reads_B) else states.among(reads_B)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        passage_input_ids: Tensor | None = None,
        passage_attention_mask: Tensor | None = None,
        passage_states: PassageStates | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states of prompts that read passages; arguments as in `ImpRAGForCausalLM.forward`."""
        if passage_states is None and passage_input_ids is not None:
            passage_states = self.encode_passages(passage_input_ids, passage_attention_mask)
        cache = kwargs.pop("cache", past_key_values)
        inputs = self._reading_inputs(input_ids, attention_mask, passage_states, cache, kwargs)
        outputs = self._run(self.get_decoder(), inputs)
        return BaseModelOutputWithPast(outputs.last_hidden_state, cache_of(outputs))

    @torch.no_grad()
    def retrieve(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        index: Any,  # noqa: ANN401 (anything that searches)
        passage_input_ids: Tensor,
        passage_attention_mask: Tensor | None = None,
        k: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Search an index with the vectors of prompts.

        Args:
            input_ids: (B, L) prompts.
            attention_mask: (B, L), zero on padding.
            index: has `search(vectors, k)`, which takes float32 vectors (B, E) on the CPU and returns scores and row numbers,
                (B, k) each, like a FAISS index.
            passage_input_ids: (M, P) tokens of all passages of the index.
            passage_attention_mask: (M, P), zero on padding.
            k: passages per prompt; by default the configuration's.

        Returns:
            The (B, k, P) tokens of the passages found, best first, and their mask.

        Raises:
            ValueError: the index holds fewer than k passages.
        """
        k = self.config.k if k is None else k
        _, rows = index.search(self.embed_queries(input_ids, attention_mask).float().cpu(), k)
        rows_Bk = torch.as_tensor(rows).long().to(passage_input_ids.device)
        if rows_Bk.shape[-1] < k or bool((rows_Bk < 0).any()):
            raise ValueError(f"the index holds fewer than k={k} passages: lower k")
        mask_MP = torch.ones_like(passage_input_ids) if passage_attention_mask is None else passage_attention_mask
        return passage_input_ids[rows_Bk].to(input_ids.device), mask_MP[rows_Bk].to(input_ids.device)

    @staticmethod
    def _run(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> Any:
        """Run a model, and check that its layers have read the passages, if there are any."""
        outputs = model(**inputs, **options)
        if "imprag" in inputs:
            inputs["imprag"].check()
        return outputs

    def _layers(self) -> nn.ModuleList:
        decoder = self.get_decoder()
        layers: nn.ModuleList = decoder.get_submodule(layers_name(decoder))  # type: ignore[assignment]
        return layers

    @property
    def _layer_b(self) -> nn.Module:
        return self._layers()[self.config.b]

    def _run_bottom(self, ids_NL: Tensor, last: int, reading: Reading, positions: Tensor | None) -> None:
        """Run layers 0..last on right-padded tokens; causality hides the padding."""
        use_attention(self.backbone, "imprag")
        decoder = self.get_decoder()
        bottom = copy.copy(decoder)  # shares its modules, except the list of layers
        bottom._modules = {**decoder._modules, layers_name(decoder): nn.ModuleList(self._layers()[: last + 1])}
        bottom(input_ids=ids_NL, position_ids=positions, use_cache=False, imprag=reading)
        reading.check()

    def _last_token(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return query (N, H, D) and key (N, K, D) of the last token at layer b, before rotary embedding."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        ids, mask = right_padded(input_ids, mask.bool())
        b = self.config.b
        reading = Reading(record=range(b, b + 1), layer_b=self._layer_b, before_rotary=True)
        self._run_bottom(ids, b, reading, None)
        query, key, _ = reading.recorded[b]
        rows, last = torch.arange(len(ids), device=ids.device), (mask.sum(-1) - 1).clamp(min=0)
        dtype = torch.promote_types(key.dtype, torch.float32)
        return query[rows, :, last].to(dtype), key[rows, :, last].to(dtype)

    def passage_states(self, ids_NS: Tensor, mask_NS: Tensor, positions: Tensor | None = None) -> PassageStates:
        """Return the states of layers b..t, running only the layers up to t.

        Args:
            ids_NS: (N, S) tokens, padded on the right; causality hides the padding.
            mask_NS: (N, S), False on padding.
            positions: (N, S) or (1, S); by default starting at 0.
        """
        reading = Reading(record=range(self.config.b, self.config.t + 1))
        self._run_bottom(ids_NS, self.config.t, reading, positions)
        _, keys, values = zip(*(reading.recorded[layer] for layer in reading.record), strict=True)
        return PassageStates(keys, values, mask_NS, self.config.b)

    def _reading_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        states: PassageStates | None,
        cache: Cache | None,
        other: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments for the backbone: with passages, positions are shifted and the states are added."""
        use_attention(self.backbone, "imprag")
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= other | cache_argument(self.backbone, cache)
        if states is None:
            return inputs
        tokens = inputs["inputs_embeds"] if input_ids is None else input_ids
        rows, length = tokens.shape[:2]
        if rows % len(states):
            raise ValueError(
                f"{rows} prompts cannot share {len(states)} sets of passages: give a multiple of that number"
            )
        past = 0 if cache is None else cache.get_seq_length()
        shift = self.config.k * self.config.l_max
        limit = getattr(self.backbone.config, "max_position_embeddings", None)
        if not past and limit is not None and shift + length > limit:
            raise ValueError(
                f"a prompt of {length} tokens after k * l_max = {shift} positions of passages does not fit into the backbone's"
                f" {limit} positions: shorten the prompt, or lower k or l_max"
            )
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(past, past + length, device=tokens.device)[None]
            if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
                positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        reads_B = states.mask.any(-1)
        shift_R1 = (shift * reads_B.long()).repeat_interleave(rows // len(states))[:, None]
        inputs["position_ids"] = positions + shift_R1
        inputs["imprag"] = Reading(states=states)
        return inputs


def _at_layer_b(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    reading: Reading | None = kwargs.get("imprag")
    return None if reading is None or layer is not reading.layer_b else reading.at_layer_b(args, kwargs)


ImpRAGModel.register_for_auto_class("AutoModel")
