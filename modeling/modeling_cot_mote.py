r"""CoT-MoTE (arXiv 2304.10195): one encoder with an expert for queries and one for passages, dense and sparse vectors.

Every layer has one self-attention for all texts and two feed-forwards, each with the layer norm behind it, both started
from the backbone's. A text t of either kind goes through its own:

    a = LayerNorm(x + SelfAttention(x)),   x' = LayerNorm_kind(a + FeedForward_kind(a))
    dense(t)  = the last state of [CLS]
    sparse(t) = max over the tokens 1..N of log(1 + relu(head(state)))   (equation 4; without [CLS], [SEP] and padding)
    score(q, p) = dense(q) . dense(p) + sparse(q) . sparse(p)

Pre-training: masked language modelling of the text, and a decoder of one layer that writes a contextual span of it (a
neighbouring span, or a query for it) from the text's vector h in the place of the span's [CLS] embedding:

    loss = L_mlm(t) + sum over the bottlenecks h of L_dec(span | h),   h = dense(t) or sparse(t) E, E the word embeddings

with L_dec the cross-entropy of all next tokens ("ar"), or of the masked tokens ("ae", CoT-MAE, arXiv 2208.07670).
Embeddings and head of the decoder are those of the encoder that read the text.

`.lm` reads passages and `.query_lm` queries: two masked language models of transformers that share the modules around
the experts. `variant="separate"` shares nothing, `"siamese"` has no `.query_lm`.

Shapes: B texts, L tokens, D hidden size, V vocabulary, P labelled positions.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, PreTrainedModel
from transformers import initialization as init
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

from .configuration_cot_mote import CoTMoTEConfig
from .expert_encoders import CoTMoTEPreTrainedModel, keep_top_k
from .linear_cross_entropy import IGNORED, watch_head
from .masked_lm import additive, bert_layer_config, position_table, score, summed_cross_entropy


@dataclass
class CoTMoTEOutput(ModelOutput):
    """Result of `CoTMoTEModel.forward`.

    Attributes:
        last_hidden_state: (B, L, D).
        pooler_output: (B, D), the dense vectors: the states of the first token.
        sparse: (B, V), not negative; None with `return_sparse=False`.
        hidden_states: (B, L, D) of the embeddings and of each layer; None unless asked for.
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    sparse: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class CoTMoTEPreTrainingOutput(ModelOutput):
    """Result of `CoTMoTEForPreTraining.forward`.

    Attributes:
        loss: scalar, `encoder_loss + decoder_loss`.
        encoder_loss: scalar, mean cross-entropy of the masked tokens in nats; 0 if there is none.
        decoder_loss: scalar, the sum of the next two; None without a decoder.
        dense_decoder_loss: scalar, of the span written from the dense vector; None without that bottleneck.
        sparse_decoder_loss: scalar, of the span written from the sparse vector; None without that bottleneck.
        last_hidden_state: (B, L, D).
        pooler_output: (B, D), the dense vectors.
        sparse: (B, V); None without that bottleneck.
        hidden_states: (B, L, D) of the embeddings and of each layer; None unless asked for.
    """

    loss: Tensor | None = None
    encoder_loss: Tensor | None = None
    decoder_loss: Tensor | None = None
    dense_decoder_loss: Tensor | None = None
    sparse_decoder_loss: Tensor | None = None
    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    sparse: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class CoTMoTEModel(CoTMoTEPreTrainedModel):
    """Dense and sparse vectors of queries and passages."""

    def __init__(
        self, config: CoTMoTEConfig, lm: PreTrainedModel | None = None, query_lm: PreTrainedModel | None = None
    ) -> None:
        """As the base class, and refuses the configuration of a checkpoint that has the decoder.

        Raises:
            ValueError: for a pre-training checkpoint.
        """
        if "CoTMoTEForPreTraining" in (config.architectures or []):
            raise ValueError(
                "this checkpoint is a pre-training one, encoder and decoder in one: load it with"
                " CoTMoTEForPreTraining.from_pretrained and take its .encoder"
            )
        super().__init__(config, lm, query_lm)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        expert: str | Sequence[str] | Tensor | None = None,
        return_sparse: bool = True,
        top_k: int | None = None,
        output_hidden_states: bool = False,
        token_type_ids: Tensor | None = None,
    ) -> CoTMoTEOutput:
        """The vectors of a batch.

        Args:
            input_ids: (B, L), [CLS] first, padding on the right.
            attention_mask: (B, L), zero on padding.
            expert: `"query"` or `"passage"`; of a batch with both, one per row, as names or as a tensor (B,) with 0 for
                a query and 1 for a passage. A siamese model needs none.
            return_sparse: whether to score the vocabulary, which costs about as much as some layers.
            top_k: leave so many terms in each sparse vector, and those that equal the last of them.
            output_hidden_states: whether to return the states of all layers.
            token_type_ids: what some tokenizers give; not read, as a text alone is all of type 0.

        Raises:
            ValueError: if no expert is named, or not one for each row, or for tensors of the wrong shape.
        """
        self._check_inputs("", input_ids, attention_mask=attention_mask)
        parts, indices = [], []
        for lm, rows in self._routes(expert, len(input_ids)):
            ids, mask = (t if rows is None else t[rows] for t in (input_ids, attention_mask))
            encoded = lm.base_model(input_ids=ids, attention_mask=mask, output_hidden_states=output_hidden_states)
            states_BLD: Tensor = encoded.last_hidden_state
            sparse_BV = None
            if return_sparse:
                logits_BLV = score(lm, states_BLD.flatten(0, 1)).unflatten(0, states_BLD.shape[:2])
                sparse_BV = self._sparse(logits_BLV, ids, mask)
                sparse_BV = sparse_BV if top_k is None else keep_top_k(sparse_BV, top_k)
            parts.append(CoTMoTEOutput(states_BLD, states_BLD[:, 0], sparse_BV, encoded.hidden_states))
            indices.append(rows)
        return _in_order(parts, indices)


class CoTMoTEForPreTraining(CoTMoTEPreTrainedModel):
    """The encoder (`.encoder`, to be published) and the decoder, `.ar_decoder` or `.ae_decoder`.

    The weights of CoT-MAE's published implementation map by their names: the masked language model is `.lm`, its
    `c_head.` reads `ae_decoder.`, `d_head.` reads `ar_decoder.` and `d_head_ln_f.` reads `ar_decoder_ln_f.`; the first
    release has the masked language model's names without `lm.`. `cot_mae_names` does it. Such a model is
    `variant="siamese", bottlenecks="dense"`, with `decoder_layers` and, for its causal head, `attention_window=3`.
    """

    accepts_loss_kwargs = False  # each loss is the mean over its own labels of the batch, as in CoT-MAE

    def __init__(
        self, config: CoTMoTEConfig, lm: PreTrainedModel | None = None, query_lm: PreTrainedModel | None = None
    ) -> None:
        super().__init__(config, lm, query_lm)
        for part in (self.lm, self.query_lm):
            if part is not None:
                watch_head(part.get_output_embeddings())
        layer = bert_layer_config(self.lm.config)
        self.ae_decoder: nn.ModuleList | None = None
        self.ar_decoder: nn.ModuleList | None = None
        if config.decoder == "ae":
            self.ae_decoder = nn.ModuleList([BertLayer(layer) for _ in range(config.decoder_layers)])
        elif config.decoder == "ar":
            settings: dict[str, Any] = {"attn_implementation": "sdpa"}  # as of the layer of the other decoder
            gpt2 = GPT2Config(
                n_embd=layer.hidden_size,
                n_head=layer.num_attention_heads,
                n_layer=config.decoder_layers,
                activation_function=layer.hidden_act,
                resid_pdrop=layer.hidden_dropout_prob,
                attn_pdrop=layer.attention_probs_dropout_prob,
                layer_norm_epsilon=layer.layer_norm_eps,
                **settings,
            )
            self.ar_decoder = nn.ModuleList([GPT2Block(gpt2, layer_idx=i) for i in range(config.decoder_layers)])
            self.ar_decoder_dropout = nn.Dropout(layer.hidden_dropout_prob)
            self.ar_decoder_ln_f = nn.LayerNorm(layer.hidden_size, eps=layer.layer_norm_eps)
        self.decoder_positions: nn.Embedding | None = None
        if config.decoder != "none" and position_table(self.lm.base_model) is None:
            self.decoder_positions = nn.Embedding(self.max_length, layer.hidden_size)  # its embeddings have none
        self.post_init()

    @property
    def encoder(self) -> CoTMoTEModel:
        """What is published: the same weights without the decoder."""
        config = copy.deepcopy(self.config)
        config.architectures, config.decoder = None, "none"
        config.attention_window, config.auto_map = None, {"AutoModel": "modeling_cot_mote.CoTMoTEModel"}
        model = CoTMoTEModel(config, self.lm, self.query_lm)
        model.train(self.training)
        return model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_labels: Tensor | None = None,
        expert: str | Sequence[str] | Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> CoTMoTEPreTrainingOutput:
        """The losses of a batch; masks and spans are inputs, so that a batch can be replayed.

        Args:
            input_ids: (B, L) the masked texts, [CLS] first, padding on the right.
            attention_mask: (B, L), zero on padding.
            labels: (B, L), the original tokens where masked, -100 elsewhere.
            decoder_input_ids: (B, M) the contextual spans with [CLS] (which gives way to the vector) and [SEP]: the
                original tokens for "ar", masked ones for "ae".
            decoder_attention_mask: (B, M), zero on padding.
            decoder_labels: (B, M), the token that stands at each position, -100 where it is not to be predicted; "ar"
                predicts it from the position before, and without labels all tokens of the span but the first.
            expert: `"query"` or `"passage"`, or one per row, as in `CoTMoTEModel.forward`.
            output_hidden_states: whether to return the encoder's states of all layers.

        Raises:
            ValueError: if no expert is named, or not one for each row, or for tensors missing or of the wrong shape.
        """
        self._check_inputs("", input_ids, attention_mask=attention_mask, labels=labels)
        span = self._span(decoder_input_ids, decoder_attention_mask, decoder_labels)
        if span is not None and len(span[0]) != len(input_ids):
            raise ValueError(
                f"decoder_input_ids has {len(span[0])} rows, input_ids {len(input_ids)}: one span per text"
            )
        texts = (input_ids, attention_mask, labels)
        parts: list[CoTMoTEOutput] = []
        indices: list[Tensor | None] = []
        bottlenecks = tuple(self.config.bottlenecks) if span is not None else ()
        losses = {name: _MeanLoss() for name in ("encoder", *bottlenecks)}
        for lm, rows in self._routes(expert, len(input_ids)):
            ids, mask, own_labels, *own_span = (t if rows is None else t[rows] for t in (*texts, *(span or ())))
            encoded = lm.base_model(input_ids=ids, attention_mask=mask, output_hidden_states=output_hidden_states)
            states_BLD: Tensor = encoded.last_hidden_state
            labelled_BL = own_labels != IGNORED
            targets_P = own_labels[labelled_BL]
            vectors = {"dense": states_BLD[:, 0]}
            if "sparse" in bottlenecks:  # which needs the logits of all positions
                logits_BLV = score(lm, states_BLD.flatten(0, 1)).unflatten(0, ids.shape)
                vectors["sparse"] = self._sparse(logits_BLV, ids, mask)
                total = _summed(logits_BLV[labelled_BL], targets_P)
            else:
                total = summed_cross_entropy(lm, states_BLD[labelled_BL], targets_P)
            losses["encoder"].add(total, len(targets_P))
            for bottleneck in bottlenecks:  # in this order: each decoding draws its own dropout
                vector_BD = vectors[bottleneck]
                if bottleneck == "sparse":
                    vector_BD = vector_BD @ _embedding_matrix(lm)
                decoded_PD, targets_P = self._decode(lm, vector_BD, *own_span)
                losses[bottleneck].add(summed_cross_entropy(lm, decoded_PD, targets_P), len(targets_P))
            parts.append(CoTMoTEOutput(states_BLD, vectors["dense"], vectors.get("sparse"), encoded.hidden_states))
            indices.append(rows)
        means = {name: loss.mean() for name, loss in losses.items()}
        output = CoTMoTEPreTrainingOutput(**_in_order(parts, indices))
        output.loss = output.encoder_loss = means.pop("encoder")
        output.dense_decoder_loss, output.sparse_decoder_loss = means.get("dense"), means.get("sparse")
        if means:
            output.decoder_loss = torch.stack(list(means.values())).sum()
            output.loss = output.encoder_loss + output.decoder_loss
        return output

    def _span(
        self, ids: Tensor | None, mask: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The decoder's inputs, its labels filled in; None without a decoder."""
        if self.config.decoder == "none":
            return None
        if ids is None:
            raise ValueError(f'decoder_input_ids is missing: decoder="{self.config.decoder}" writes a contextual span')
        if labels is None and self.config.decoder == "ar" and mask is not None:
            labels = ids.masked_fill(mask == 0, IGNORED)
        self._check_inputs("decoder_", ids, attention_mask=mask, labels=labels)
        assert mask is not None and labels is not None  # _check_inputs has seen to it
        return ids, mask, labels

    def _decode(self, lm: Any, vector_BD: Tensor, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(P, D) states of the decoder that predict a token of the span, and (P,) those tokens."""
        embeddings_BMD: Tensor = lm.base_model.embeddings(input_ids=ids)
        if self.decoder_positions is not None:
            embeddings_BMD = embeddings_BMD + self.decoder_positions.weight[: ids.shape[1]]
        states_BMD = torch.cat([vector_BD[:, None].to(embeddings_BMD.dtype), embeddings_BMD[:, 1:]], dim=1)
        visible_B1MM = mask[:, None, None, :].bool()
        if self.ae_decoder is not None:
            for layer in self.ae_decoder:
                states_BMD = layer(states_BMD, additive(visible_B1MM, states_BMD))
            return states_BMD[labels != IGNORED], labels[labels != IGNORED]
        assert self.ar_decoder is not None
        visible_B1MM = visible_B1MM & self._causal(ids.shape[1], ids.device)
        states_BMD = self.ar_decoder_dropout(states_BMD)
        for layer in self.ar_decoder:
            states_BMD = layer(states_BMD, attention_mask=additive(visible_B1MM, states_BMD))
        states_BMD, labels = self.ar_decoder_ln_f(states_BMD)[:, :-1], labels[:, 1:]
        return states_BMD[labels != IGNORED], labels[labels != IGNORED]

    def _causal(self, length: int, device: torch.device) -> Tensor:
        """(M, M), whether a position (row) sees another: those up to itself, within the window, and always the first."""
        distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
        window = length if self.config.attention_window is None else self.config.attention_window
        seen = (distance >= 0) & (distance < window)
        seen[:, 0] = True
        return seen

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's: its layers are none of those that the base class knows; what was loaded stays as it is."""
        super()._init_weights(module)
        std = self.config.get_text_config().initializer_range
        if isinstance(module, Conv1D):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.bias)
        elif isinstance(module, GPT2Block):  # after its parts: the projections onto the residual stream start smaller
            for projection in (module.attn.c_proj, module.mlp.c_proj):
                init.normal_(projection.weight, mean=0.0, std=std / (2 * self.config.decoder_layers) ** 0.5)


class _MeanLoss:
    """Cross-entropy over all labels of a batch that is scored in parts."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.labels = 0

    def add(self, total: Tensor, labels: int) -> None:
        self.total = total if self.total is None else self.total + total
        self.labels += labels

    def mean(self) -> Tensor:
        assert self.total is not None
        return self.total / max(self.labels, 1)


def _summed(logits_PV: Tensor, labels_P: Tensor) -> Tensor:
    """0, with a gradient of 0, without labels."""
    logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    return F.cross_entropy(logits_PV, labels_P, reduction="sum")


def cot_mae_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of CoT-MAE's published implementation under the names of `CoTMoTEForPreTraining`.

    Args:
        state: of its first release (`bert.*`, `cls.*`, `c_head.*`) or its second (`lm.*`, `c_head.*`, `d_head.*`,
            `d_head_ln_f.*`).
    """
    renamed = {}
    for name, tensor in state.items():
        part = name.split(".")[0]
        if part in ("c_head", "d_head", "d_head_ln_f"):
            if not name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask, once kept with the weights
                renamed[name.replace("c_head", "ae_decoder", 1).replace("d_head", "ar_decoder", 1)] = tensor
        elif not name.endswith((".position_ids", "target_diag")):
            renamed[name if part == "lm" else f"lm.{name}"] = tensor
    return renamed


def _embedding_matrix(lm: PreTrainedModel) -> Tensor:
    """(V, D)."""
    embeddings: Any = lm.get_input_embeddings()
    weight: Tensor = embeddings.weight
    return weight


def _in_order(parts: list[CoTMoTEOutput], indices: list[Tensor | None]) -> CoTMoTEOutput:
    """One output of those of the routes, the rows as they were in the batch."""
    if indices[0] is None:
        return parts[0]
    order_B = torch.cat([rows for rows in indices if rows is not None]).argsort()

    def joined(name: str) -> Any:
        values = [part[name] for part in parts if name in part]
        if not values:
            return None
        if isinstance(values[0], tuple):
            return tuple(torch.cat(layer)[order_B] for layer in zip(*values, strict=True))
        return torch.cat(values)[order_B]

    return CoTMoTEOutput(
        **{name: joined(name) for name in ("last_hidden_state", "pooler_output", "sparse", "hidden_states")}
    )


CoTMoTEModel.register_for_auto_class("AutoModel")
CoTMoTEForPreTraining.register_for_auto_class("AutoModelForPreTraining")
