"""Trainer that pre-trains an encoder as a masked auto-encoder (RetroMAE, arXiv 2205.12035)."""

from typing import Any

from sentence_transformers import SentenceTransformer
from torch import Tensor

from revela_hub.data.text.spans import build_spans
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.base.encoder_in_training import encoder_in_training
from revela_hub.trainers.base.masked import MaskedTrainer
from revela_hub.trainers.retromae import RETROMAE
from revela_hub.trainers.retromae.checkpoint import RetroMAECheckpoint, encoder_settings, load_retromae_encoder
from revela_hub.trainers.retromae.data import RetroMAECollator, RetroMAETrainingArguments


class RetroMAETrainer(MaskedTrainer):
    """Trainer of `RetroMAEForPreTraining`.

        trainer = RetroMAETrainer("google-bert/bert-base-uncased", train_dataset=texts)
        trainer.train()
        vectors = trainer.retriever.encode_document(["a passage"])
        trainer.write_models("outputs")  # for SentenceTransformer("outputs/encoder")

    Args:
        model: encoder as Hub id or folder, as a loaded model with masked-LM head, or as a `RetroMAEForPreTraining`.
        args: training arguments; `args.seed` also seeds the masks, which differ between epochs. By default the paper's, with
            an output folder named after the encoder.
        processing_class: tokenizer of the encoder, by default its own; saved with every checkpoint.
        max_length: maximum tokens of a span made from raw text, special tokens included; by default 512, or the number of
            the encoder's positions if that is lower.
        encoder_mask_ratio: fraction of tokens masked for the encoder; by default 0.3.
        decoder_mask_ratio: fraction of tokens hidden from each position of the decoder; by default 0.5.
        model_init_kwargs: arguments of `load_retromae_encoder`: `decoder`, `decoder_layers`, `attn_implementation`, ...
        **kwargs: arguments of `Trainer`: `train_dataset` (raw text in a column `text`, or rows of `build_spans`),
            `callbacks`, ...

    Raises:
        UserError: the model cannot be loaded, the tokenizer or a ratio is not suitable, or the data set has the wrong columns.
    """

    method = RETROMAE
    models = RetroMAEForPreTraining
    load = staticmethod(load_retromae_encoder)
    checkpoint = RetroMAECheckpoint
    arguments = RetroMAETrainingArguments
    build = staticmethod(build_spans)
    collators = RetroMAECollator
    losses = ("encoder_loss", "decoder_loss")

    @property
    def retriever(self) -> SentenceTransformer:
        """Return the current encoder, which embeds texts with the state of the first token, as the published one does."""
        model: Any = self.accelerator.unwrap_model(self.model)

        def embed(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            hidden: Tensor = model.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return hidden[:, 0]

        tokenizer: Any = self.processing_class
        settings = encoder_settings(model)
        return encoder_in_training(
            model, embed, tokenizer, settings.prompts, settings.max_length, settings.similarity_fn_name
        )
