"""Pre-trains an encoder with a query and a passage expert (CoT-MoTE, arXiv 2304.10195)."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining
from revela_hub.trainers.common.epochs import NewEpoch
from revela_hub.trainers.common.trainer import MethodTrainer
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.arguments import CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.collator import CoTMoTECollator

LOSSES = ("encoder_loss", "dense_decoder_loss", "sparse_decoder_loss")


class CoTMoTETrainer(MethodTrainer):
    """Trainer of `CoTMoTEForPreTraining`.

    Args:
        model: the encoder with its decoder.
        args: the run; `args.seed` also draws the masks, other ones in every epoch.
        tokenizer: of the encoder; saved with every checkpoint.
        encoder_mask_ratio: share of a text's tokens that has to be predicted.
        decoder_mask_ratio: the same of a span, with an "ae" decoder.
        switch_experts: queries through the passage expert and passages through the query expert, for the ablation.
        **kwargs: of `Trainer`: `train_dataset` (rows of `build_contexts`), `callbacks`, ...

    Raises:
        UserError: if the tokenizer or the ratios do not suit the collator.
    """

    method = COT_MOTE

    _tag_names = ("cot-mote",)

    def __init__(
        self,
        model: CoTMoTEForPreTraining,
        args: CoTMoTETrainingArguments,
        *,
        tokenizer: PreTrainedTokenizerBase,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.45,
        switch_experts: bool = False,
        **kwargs: Any,
    ) -> None:
        self.collator = CoTMoTECollator(
            tokenizer,
            encoder_mask_ratio=encoder_mask_ratio,
            decoder_mask_ratio=decoder_mask_ratio,
            decoder=model.config.decoder,
            switch_experts=switch_experts,
            max_length=model.max_length,
            seed=args.seed,
            pad_to_multiple_of=8,
        )
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True  # a batch may have texts of one expert alone
        super().__init__(model=model, args=args, data_collator=self.collator, processing_class=tokenizer, **kwargs)
        self.add_callback(NewEpoch(self.collator))

    def model_names(self) -> str:
        """The encoder's."""
        return f"CoT-MoTE on {self.trained_config().encoder._name_or_path or 'an encoder'}"

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # noqa: ANN401 (as in Trainer: a loss, or a loss with the outputs)
        """The sum of the losses; keeps each for the next log."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            for name in LOSSES:
                if outputs.get(name) is not None:
                    self.keep(name, outputs[name].mean())
        return (loss, outputs) if return_outputs else loss
