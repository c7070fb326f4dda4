r"""RetroMAE (arXiv 2205.12035): an encoder pre-trained so that its [CLS] state represents a whole passage.

The encoder gets a lightly masked passage, X_enc, and predicts the masked tokens, as BERT does. A one-layer decoder then
reconstructs the passage from the encoder's [CLS] state h and a heavily masked input. Equations of section 3:

    L_enc = cross-entropy of the masked tokens of X_enc                                                    (2)
    H_1 = [h + p_0, ..., h + p_N]                      query stream: position embeddings p, no LayerNorm     (4)
    H_2 = [h, e_{x_1} + p_1, ..., e_{x_N} + p_N]       key/value stream: the unmasked embeddings             (4)
    A   = softmax(Q^T K / sqrt(d) + M) V,   Q = W^Q H_1,  K = W^K H_2,  V = W^V H_2                           (5)
    M_ij = 0 where j is in the sample s(X \ x_i) of row i, or j = 0 and i != 0; else -infinity                (6)
    L_dec = cross-entropy of all original tokens given A and H_1                                             (7)
    loss = L_enc + L_dec

Basic decoding (section 3.2, the ablation) applies ordinary layers to [h, embeddings of the masked passage], and L_dec covers
the masked tokens only. Embeddings and output head are shared with the encoder. M is an input, drawn by the collator.

Differences from the original implementation: with a RoBERTa-like encoder, the decoder's positions also start at
`padding_idx + 1`; with an encoder without absolute positions (ModernBERT), the decoder has its own learnt position table,
added in both streams; the head is applied to the labelled positions only, which gives the same losses.

Shapes: B passages, L tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertOutput
from transformers.utils import ModelOutput

from .configuration_retromae import RetroMAEConfig
from .masked_lm import (
    MaskedLMPreTrainedModel,
    attention_bias,
    bert_layer_config,
    first_position,
    masked_lm,
    masked_lm_loss,
    position_table,
)


@dataclass
class RetroMAEOutput(ModelOutput):
    """Output of `RetroMAEForPreTraining.forward`.

    Attributes:
        loss: scalar, sum of the losses below.
        encoder_loss: scalar, mean cross-entropy of the encoder's masked tokens in nats; 0 without masked tokens.
        decoder_loss: scalar, mean cross-entropy of the decoder's labels in nats; None without a decoder.
        sentence_embedding: (B, D), the encoder's state of the first token.
    """

    loss: Tensor | None = None
    encoder_loss: Tensor | None = None
    decoder_loss: Tensor | None = None
    sentence_embedding: Tensor | None = None


class RetroMAEDecoderLayer(GradientCheckpointingLayer):
    """BERT's layer, but keys and values come from another stream than the queries; the residual adds the queries."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config, is_cross_attention=True)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, query_BLD: Tensor, key_value_BLD: Tensor, mask_B1LL: Tensor) -> Tensor:
        """Return (B, L, D); the mask is added to the attention scores."""
        attended, _ = self.attention(query_BLD, encoder_hidden_states=key_value_BLD, encoder_attention_mask=mask_B1LL)
        states: Tensor = self.output(self.intermediate(attended), attended)
        return states


class RetroMAEDecoder(nn.Module):
    """The decoder's layers, and its own position table if the encoder has none."""

    def __init__(self, config: RetroMAEConfig, *, own_positions: bool) -> None:
        super().__init__()
        self.enhanced = config.decoder == "enhanced"
        layer = bert_layer_config(config.get_text_config())
        self.layers = nn.ModuleList([RetroMAEDecoderLayer(layer) for _ in range(config.decoder_layers)])
        self.position_embeddings: nn.Embedding | None = None
        if own_positions:
            positions = config.get_text_config().max_position_embeddings
            self.position_embeddings = nn.Embedding(positions, layer.hidden_size)

    def forward(self, sentence_BD: Tensor, embeddings_BLD: Tensor, positions_LD: Tensor, mask: Tensor) -> Tensor:
        """Return the (B, L, D) states that the head scores, given h, the embeddings, the positions p and the visible keys.

        The mask is (B, L, L) or (B, L); the embedding at position 0 is replaced by h.
        """
        sentence_B1D = sentence_BD[:, None]
        key_value_BLD = torch.cat([sentence_B1D, embeddings_BLD[:, 1:]], dim=1)
        visible = (mask[:, None] if self.enhanced else mask[:, None, None]).bool()
        bias = attention_bias(visible, key_value_BLD)
        states = positions_LD + sentence_B1D if self.enhanced else key_value_BLD
        for layer in self.layers:  # one with enhanced decoding
            states = layer(states, key_value_BLD if self.enhanced else states, bias)
        return states


class RetroMAEForPreTraining(MaskedLMPreTrainedModel):
    """A masked language model (`.lm`), the body of which (`.encoder`) is published, and a decoder (`.decoder`)."""

    config_class = RetroMAEConfig
    config: RetroMAEConfig
    main_input_name = "encoder_input_ids"

    def __init__(self, config: RetroMAEConfig, lm: PreTrainedModel | None = None) -> None:
        """Build the masked language model from `config`, or use the given one, whose configuration `config` contains."""
        super().__init__(config)
        self.lm = AutoModelForMaskedLM.from_config(config.encoder) if lm is None else lm
        self.decoder: RetroMAEDecoder | None = None
        if config.decoder != "none":
            self.decoder = RetroMAEDecoder(config, own_positions=position_table(self.encoder) is None)
        self.post_init()

    @property
    def encoder(self) -> PreTrainedModel:
        """The encoder alone, a stock model: (B, L) token ids to (B, L, D) states."""
        encoder: Any = self.lm.base_model  # annotated as any module
        return encoder  # type: ignore[no-any-return]

    @classmethod
    def from_encoder(
        cls,
        encoder: str | PreTrainedModel,
        *,
        trust_remote_code: bool = False,
        dtype: torch.dtype | str = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> "RetroMAEForPreTraining":
        """Create a model from a pre-trained encoder, with a new decoder.

        Args:
            encoder: Hub id, folder or loaded model (anything `AutoModelForMaskedLM` loads). If the weights of the masked-LM
                head are missing, as in a sentence-transformers model, they are initialised at random, with a warning.
            trust_remote_code: whether to run model code from the encoder's repository.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: of the encoder; None for the default of transformers.
            **config: other fields of `RetroMAEConfig`.

        Raises:
            ValueError: it is not a BERT-like encoder with a masked-LM head, or weights of the encoder are missing.
        """
        load = {"trust_remote_code": trust_remote_code, "dtype": dtype, "attn_implementation": attn_implementation}
        lm = masked_lm(encoder, new_head=True, **load)
        return cls._made_of(RetroMAEConfig(encoder=lm.config, **config), lm)  # type: ignore[no-any-return]

    def forward(
        self,
        encoder_input_ids: Tensor,
        encoder_attention_mask: Tensor,
        encoder_labels: Tensor,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_labels: Tensor | None = None,
    ) -> RetroMAEOutput:
        """Compute the reconstruction losses of a batch. The masks are inputs, so that a batch can be replayed.

        Args:
            encoder_input_ids: (B, L) lightly masked passages, [CLS] first, padding on the right.
            encoder_attention_mask: (B, L), zero on padding.
            encoder_labels: (B, L) original tokens where masked, -100 elsewhere.
            decoder_input_ids: (B, L) original passages for enhanced decoding, masked ones for basic decoding.
            decoder_attention_mask: nonzero where a key is visible. (B, L, L) for enhanced decoding, where row i is what
                position i sees; (B, L) for basic decoding. Key 0 is the sentence vector.
            decoder_labels: (B, L) tokens to predict, -100 elsewhere.
        """
        encoded = self.encoder(input_ids=encoder_input_ids, attention_mask=encoder_attention_mask)
        hidden_BLD: Tensor = encoded.last_hidden_state
        output = RetroMAEOutput(sentence_embedding=hidden_BLD[:, 0])
        output.loss = output.encoder_loss = self._loss(hidden_BLD, encoder_labels)
        if self.decoder is None:
            return output
        if decoder_input_ids is None or decoder_attention_mask is None or decoder_labels is None:
            raise ValueError(f"{self.config.decoder} decoding needs decoder_input_ids, _attention_mask and _labels")
        decoded_BLD = self._decode(hidden_BLD[:, 0], decoder_input_ids, decoder_attention_mask)
        output.decoder_loss = self._loss(decoded_BLD, decoder_labels)
        output.loss = output.loss + output.decoder_loss
        return output

    def _loss(self, states_BLD: Tensor, labels_BL: Tensor) -> Tensor:
        """Return the mean loss of the positions with a label; 0, with a gradient of 0, without labels."""
        total, labels = masked_lm_loss(self.lm, states_BLD, labels_BL)
        return total / max(labels, 1)

    def _decode(self, sentence_BD: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the (B, L, D) states of the decoder, which the head scores."""
        assert self.decoder is not None
        encoder: Any = self.encoder
        embeddings_BLD: Tensor = encoder.embeddings(input_ids=input_ids)
        table = position_table(encoder)
        positions_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        if table is not None:
            positions_LD = table(positions_L + first_position(table))
        else:
            assert self.decoder.position_embeddings is not None
            positions_LD = self.decoder.position_embeddings(positions_L)
            embeddings_BLD = embeddings_BLD + positions_LD
        decoded: Tensor = self.decoder(sentence_BD, embeddings_BLD, positions_LD, mask)
        return decoded


RetroMAEForPreTraining.register_for_auto_class("AutoModelForPreTraining")
