"""Pre-trains an encoder as a masked auto-encoder (RetroMAE, arXiv 2205.12035)."""

from typing import Any

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, set_seed

from revela_hub.data.sources.source import Source
from revela_hub.data.text.spans import build_spans
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.common.encoder_in_training import EncoderInTraining
from revela_hub.trainers.common.epochs import NewEpoch
from revela_hub.trainers.common.inputs import ModelLike, default_arguments, prepared_rows, tokenizer_of
from revela_hub.trainers.common.trainer import MethodTrainer
from revela_hub.trainers.retromae import RETROMAE
from revela_hub.trainers.retromae.arguments import RetroMAETrainingArguments
from revela_hub.trainers.retromae.checkpoint import load_retromae_encoder
from revela_hub.trainers.retromae.collator import RetroMAECollator

SPAN = ("span", "input_ids", "word_starts")
LOSSES = ("encoder_loss", "decoder_loss", "bag_of_words_loss")


class RetroMAETrainer(MethodTrainer):
    """Trainer of `RetroMAEForPreTraining`.

        trainer = RetroMAETrainer("google-bert/bert-base-uncased", train_dataset=texts)
        trainer.train()
        vectors = trainer.retriever.encode_document(["a passage"])
        trainer.write_models(Path("outputs"))  # for SentenceTransformer("outputs/encoder")

    Args:
        model: the encoder: its Hub id or folder, a loaded one with its masked-LM head, or a `RetroMAEForPreTraining`.
        args: the run; `args.seed` also draws the masks, other ones in every epoch. By default the paper's, into a folder
            named after the encoder.
        tokenizer: of the encoder, by default its own; saved with every checkpoint. Also under the name `processing_class`.
        max_length: tokens of a span that is made of raw text, with the special ones; by default 512, or the encoder's
            positions if it has fewer.
        encoder_mask_ratio: share of the words that the encoder does not see.
        decoder_mask_ratio: share of the tokens that each position of the decoder does not see.
        model_init_kwargs: of `load_retromae_encoder`: `decoder`, `bag_of_words`, `attn_implementation`, ...
        **kwargs: of `Trainer`: `train_dataset` (raw text in a column text, or rows of `build_spans`), `callbacks`, ...

    Raises:
        UserError: if the model cannot be loaded, the tokenizer or the ratios do not suit the collator, or the data set has
            other columns.
    """

    method = RETROMAE

    _tag_names = ("retromae",)

    def __init__(
        self,
        model: ModelLike | RetroMAEForPreTraining,
        args: RetroMAETrainingArguments | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.5,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(RetroMAETrainingArguments, model, self.method)
        tokenizer = kwargs.pop("processing_class", tokenizer)
        if not isinstance(model, RetroMAEForPreTraining):
            set_seed(args.seed)  # as the Trainer does, but before the decoder is drawn
            loaded = load_retromae_encoder(model, tokenizer=tokenizer, **(model_init_kwargs or {}))
            model, tokenizer = loaded.model, loaded.tokenizer
        tokenizer = tokenizer_of(model, tokenizer)
        config = model.config
        length = min(max_length or config.max_seq_length, model.max_length)

        def spans(source: Source) -> Dataset:
            config.max_seq_length = length  # what is published reads as much as it was trained with
            return build_spans(source, tokenizer, max_length=length)

        kwargs["train_dataset"] = prepared_rows(kwargs.get("train_dataset"), SPAN, args, spans)
        self.collator = RetroMAECollator(
            tokenizer,
            encoder_mask_ratio=encoder_mask_ratio,
            decoder_mask_ratio=decoder_mask_ratio,
            decoder=model.config.decoder,
            max_length=model.max_length,
            seed=args.seed,
            pad_to_multiple_of=8,
        )
        super().__init__(model=model, args=args, data_collator=self.collator, processing_class=tokenizer, **kwargs)
        self.add_callback(NewEpoch(self.collator))

    def retrieval_encoder(self) -> EncoderInTraining:
        """The encoder as it stands: the first token's state, as it is published."""
        model: Any = self.accelerator.unwrap_model(self.model)

        def embed(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            hidden: Tensor = model.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return hidden[:, 0]

        tokenizer: Any = self.processing_class
        longest = model.config.max_seq_length or model.max_length
        return EncoderInTraining(model, embed, tokenizer, {}, longest)

    def model_names(self) -> str:
        """The encoder's."""
        return str(self.trained_config().encoder._name_or_path or "an encoder")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # noqa: ANN401 (as in Trainer: a loss, or a loss with the outputs)
        """The sum of the losses, scored where there are labels; keeps each for the next log."""
        arguments: dict[str, Any] = {**inputs, "return_logits": False}
        loss, outputs = super().compute_loss(model, arguments, True, num_items_in_batch)
        if model.training:
            for name in LOSSES:
                if outputs.get(name) is not None:
                    self.keep(name, outputs[name].mean())
        return (loss, outputs) if return_outputs else loss
