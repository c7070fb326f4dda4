"""The decoder of RetroMAE (arXiv 2205.12035): enhanced decoding (section 3.3) and basic decoding (section 3.2).

Shapes: B passages, L tokens, D hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bert.modeling_bert import BertAttention, BertIntermediate, BertOutput

from .configuration_retromae import RetroMAEConfig
from .masked_lm import additive, bert_layer_config


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
        """Return the (B, L, D) states that the head scores.

        Args:
            sentence_BD: sentence vector h.
            embeddings_BLD: decoder input embeddings; position 0 is replaced by h.
            positions_LD: position embeddings p.
            mask: (B, L, L) or (B, L), nonzero where a key is visible.
        """
        sentence_B1D = sentence_BD[:, None]
        key_value_BLD = torch.cat([sentence_B1D, embeddings_BLD[:, 1:]], dim=1)
        visible = (mask[:, None] if self.enhanced else mask[:, None, None]).bool()
        bias = additive(visible, key_value_BLD)
        if self.enhanced:
            states: Tensor = self.layers[0](positions_LD + sentence_B1D, key_value_BLD, bias)
            return states
        states = key_value_BLD
        for layer in self.layers:
            states = layer(states, states, bias)
        return states
