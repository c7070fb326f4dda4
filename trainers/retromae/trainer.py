"""Pre-trains an encoder as a masked auto-encoder (RetroMAE, arXiv 2205.12035)."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.common.epochs import NewEpoch
from revela_hub.trainers.common.measuring import EncoderInTraining
from revela_hub.trainers.common.trainer import MethodTrainer
from revela_hub.trainers.retromae import RETROMAE
from revela_hub.trainers.retromae.arguments import RetroMAETrainingArguments
from revela_hub.trainers.retromae.collator import RetroMAECollator

LOSSES = ("encoder_loss", "decoder_loss", "bag_of_words_loss")


class RetroMAETrainer(MethodTrainer):
    """Trainer of `RetroMAEForPreTraining`.

    Args:
        model: the encoder with its decoder.
        args: the run; `args.seed` also draws the masks, other ones in every epoch.
        tokenizer: of the encoder; saved with every checkpoint.
        encoder_mask_ratio: share of the words that the encoder does not see.
        decoder_mask_ratio: share of the tokens that each position of the decoder does not see.
        **kwargs: of `Trainer`: `train_dataset` (columns span, input_ids, word_starts), `callbacks`, ...

    Raises:
        UserError: if the tokenizer or the ratios do not suit the collator.
    """

    method = RETROMAE

    _tag_names = ("retromae",)

    def __init__(
        self,
        model: RetroMAEForPreTraining,
        args: RetroMAETrainingArguments,
        *,
        tokenizer: PreTrainedTokenizerBase,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.5,
        **kwargs: Any,
    ) -> None:
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
