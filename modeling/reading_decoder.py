"""The bottom and middle of ImpRAG: vectors of queries and passages, states of passages, prompts that read them.

modeling_imprag.py has the equations, and the output projection on top.

Shapes: N texts, B prompts, L tokens of a prompt, k passages of P tokens, S tokens of all passages of a prompt, C candidate
passages, H heads, K key/value heads, D head dimension, E = K * D embedding dimension, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.utils import ModelOutput

from .backbones import (
    CHOOSE,
    body,
    can_run,
    check_interface,
    check_mask,
    checking,
    load_backbone,
    recorded_attention,
    some_tokens,
    tolerance,
)
from .configuration_imprag import ImpRAGConfig
from .passage_attention import LayerStates, PassageStates, Reading


@dataclass
class ImpRAGModelOutput(ModelOutput):
    """Result of `ImpRAGModel.forward`.

    Attributes:
        last_hidden_state: (B, L, d), after the decoder's final norm.
        past_key_values: the prompt's own cache.
        passage_states: keys and values of the passages that were read.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: Cache | None = None
    passage_states: PassageStates | None = None


@dataclass
class Retrieved:
    """What a prompt retrieved.

    Attributes:
        scores: (B, k), dot products, best first.
        passage_input_ids: (B, k, P).
        passage_attention_mask: (B, k, P).
        passage_states: in place of tokens, where the index stores keys and values.
        rows: (B, k), numbers of the passages in the index, if it says them.
    """

    scores: Tensor | None
    passage_input_ids: Tensor | None = None
    passage_attention_mask: Tensor | None = None
    passage_states: PassageStates | None = None
    rows: Tensor | None = None


class ImpRAGModel(PreTrainedModel):
    """A decoder whose hidden states have read passages; makes the vectors of queries and passages."""

    config_class = ImpRAGConfig
    config: ImpRAGConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_set_attn_implementation = classmethod(lambda cls: True)

    def __init__(self, config: ImpRAGConfig, backbone: PreTrainedModel | None = None) -> None:
        """Builds the backbone from `config`, or takes the one given, whose configuration must be the one in `config`."""
        super().__init__(config)
        self.backbone = AutoModelForCausalLM.from_config(config.backbone) if backbone is None else backbone
        check_backbone(self.backbone)
        self._no_split_modules = self.backbone._no_split_modules
        self._layers()[config.b].register_forward_pre_hook(_at_layer_b, with_kwargs=True)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing of its own to initialise: the backbone is built, or loaded, by its own class."""

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
        """Makes an ImpRAG model of a pre-trained decoder; no weight is added.

        Args:
            backbone: Hub id, folder or loaded decoder (anything `AutoModelForCausalLM` loads).
            trust_remote_code: for models whose code lies in their repository.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: `"sdpa"` or `"eager"`; None for transformers' choice.
            **config: the other fields of `ImpRAGConfig`: b, t, k, l_max, passage_encoding.

        Raises:
            ValueError: if its checkpoint lacks weights, such as those of the head, if it is not a causal decoder that can
                read passages by its attention in layers b to t, or if a field is out of range.
        """
        if isinstance(backbone, str):
            load: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": dtype}
            if attn_implementation is not None:
                load["attn_implementation"] = attn_implementation
            loaded = load_backbone(AutoModelForCausalLM, backbone, **load)
        else:
            loaded = backbone
        check_backbone(loaded)
        model = cls(ImpRAGConfig(backbone=loaded.config, **config), loaded)
        if can_run(loaded):
            model._check_reading()
        model.config.dtype = loaded.dtype
        if loaded.generation_config is not None:
            model.generation_config = copy.deepcopy(loaded.generation_config)
        return model

    def get_decoder(self) -> PreTrainedModel:
        """The backbone without its output projection."""
        return body(self.backbone)

    def get_input_embeddings(self) -> nn.Module:
        """The backbone's token embeddings."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the backbone's token embeddings."""
        self.backbone.set_input_embeddings(value)

    def embed_queries(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Vectors of prompts, by layers 0..b only.

        Args:
            input_ids: (N, L), padded on either side.
            attention_mask: (N, L), zero on padding.

        Returns:
            (N, E), at least float32, not normalised.
        """
        query_NHD, key_NKD = self._last_token(input_ids, attention_mask)
        vectors: Tensor = query_NHD.unflatten(1, (key_NKD.shape[1], -1)).mean(2).flatten(1)
        return vectors

    def embed_passages(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Vectors of passages, each encoded alone, by layers 0..b only; arguments and result as `embed_queries`."""
        return self._last_token(input_ids, attention_mask)[1].flatten(1)

    @staticmethod
    def score(query_vectors: Tensor, passage_vectors: Tensor) -> Tensor:
        """(N, M) dot products of (N, E) queries and (M, E) passages, or (N, C) of (N, C, E) candidates of each query."""
        if passage_vectors.dim() == 3:
            return torch.einsum("ne,nce->nc", query_vectors, passage_vectors)
        return query_vectors @ passage_vectors.T

    def encode_passages(
        self, passage_input_ids: Tensor, passage_attention_mask: Tensor | None = None
    ) -> PassageStates | None:
        """Keys and values that the prompt reads, by layers 0..t only.

        Args:
            passage_input_ids: (B, k, P), best first; padding may be on either side.
            passage_attention_mask: (B, k, P), zero on padding, and everywhere in a passage that is not there.

        Returns:
            The states; None if there is no passage at all.

        Raises:
            ValueError: if a passage is longer than `l_max`, or there are more than `k`.
        """
        ids_BkP = passage_input_ids
        if ids_BkP.dim() != 3:
            raise ValueError(f"passage_input_ids must be (batch, k, tokens), got {tuple(ids_BkP.shape)}")
        mask_BkP = torch.ones_like(ids_BkP) if passage_attention_mask is None else passage_attention_mask
        mask_BkP = mask_BkP.bool()
        sets, count, length = ids_BkP.shape
        if count > self.config.k:
            raise ValueError(
                f"{count} passages for a prompt, but the model was made for k={self.config.k}: set config.k"
            )
        lengths_Bk = mask_BkP.sum(-1)
        longest = int(lengths_Bk.max()) if mask_BkP.numel() else 0
        if longest > self.config.l_max:
            raise ValueError(f"a passage of {longest} tokens is longer than l_max={self.config.l_max}: cut it")
        if longest == 0:
            return None
        if self.config.passage_encoding == "full":
            ids, mask = _right_padded(ids_BkP.reshape(sets, -1), mask_BkP.reshape(sets, -1))
            return self._passage_states(ids, mask, None)
        ids, mask = _right_padded(ids_BkP.reshape(-1, length), mask_BkP.reshape(-1, length))
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if self.config.passage_encoding == "segmented":
            positions = positions + (lengths_Bk.cumsum(-1) - lengths_Bk).view(-1, 1)
        return _side_by_side(self._passage_states(ids, mask, positions), sets)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        passage_input_ids: Tensor | None = None,
        passage_attention_mask: Tensor | None = None,
        passage_states: PassageStates | None = None,
        **kwargs: Any,
    ) -> ImpRAGModelOutput:
        """Hidden states of prompts that read passages; the arguments of `ImpRAGForCausalLM.forward` without labels."""
        if passage_states is None and passage_input_ids is not None:
            passage_states = self.encode_passages(passage_input_ids, passage_attention_mask)
        inputs = self._reading_inputs(input_ids, attention_mask, passage_states, kwargs)
        outputs = self.get_decoder()(**inputs)
        return ImpRAGModelOutput(outputs.last_hidden_state, outputs.past_key_values, passage_states)

    def retrieve(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        index: Any,  # noqa: ANN401 (anything that searches)
        k: int | None = None,
        passage_input_ids: Tensor | None = None,
        passage_attention_mask: Tensor | None = None,
    ) -> Retrieved:
        """Searches the index with the prompts' vectors.

        Args:
            input_ids: (B, L) prompts.
            attention_mask: (B, L).
            index: has `search(vectors, k)`, for float32 vectors (B, E) on the CPU. It returns either scores and rows,
                (B, k) each, as a FAISS index does, or an object with the attributes of `Retrieved`.
            k: passages for a prompt; by default the configuration's.
            passage_input_ids: (M, P) tokens of the whole collection, for an index that returns rows.
            passage_attention_mask: (M, P).

        Raises:
            ValueError: if the index holds fewer than k passages, or returns rows and the collection is not given.
        """
        k = self.config.k if k is None else k
        with torch.no_grad():
            vectors = self.embed_queries(input_ids, attention_mask).float().cpu()
        found = index.search(vectors, k)
        if not isinstance(found, tuple):
            parts: dict[str, Any] = {name: getattr(found, name, None) for name in Retrieved.__dataclass_fields__}
            return Retrieved(**parts)
        scores, rows = (torch.as_tensor(part) for part in found)
        if rows.shape[-1] < k or bool((rows < 0).any()):
            raise ValueError(f"k={k} passages were asked for, but the index holds fewer: lower k")
        if passage_input_ids is None:
            raise ValueError("this index returns rows: give passage_input_ids, the (M, P) tokens of its passages")
        if passage_attention_mask is None:
            passage_attention_mask = torch.ones_like(passage_input_ids)
        at = rows.long().to(passage_input_ids.device)
        ids_BkP, mask_BkP = passage_input_ids[at], passage_attention_mask[at]
        return Retrieved(scores, ids_BkP.to(input_ids.device), mask_BkP.to(input_ids.device), rows=rows)

    def _layers(self) -> nn.ModuleList:
        decoder = self.get_decoder()
        layers: nn.ModuleList = decoder.get_submodule(layers_name(decoder))  # type: ignore[assignment]
        return layers

    def _read_by_own_attention(self) -> None:
        """Sets the backbone to the attention functions of `passage_attention.py`."""
        implementation = self.backbone.config._attn_implementation
        if not implementation.startswith("imprag_"):
            # Gemma 2 caps its attention logits, which no SDPA kernel does.
            capped = getattr(self.backbone.config, "attn_logit_softcapping", None) is not None
            eager = capped or implementation == "eager"
            self.backbone.set_attn_implementation("imprag_eager" if eager else "imprag_sdpa")

    @torch.no_grad()
    def _check_reading(self) -> None:
        """A prompt that reads a passage: its states have to reach the attention of layers b to t, with a cache or without.

        Raises:
            ValueError: the backbone is not a causal decoder, or reading does not work in its family.
        """
        backbone, b, t = self.backbone, self.config.b, self.config.t
        with checking(backbone, "ImpRAG"):
            check_mask(backbone, causal=True)
            before = backbone.config._attn_implementation
            self._read_by_own_attention()
            passage_1S, prompt_1L = some_tokens(backbone, 1, 5).split([2, 3], dim=-1)
            with recorded_attention(backbone) as calls:
                backbone(prompt_1L, imprag=Reading(), use_cache=False)
                called = [call.layer for call in calls if "imprag" in call.arguments]
                once = [layer for layer in range(len(self._layers())) if called.count(layer) == 1]
                if wrong := [layer for layer in range(b, t + 1) if layer not in once]:
                    raise ValueError(
                        f"layer {wrong[0]}, of b={b} to t={t}, calls no attention that it could read with, or more than one"
                        f" (layers that read: {', '.join(map(str, once)) or 'none'})"
                    )
                states = self._passage_states(passage_1S, torch.ones_like(passage_1S).bool(), None)
                whole, alone = (
                    backbone(prompt_1L, imprag=Reading(states=read), use_cache=False).logits[:, -1]
                    for read in (states, None)
                )
                start = backbone(prompt_1L[:, :-1], imprag=Reading(states=states), use_cache=True)
                last = backbone(
                    prompt_1L[:, -1:],
                    past_key_values=start.past_key_values,
                    imprag=Reading(states=states),
                    use_cache=True,
                ).logits[:, -1]
                if float((whole - last).abs().max()) > tolerance(whole):
                    raise ValueError("generating with a cache gives other logits than reading the whole text")
                if torch.equal(whole, alone):
                    raise ValueError("its logits do not depend on the passages")
                if len(once) == len(self._layers()):
                    self._check_against_text(prompt_1L)
                self.embed_queries(prompt_1L)
            backbone.set_attn_implementation(before)

    def _check_against_text(self, ids_1L: Tensor) -> None:
        """Where all layers can read, a passage that all of them read is as good as a text in which it comes first."""
        passage_1S, prompt_1L = ids_1L[:, :1], ids_1L[:, 1:]
        layers = self.layer_states(passage_1S, range(len(self._layers())))
        keys, values = tuple(layer.key for layer in layers), tuple(layer.value for layer in layers)
        states = PassageStates(keys, values, torch.ones_like(passage_1S).bool(), 0)
        positions_1L = torch.arange(1, ids_1L.shape[1], device=ids_1L.device)[None]
        read = self.backbone(prompt_1L, position_ids=positions_1L, imprag=Reading(states=states), use_cache=False)
        text = self.backbone(ids_1L, use_cache=False).logits[:, 1:]
        if float((read.logits - text).abs().max()) > tolerance(text):
            raise ValueError("its attention does not only depend on queries, keys, values and a mask")

    def _run_bottom(self, ids_NL: Tensor, last: int, reading: Reading, positions: Tensor | None) -> None:
        """Layers 0..last over right-padded tokens; causality hides the padding."""
        self._read_by_own_attention()
        decoder = self.get_decoder()
        bottom = copy.copy(decoder)  # shares its modules, but for the list of layers
        bottom._modules = {**decoder._modules, layers_name(decoder): nn.ModuleList(self._layers()[: last + 1])}
        bottom(input_ids=ids_NL, position_ids=positions, use_cache=False, imprag=reading)

    def _last_token(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Query (N, H, D) and key (N, K, D) of the last token at layer b, before rotary embedding."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        ids, mask = _right_padded(input_ids, mask.bool())
        b = self.config.b
        reading = Reading(record=range(b, b + 1), before_rotary=True)
        self._run_bottom(ids, b, reading, None)
        states: LayerStates = reading.recorded[b]
        rows, last = torch.arange(len(ids), device=ids.device), (mask.sum(-1) - 1).clamp(min=0)
        dtype = torch.promote_types(states.key.dtype, torch.float32)
        return states.query[rows, :, last].to(dtype), states.key[rows, :, last].to(dtype)

    def layer_states(self, ids_NS: Tensor, layers: range, positions: Tensor | None = None) -> list[LayerStates]:
        """Queries, keys and values of texts at some layers, by the layers up to the last of them only.

        Args:
            ids_NS: (N, S) tokens, padded on the right; causality hides the padding.
            layers: the layers.
            positions: (N, S), or (1, S); by default from 0.
        """
        reading = Reading(record=layers)
        self._run_bottom(ids_NS, layers[-1], reading, positions)
        return [reading.recorded[layer] for layer in layers]

    def _passage_states(self, ids_NS: Tensor, mask_NS: Tensor, positions: Tensor | None) -> PassageStates:
        layers = self.layer_states(ids_NS, range(self.config.b, self.config.t + 1), positions)
        return PassageStates(tuple(s.key for s in layers), tuple(s.value for s in layers), mask_NS, self.config.b)

    def _reading_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        states: PassageStates | None,
        other: dict[str, Any],
    ) -> dict[str, Any]:
        """Arguments of the backbone: without passages those given, else with shifted positions and the states."""
        self._read_by_own_attention()
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **other}
        if states is None:
            return inputs
        tokens = inputs.get("inputs_embeds") if input_ids is None else input_ids
        if tokens is None:
            raise ValueError("give input_ids or inputs_embeds")
        rows, length = tokens.shape[:2]
        if rows % len(states):
            raise ValueError(f"{rows} prompts cannot share the passages of {len(states)}")
        cache = inputs.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        shift = self.config.k * self.config.l_max
        limit = getattr(self.backbone.config, "max_position_embeddings", None)
        if not past and limit is not None and shift + length > limit:
            raise ValueError(
                f"a prompt of {length} tokens after k * l_max = {shift} positions for passages does not fit"
                f" into the backbone's {limit}: shorten it, or lower k or l_max"
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


def check_backbone(backbone: PreTrainedModel) -> None:
    """Raises ValueError if the model is no decoder whose layers go through transformers' attention interface."""
    name = type(backbone).__name__
    if backbone.config.is_encoder_decoder or not layers_name(body(backbone)):
        raise ValueError(f"{name} is not a causal decoder; {CHOOSE}")
    if backbone.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language-model head: load it with AutoModelForCausalLM")
    check_interface(backbone, "reading passages")


def layers_name(decoder: PreTrainedModel) -> str:
    """What a family calls its list of layers; empty if it has none."""
    layers = decoder.config.get_text_config().num_hidden_layers
    found = (name for name, m in decoder.named_children() if isinstance(m, nn.ModuleList) and len(m) == layers)
    return next(found, "")


def _at_layer_b(
    _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    reading: Reading | None = kwargs.get("imprag")
    return None if reading is None else reading.at_layer_b(args, kwargs)


def _right_padded(ids_NL: Tensor, mask_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Moves each row's tokens to its beginning, in order, and cuts what is padding in all rows."""
    order = mask_NL.long().argsort(dim=-1, descending=True, stable=True)
    longest = max(1, int(mask_NL.sum(-1).max()))
    return ids_NL.gather(-1, order)[:, :longest], mask_NL.gather(-1, order)[:, :longest]


def _side_by_side(states: PassageStates, sets: int) -> PassageStates:
    """From the states of single passages (B * k, K, P, D) to those of sets (B, K, S, D), without padding between."""
    mask_BS = states.mask.reshape(sets, -1)  # a view where no padding was cut
    order = mask_BS.long().argsort(dim=-1, descending=True, stable=True)[:, : int(mask_BS.sum(-1).max())]

    def joined(part: Tensor) -> Tensor:
        _, heads, length, dim = part.shape
        part_BSKD = part.view(sets, -1, heads, length, dim).transpose(2, 3).reshape(sets, -1, heads, dim)
        return part_BSKD.gather(1, order[:, :, None, None].expand(-1, -1, heads, dim)).transpose(1, 2)

    return PassageStates(
        tuple(joined(key) for key in states.keys),
        tuple(joined(value) for value in states.values),
        mask_BS.gather(-1, order),
        states.first_layer,
    )


ImpRAGModel.register_for_auto_class("AutoModel")
