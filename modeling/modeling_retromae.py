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
added in both streams; in training, the head is applied to the labelled positions only, which gives the same losses.

Shapes: B passages, L tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_retromae import RetroMAEConfig
from .enhanced_decoder import RetroMAEDecoder
from .linear_cross_entropy import IGNORED, mean_loss, summed_cross_entropy
from .masked_lm import (
    check_encoder,
    check_masked_lm,
    first_position,
    load_masked_lm,
    masked_lm_loss,
    max_tokens,
    position_table,
    score,
)


@dataclass
class RetroMAEOutput(ModelOutput):
    """Output of `RetroMAEForPreTraining.forward`.

    Attributes:
        loss: scalar, sum of the losses below; `bag_of_words_loss` times its weight.
        encoder_loss: scalar, mean cross-entropy of the encoder's masked tokens in nats; 0 without masked tokens.
        decoder_loss: scalar, mean cross-entropy of the decoder's labels in nats; None without a decoder.
        bag_of_words_loss: scalar, mean over the passages; None unless `config.bag_of_words` is set.
        sentence_embedding: (B, D), the encoder's state of the first token.
        encoder_logits: (B, L, V); None without `return_logits`.
        decoder_logits: (B, L, V); None without `return_logits` or without a decoder.
    """

    loss: Tensor | None = None
    encoder_loss: Tensor | None = None
    decoder_loss: Tensor | None = None
    bag_of_words_loss: Tensor | None = None
    sentence_embedding: Tensor | None = None
    encoder_logits: Tensor | None = None
    decoder_logits: Tensor | None = None


class RetroMAEForPreTraining(PreTrainedModel):
    """A masked language model (`.lm`), the body of which (`.encoder`) is published, and a decoder (`.decoder`)."""

    config_class = RetroMAEConfig
    config: RetroMAEConfig
    main_input_name = "encoder_input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_set_attn_implementation = classmethod(lambda cls: True)
    accepts_loss_kwargs = False  # each loss is a mean over the labels of its micro-batch, as in the original

    def __init__(self, config: RetroMAEConfig, lm: PreTrainedModel | None = None) -> None:
        """Build the masked language model from `config`, or use the given one, whose configuration `config` contains.

        Raises:
            ValueError: the decoder cannot share the model's embeddings and head.
        """
        super().__init__(config)
        self.lm: PreTrainedModel = AutoModelForMaskedLM.from_config(config.encoder) if lm is None else lm
        check_masked_lm(self.lm)
        self.decoder: RetroMAEDecoder | None = None
        if config.decoder != "none":
            self.decoder = RetroMAEDecoder(config, own_positions=position_table(self.encoder) is None)
        self.post_init()

    @property
    def encoder(self) -> PreTrainedModel:
        """The encoder alone, a stock model: (B, L) token ids to (B, L, D) states."""
        encoder: Any = self.lm.base_model  # annotated as any module
        return encoder  # type: ignore[no-any-return]

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        return self.lm.get_input_embeddings()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the token embeddings and the head, which the decoder shares."""
        return self.lm.resize_token_embeddings(*args, **kwargs)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a passage, special tokens included."""
        return max_tokens(self.encoder)

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
        lm = load_masked_lm(encoder, fresh_head=True, **load) if isinstance(encoder, str) else encoder
        check_encoder(lm, "RetroMAE")
        model: Any = cls(RetroMAEConfig(encoder=lm.config, **config), lm)
        for parameter in model.parameters():  # the decoder is built in the default dtype
            parameter.data = parameter.data.to(lm.dtype)
        model.config.dtype = lm.dtype
        return model  # type: ignore[no-any-return]

    def forward(
        self,
        encoder_input_ids: Tensor,
        encoder_attention_mask: Tensor,
        encoder_labels: Tensor,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_labels: Tensor | None = None,
        return_logits: bool = True,
    ) -> RetroMAEOutput:
        """Compute the reconstruction losses of a batch. The masks are inputs, so that a batch can be replayed.

        Args:
            encoder_input_ids: (B, L) lightly masked passages, [CLS] first, padding on the right.
            encoder_attention_mask: (B, L), zero on padding.
            encoder_labels: (B, L) original tokens where masked, -100 elsewhere.
            decoder_input_ids: (B, L) original passages for enhanced decoding, masked ones for basic decoding.
            decoder_attention_mask: nonzero where a key is visible. (B, L, L) for enhanced decoding, where row i is what
                position i sees; (B, L) for basic decoding. Key 0 is the sentence vector.
            decoder_labels: (B, L) tokens to predict, -100 elsewhere; with `config.bag_of_words` also the set to predict.
            return_logits: whether to compute the logits of every position. Without them the losses are the same but cheaper,
                because only labelled positions are scored, in blocks.

        Raises:
            ValueError: tensors are missing or have the wrong shape, or there are more tokens than positions.
        """
        decoder_inputs = (decoder_input_ids, decoder_attention_mask, decoder_labels)
        self._check_inputs(encoder_input_ids, (encoder_attention_mask, encoder_labels), decoder_inputs)
        whole_encoder = return_logits or self.config.bag_of_words
        encoded = self.encoder(input_ids=encoder_input_ids, attention_mask=encoder_attention_mask)
        hidden_BLD: Tensor = encoded.last_hidden_state
        states = [_rows(hidden_BLD, encoder_labels, whole_encoder)]  # inputs of the head: encoder, then decoder
        if self.decoder is not None:
            decoded_BLD = self._decode(hidden_BLD[:, 0], decoder_input_ids, decoder_attention_mask)
            states.append(_rows(decoded_BLD, decoder_labels, return_logits))
        output = RetroMAEOutput(sentence_embedding=hidden_BLD[:, 0])
        if not whole_encoder:
            output.loss = output.encoder_loss = self._loss(states[0], encoder_labels)
            if decoder_labels is not None and self.decoder is not None:
                output.decoder_loss = self._loss(states[1], decoder_labels)
                output.loss = output.loss + output.decoder_loss
            return output
        logits_PV = score(self.lm, torch.cat(states))
        encoder_PV, *decoder_PV = logits_PV.split([len(part) for part in states])
        output.loss = output.encoder_loss = _cross_entropy(encoder_PV, encoder_labels, whole_encoder)
        shape = (*encoder_input_ids.shape, logits_PV.shape[-1])
        if decoder_PV:
            output.decoder_loss = _cross_entropy(decoder_PV[0], decoder_labels, return_logits)
            output.loss = output.loss + output.decoder_loss
        if self.config.bag_of_words:
            visible_BL = encoder_attention_mask.bool()
            output.bag_of_words_loss = _bag_of_words_loss(encoder_PV.view(shape), visible_BL, decoder_labels)
            output.loss = output.loss + self.config.bag_of_words_weight * output.bag_of_words_loss
        if return_logits:
            output.encoder_logits = encoder_PV.view(shape)
            output.decoder_logits = decoder_PV[0].view(shape) if decoder_PV else None
        return output

    def _loss(self, states_PD: Tensor, labels_BL: Tensor) -> Tensor:
        """Return the mean loss of the states of the labelled positions."""
        labels_P = labels_BL[labels_BL != IGNORED]
        return masked_lm_loss(self.lm, states_PD, labels_P) / max(len(labels_P), 1)

    def _decode(self, sentence_BD: Tensor, input_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the (B, L, D) states of the decoder."""
        assert self.decoder is not None and input_ids is not None and mask is not None  # see _check_inputs
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

    def _check_inputs(
        self, ids_BL: Tensor, encoder_inputs: tuple[Tensor | None, ...], decoder_inputs: tuple[Tensor | None, ...]
    ) -> None:
        """Check the shapes, which could otherwise cause index errors or be broadcast silently."""
        shape = tuple(ids_BL.shape)
        if len(shape) != 2:
            raise ValueError(f"encoder_input_ids must be (passages, tokens), got {shape}")
        if shape[1] > self.max_length:
            raise ValueError(f"the passages have {shape[1]} tokens, the encoder {self.max_length} positions: cut them")
        tensors = {"encoder_attention_mask": encoder_inputs[0], "encoder_labels": encoder_inputs[1]}
        if self.config.decoder != "none":
            names = ("decoder_input_ids", "decoder_attention_mask", "decoder_labels")
            tensors |= dict(zip(names, decoder_inputs, strict=True))
        for name, tensor in tensors.items():
            per_row = name == "decoder_attention_mask" and self.config.decoder == "enhanced"
            wanted = (*shape, shape[1]) if per_row else shape
            if tensor is None:
                raise ValueError(f"{name} is missing: {self.config.decoder} decoding needs it")
            if tuple(tensor.shape) != wanted:
                raise ValueError(
                    f"{name} must be {wanted} with {self.config.decoder} decoding, got {tuple(tensor.shape)}"
                )


def _rows(states_BLD: Tensor, labels_BL: Tensor | None, whole: bool) -> Tensor:
    """Return (P, D) states: of all positions, or of those with a label."""
    return states_BLD.flatten(0, 1) if whole or labels_BL is None else states_BLD[labels_BL != IGNORED]


def _cross_entropy(logits_PV: Tensor, labels_BL: Tensor | None, whole: bool) -> Tensor:
    """Return the mean over the labels; 0, with a gradient of 0, without labels."""
    assert labels_BL is not None
    labels_P = labels_BL.flatten() if whole else labels_BL[labels_BL != IGNORED]
    return mean_loss(summed_cross_entropy(logits_PV, labels_P), labels_P, (labels_P != IGNORED).sum().clamp(min=1))


def _bag_of_words_loss(logits_BLV: Tensor, visible_BL: Tensor, labels_BL: Tensor | None) -> Tensor:
    """Return DupMAE's second loss: predict the set of a passage's tokens from the maximum of the logits over its tokens.

    [CLS] is left out of the maximum. The target is uniform over the set. The original implementation divides by the number of
    tokens instead of distinct tokens, which gives passages with repetitions a lower weight.
    """
    assert labels_BL is not None
    vocabulary = logits_BLV.shape[-1]
    logits_BLV = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32))
    hidden_BL1 = ~visible_BL[:, 1:, None]
    pooled_BV = logits_BLV[:, 1:].masked_fill(hidden_BL1, torch.finfo(logits_BLV.dtype).min).amax(1)
    # One extra column for positions without a token.
    column_BL = labels_BL.masked_fill(labels_BL == IGNORED, vocabulary)
    set_BV = pooled_BV.new_zeros(len(labels_BL), vocabulary + 1).scatter_(1, column_BL, 1.0)[:, :-1]
    size_B = set_BV.sum(1)
    loss_B = -(set_BV * pooled_BV.log_softmax(-1)).sum(1) / size_B.clamp(min=1.0)
    return loss_B.sum() / (size_B > 0).sum().clamp(min=1)


RetroMAEForPreTraining.register_for_auto_class("AutoModelForPreTraining")
