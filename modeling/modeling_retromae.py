r"""RetroMAE (arXiv 2205.12035): an encoder pre-trained so that its [CLS] state holds a whole passage.

The encoder sees a lightly masked passage, X_enc, and predicts what is masked, as BERT does. Its [CLS] state h and a
decoder of one layer then have to reconstruct the passage from what is masked heavily. Equations of section 3:

    L_enc = cross-entropy of the masked tokens of X_enc                                                    (2)
    H_1 = [h + p_0, ..., h + p_N]                      the query stream: position embeddings p, no LayerNorm  (4)
    H_2 = [h, e_{x_1} + p_1, ..., e_{x_N} + p_N]       the key/value stream: the unmasked embeddings          (4)
    A   = softmax(Q^T K / sqrt(d) + M) V,   Q = W^Q H_1,  K = W^K H_2,  V = W^V H_2                           (5)
    M_ij = 0 where j is in the sample s(X \ x_i) of row i, or j = 0 and i != 0; else -infinity                (6)
    L_dec = cross-entropy of all original tokens given A and H_1                                             (7)
    loss = L_enc + L_dec

Basic decoding (section 3.2), for the ablation: ordinary layers over [h, embeddings of the masked passage], and L_dec over
the masked tokens only. Embeddings and output head are the encoder's own. M is an input: the collator draws it.

Not as in the original implementation: a RoBERTa-like encoder counts the decoder's positions as it counts its own, from
`padding_idx + 1`; an encoder without absolute positions (ModernBERT) gets a learnt table of the decoder's own, added in
both streams; in training, the head scores the labelled positions alone, which gives the same losses.

Shapes: B passages, L tokens, D hidden size, V vocabulary.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, PreTrainedModel
from transformers.utils import ModelOutput

from .backbones import check_weights
from .configuration_retromae import RetroMAEConfig
from .enhanced_decoder import RetroMAEDecoder
from .linear_cross_entropy import IGNORED, watch_head
from .masked_lm import check_masked_lm, first_position, max_tokens, position_table, score, summed_cross_entropy


@dataclass
class RetroMAEOutput(ModelOutput):
    """Result of `RetroMAEForPreTraining.forward`.

    Attributes:
        loss: scalar, the sum of those below, the bag of words with its weight.
        encoder_loss: scalar, mean cross-entropy of the encoder's masked tokens in nats; 0 if there is none.
        decoder_loss: scalar, the same of the decoder's labels; None without a decoder.
        bag_of_words_loss: scalar, mean over the passages; None unless the configuration asks for it.
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
    """A masked language model (`.lm`), whose body `.encoder` is what gets published, and the decoder (`.decoder`)."""

    config_class = RetroMAEConfig
    config: RetroMAEConfig
    main_input_name = "encoder_input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_set_attn_implementation = classmethod(lambda cls: True)
    accepts_loss_kwargs = False  # each loss is the mean over its own labels of the batch, as in the original

    def __init__(self, config: RetroMAEConfig, lm: PreTrainedModel | None = None) -> None:
        """Builds the masked language model from `config`, or takes the one given, whose configuration `config` holds.

        Raises:
            ValueError: if it is not of a kind that the decoder can share embeddings and head with.
        """
        super().__init__(config)
        self.lm: PreTrainedModel = AutoModelForMaskedLM.from_config(config.encoder) if lm is None else lm
        check_masked_lm(self.lm)
        watch_head(self.lm.get_output_embeddings())
        self.decoder: RetroMAEDecoder | None = None
        if config.decoder != "none":
            self.decoder = RetroMAEDecoder(config, own_positions=position_table(self.encoder) is None)
        self.post_init()

    @property
    def encoder(self) -> PreTrainedModel:
        """The bare encoder, which needs nothing of this file: (B, L) tokens to (B, L, D) states."""
        body: Any = self.lm.base_model  # annotated as any module
        encoder: PreTrainedModel = body
        return encoder

    @property
    def max_length(self) -> int:
        """The tokens that a passage may have, special ones included."""
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
        """Starts from a pre-trained encoder and a fresh decoder.

        Args:
            encoder: Hub id, folder or loaded model (anything `AutoModelForMaskedLM` loads). Weights without those of
                the masked-LM head, such as a sentence-transformers model's, do: the head starts fresh, with a warning.
            trust_remote_code: for models whose code lies in their repository.
            dtype: of the loaded weights; float32 for training under autocast.
            attn_implementation: of the encoder; None for transformers' choice.
            **config: the other fields of `RetroMAEConfig`.

        Raises:
            ValueError: if it is not a BERT-like encoder with a masked-LM head, or weights of the encoder are missing.
        """
        if isinstance(encoder, str):
            load: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": dtype, "use_safetensors": True}
            if attn_implementation is not None:
                load["attn_implementation"] = attn_implementation
            lm, info = AutoModelForMaskedLM.from_pretrained(encoder, output_loading_info=True, **load)
            if missing := sorted(info["missing_keys"]):
                check_weights(encoder, lm, (key for key in missing if key.startswith(f"{lm.base_model_prefix}.")))
                warnings.warn(f"{encoder} has no weights for {', '.join(missing)}: they start fresh", stacklevel=2)
        else:
            lm = encoder
        model = cls(RetroMAEConfig(encoder=lm.config, **config), lm)
        model.to(lm.dtype)  # the decoder is built in the default one
        model.config.dtype = lm.dtype
        return model

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
        """Both reconstruction losses of a batch; the masks are inputs, so that a batch can be replayed.

        Args:
            encoder_input_ids: (B, L) the lightly masked passages, [CLS] first, padding on the right.
            encoder_attention_mask: (B, L), zero on padding.
            encoder_labels: (B, L), the original tokens where masked, -100 elsewhere.
            decoder_input_ids: (B, L), the original passages for enhanced decoding, masked ones for basic decoding.
            decoder_attention_mask: nonzero where a key is visible; (B, L, L), row i of which is what position i sees,
                for enhanced decoding, (B, L) for basic decoding. Key 0 is the sentence vector.
            decoder_labels: (B, L), the tokens to predict, -100 elsewhere; with `config.bag_of_words` also the set.
            return_logits: whether to score every position; without, the losses are the same and cost less: only labelled
                positions are scored, by blocks of them, so that their logits never exist as a whole.

        Raises:
            ValueError: for tensors that are missing or of the wrong shape, or more tokens than there are positions.
        """
        decoder_inputs = (decoder_input_ids, decoder_attention_mask, decoder_labels)
        self._check_inputs(encoder_input_ids, (encoder_attention_mask, encoder_labels), decoder_inputs)
        whole_encoder = return_logits or self.config.bag_of_words
        encoded = self.encoder(input_ids=encoder_input_ids, attention_mask=encoder_attention_mask)
        hidden_BLD: Tensor = encoded.last_hidden_state
        states = [_rows(hidden_BLD, encoder_labels, whole_encoder)]  # what the head scores, of encoder and decoder
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
        """`_cross_entropy` of the states of the labelled positions."""
        labels_P = labels_BL[labels_BL != IGNORED]
        return summed_cross_entropy(self.lm, states_PD, labels_P) / max(len(labels_P), 1)

    def _decode(self, sentence_BD: Tensor, input_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """(B, L, D) states of the decoder."""
        assert self.decoder is not None and input_ids is not None and mask is not None  # _check_inputs has seen to it
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
        """Says what is wrong with the shapes before an index error or a silent broadcast does."""
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
    """(P, D): all positions, or those with a label."""
    return states_BLD.flatten(0, 1) if whole or labels_BL is None else states_BLD[labels_BL != IGNORED]


def _cross_entropy(logits_PV: Tensor, labels_BL: Tensor | None, whole: bool) -> Tensor:
    """Mean over the labels, at least float32; 0, with a gradient of 0, if there are none."""
    assert labels_BL is not None
    labelled_BL = labels_BL != IGNORED
    if whole:
        logits_PV = logits_PV[labelled_BL.flatten()]
    logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    total = F.cross_entropy(logits_PV, labels_BL[labelled_BL], reduction="sum")
    return total / labelled_BL.sum().clamp(min=1)


def _bag_of_words_loss(logits_BLV: Tensor, visible_BL: Tensor, labels_BL: Tensor | None) -> Tensor:
    """DupMAE's second loss: the set of a passage's tokens from the maximum of the logits over all tokens but [CLS].

    The target is uniform over the set. The original implementation divides by the number of tokens instead of distinct
    ones, which weighs passages with repetitions less.
    """
    assert labels_BL is not None
    vocabulary = logits_BLV.shape[-1]
    logits_BLV = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32))
    hidden_BL1 = ~visible_BL[:, 1:, None]
    pooled_BV = logits_BLV[:, 1:].masked_fill(hidden_BL1, torch.finfo(logits_BLV.dtype).min).amax(1)
    # One column more, for the positions without a token.
    column_BL = labels_BL.masked_fill(labels_BL == IGNORED, vocabulary)
    set_BV = pooled_BV.new_zeros(len(labels_BL), vocabulary + 1).scatter_(1, column_BL, 1.0)[:, :-1]
    size_B = set_BV.sum(1)
    loss_B = -(set_BV * pooled_BV.log_softmax(-1)).sum(1) / size_B.clamp(min=1.0)
    return loss_B.sum() / (size_B > 0).sum().clamp(min=1)


RetroMAEForPreTraining.register_for_auto_class("AutoModelForPreTraining")
