r"""CoT-MoTE (arXiv 2304.10195): one encoder with a query and a passage expert, which computes dense and sparse vectors.

Every layer has one self-attention for all texts and two feed-forwards, each followed by its own layer norm and initialised from
the backbone's. A text t passes through the feed-forwards of its kind:

    a = LayerNorm(x + SelfAttention(x)),   x' = LayerNorm_kind(a + FeedForward_kind(a))
    dense(t)  = last hidden state of [CLS]
    sparse(t) = max over the tokens 1..N of log(1 + relu(head(state)))   (equation 4; without [CLS], [SEP] and padding)
    score(q, p) = dense(q) . dense(p) + sparse(q) . sparse(p)

Pre-training combines masked language modelling of the text with a one-layer decoder that generates a contextual span of the
text (a neighbouring span, or a query for it). The text's vector h replaces the embedding of the span's [CLS]:

    loss = L_mlm(t) + sum over the bottlenecks h of L_dec(span | h),   h = dense(t) or sparse(t) E, E the word embeddings

L_dec is the cross-entropy of all next tokens ("ar"), or of the masked tokens ("ae", CoT-MAE, arXiv 2208.07670). The decoder
shares embeddings and head with the encoder of the text.

`.lm` encodes passages and `.query_lm` queries: two masked language models of transformers that share all modules but the
experts. `variant="separate"` shares nothing, `"siamese"` has no `.query_lm`.

Shapes: B texts, L tokens, M tokens of a span, D hidden size, V vocabulary, P labelled positions.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedModel
from transformers import initialization as init
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

from .configuration_cot_mote import CoTMoTEConfig
from .expert_encoders import CoTMoTEPreTrainedModel
from .linear_cross_entropy import IGNORED, summed_cross_entropy
from .masked_lm import attention_bias, bert_layer_config, masked_lm_loss, position_table, score


@dataclass
class CoTMoTEOutput(ModelOutput):
    """Output of `CoTMoTEModel.forward`.

    Attributes:
        last_hidden_state: (B, L, D).
        pooler_output: (B, D) dense vectors: the states of the first token.
        sparse: (B, V) sparse vectors, not negative; None with `return_sparse=False`.
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    sparse: Tensor | None = None


@dataclass
class CoTMoTEPreTrainingOutput(CoTMoTEOutput):
    """Output of `CoTMoTEForPreTraining.forward`; `sparse` is None without that bottleneck.

    Attributes:
        loss: scalar, `encoder_loss + decoder_loss`.
        encoder_loss: scalar, mean cross-entropy of the masked tokens in nats; 0 without masked tokens.
        decoder_loss: scalar, sum of the next two; None without a decoder.
        dense_decoder_loss: scalar, loss of the span given the dense vector; None without that bottleneck.
        sparse_decoder_loss: scalar, loss of the span given the sparse vector; None without that bottleneck.
    """

    loss: Tensor | None = None
    encoder_loss: Tensor | None = None
    decoder_loss: Tensor | None = None
    dense_decoder_loss: Tensor | None = None
    sparse_decoder_loss: Tensor | None = None


class CoTMoTEModel(CoTMoTEPreTrainedModel):
    """Encoder that computes dense and sparse vectors of queries and passages."""

    def __init__(
        self, config: CoTMoTEConfig, lm: PreTrainedModel | None = None, query_lm: PreTrainedModel | None = None
    ) -> None:
        super().__init__(config, lm, query_lm)
        # Also when it is loaded from a checkpoint of pre-training.
        config.decoder, config.attention_window = "none", None
        config.auto_map = {"AutoModel": "modeling_cot_mote.CoTMoTEModel"}
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        expert: str | Sequence[str] | Tensor | None = None,
        return_sparse: bool = True,
        token_type_ids: Tensor | None = None,
    ) -> CoTMoTEOutput:
        """Compute the vectors of a batch.

        Args:
            input_ids: (B, L), [CLS] first, padding on the right.
            attention_mask: (B, L), zero on padding.
            expert: `"query"` or `"passage"`. For a mixed batch one per row, as names or as a (B,) tensor with 0 for a query
                and 1 for a passage. A siamese model needs none.
            return_sparse: whether to compute sparse vectors, which costs about as much as a few layers.
            token_type_ids: ignored; some tokenizers return them, and they are all 0 for single texts.

        Raises:
            ValueError: an expert is missing for the batch or for a row.
        """
        parts, indices = [], []
        for lm, rows in self._routes(expert, len(input_ids)):
            ids, mask = (t if rows is None else t[rows] for t in (input_ids, attention_mask))
            states_BLD: Tensor = lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            sparse_BV = None
            if return_sparse:
                logits_BLV = score(lm, states_BLD.flatten(0, 1)).unflatten(0, states_BLD.shape[:2])
                sparse_BV = self._sparse(logits_BLV, ids, mask)
            parts.append(CoTMoTEOutput(states_BLD, states_BLD[:, 0], sparse_BV))
            indices.append(rows)
        return _in_order(parts, indices)


class CoTMoTEForPreTraining(CoTMoTEPreTrainedModel):
    """Encoder (`.encoder`, which is published) with a decoder (`.ar_decoder` or `.ae_decoder`) for pre-training."""

    _trains_head = True

    def __init__(
        self, config: CoTMoTEConfig, lm: PreTrainedModel | None = None, query_lm: PreTrainedModel | None = None
    ) -> None:
        super().__init__(config, lm, query_lm)
        layer = bert_layer_config(self.lm.config)
        self.ae_decoder: nn.ModuleList | None = None
        self.ar_decoder: nn.ModuleList | None = None
        if config.decoder == "ae":
            self.ae_decoder = nn.ModuleList([BertLayer(layer) for _ in range(config.decoder_layers)])
        elif config.decoder == "ar":
            settings: dict[str, Any] = {"attn_implementation": "sdpa"}  # as in the layers of the other decoder
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
            self.decoder_positions = nn.Embedding(self.max_length, layer.hidden_size)
        self.post_init()

    @property
    def encoder(self) -> CoTMoTEModel:
        """The part that is published: the same weights without the decoder."""
        model = CoTMoTEModel(copy.deepcopy(self.config), self.lm, self.query_lm)
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
    ) -> CoTMoTEPreTrainingOutput:
        """Compute the losses of a batch. Masks and spans are inputs, so that a batch can be replayed.

        Args:
            input_ids: (B, L) masked texts, [CLS] first, padding on the right.
            attention_mask: (B, L), zero on padding.
            labels: (B, L) original tokens where masked, -100 elsewhere.
            decoder_input_ids: (B, M) contextual spans with [CLS] (replaced by the vector) and [SEP]: original tokens for
                "ar", masked tokens for "ae".
            decoder_attention_mask: (B, M), zero on padding.
            decoder_labels: (B, M) original token at each position to predict, -100 elsewhere; "ar" predicts it from the
                position before. By default, "ar" predicts all tokens of the span but the first.
            expert: `"query"` or `"passage"`, or one per row, as in `CoTMoTEModel.forward`.

        Raises:
            ValueError: an expert is missing for the batch or for a row.
        """
        bottlenecks: tuple[str, ...] = ()
        tensors = [input_ids, attention_mask, labels]
        if self.config.decoder != "none":
            if decoder_input_ids is None or decoder_attention_mask is None:
                raise ValueError(f'decoder="{self.config.decoder}" needs decoder_input_ids and decoder_attention_mask')
            if decoder_labels is None:
                if self.config.decoder == "ae":
                    raise ValueError('decoder="ae" needs decoder_labels')
                decoder_labels = decoder_input_ids.masked_fill(decoder_attention_mask == 0, IGNORED)
            bottlenecks = tuple(self.config.bottlenecks)
            tensors += [decoder_input_ids, decoder_attention_mask, decoder_labels]
        parts: list[CoTMoTEOutput] = []
        indices: list[Tensor | None] = []
        losses: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in ("encoder", *bottlenecks)}
        for lm, rows in self._routes(expert, len(input_ids)):
            ids, mask, own_labels, *span = tensors if rows is None else [tensor[rows] for tensor in tensors]
            states_BLD: Tensor = lm.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            vectors = {"dense": states_BLD[:, 0]}
            if "sparse" in bottlenecks:  # needs the logits of all positions
                logits_BLV = score(lm, states_BLD.flatten(0, 1)).unflatten(0, ids.shape)
                vectors["sparse"] = self._sparse(logits_BLV, ids, mask)
                labelled_BL = own_labels != IGNORED
                targets_P = own_labels[labelled_BL]
                loss = summed_cross_entropy(logits_BLV[labelled_BL], targets_P), len(targets_P)
            else:
                loss = masked_lm_loss(lm, states_BLD, own_labels)
            losses["encoder"].append(loss)
            for bottleneck in bottlenecks:  # in a fixed order, because each pass of the decoder draws its own dropout
                vector_BD = vectors[bottleneck]
                if bottleneck == "sparse":
                    embeddings: Any = lm.get_input_embeddings()
                    vector_BD = vector_BD @ embeddings.weight
                losses[bottleneck].append(masked_lm_loss(lm, *self._decode(lm, vector_BD, *span)))
            parts.append(CoTMoTEOutput(states_BLD, vectors["dense"], vectors.get("sparse")))
            indices.append(rows)
        means = {name: _mean(routes) for name, routes in losses.items()}
        output = CoTMoTEPreTrainingOutput(**_in_order(parts, indices))
        output.loss = output.encoder_loss = means.pop("encoder")
        output.dense_decoder_loss, output.sparse_decoder_loss = means.get("dense"), means.get("sparse")
        if means:
            output.decoder_loss = torch.stack(list(means.values())).sum()
            output.loss = output.encoder_loss + output.decoder_loss
        return output

    def _decode(self, lm: Any, vector_BD: Tensor, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B, M', D) decoder states that predict a token of the span, and the (B, M') tokens, -100 elsewhere."""
        embeddings_BMD: Tensor = lm.base_model.embeddings(input_ids=ids)
        if self.decoder_positions is not None:
            embeddings_BMD = embeddings_BMD + self.decoder_positions.weight[: ids.shape[1]]
        states_BMD = torch.cat([vector_BD[:, None].to(embeddings_BMD.dtype), embeddings_BMD[:, 1:]], dim=1)
        visible_B1MM = mask[:, None, None, :].bool()
        if self.ae_decoder is not None:
            for layer in self.ae_decoder:
                states_BMD = layer(states_BMD, attention_bias(visible_B1MM, states_BMD))
            return states_BMD, labels
        assert self.ar_decoder is not None
        # Within the window, and the first position, which holds the vector.
        distance_MM = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        seen_MM = (distance_MM >= 0) & (distance_MM < (self.config.attention_window or ids.shape[1]))
        seen_MM[:, 0] = True
        visible_B1MM = visible_B1MM & seen_MM.to(ids.device)
        states_BMD = self.ar_decoder_dropout(states_BMD)
        for layer in self.ar_decoder:
            states_BMD = layer(states_BMD, attention_mask=attention_bias(visible_B1MM, states_BMD))
        return self.ar_decoder_ln_f(states_BMD)[:, :-1], labels[:, 1:]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise weights as GPT-2 does, whose layers the base class does not know; loaded weights are kept."""
        super()._init_weights(module)
        std = self.config.get_text_config().initializer_range
        if isinstance(module, Conv1D):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.bias)
        elif isinstance(module, GPT2Block):  # after its parts: projections onto the residual stream get a smaller scale
            for projection in (module.attn.c_proj, module.mlp.c_proj):
                init.normal_(projection.weight, mean=0.0, std=std / (2 * self.config.decoder_layers) ** 0.5)


def _mean(routes: list[tuple[Tensor, int]]) -> Tensor:
    """Return the mean over all labels, given the summed loss and the number of labels of each route."""
    return torch.stack([total for total, _ in routes]).sum() / max(sum(labels for _, labels in routes), 1)


def _in_order(parts: list[CoTMoTEOutput], indices: list[Tensor | None]) -> CoTMoTEOutput:
    """Merge the outputs of the routes into one, with rows in the order of the batch."""
    if indices[0] is None:
        return parts[0]
    order_B = torch.cat([rows for rows in indices if rows is not None]).argsort()
    names = [name for name in ("last_hidden_state", "pooler_output", "sparse") if name in parts[0]]
    return CoTMoTEOutput(**{name: torch.cat([part[name] for part in parts])[order_B] for name in names})


CoTMoTEModel.register_for_auto_class("AutoModel")
CoTMoTEForPreTraining.register_for_auto_class("AutoModelForPreTraining")
