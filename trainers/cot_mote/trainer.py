"""Pre-trains an encoder with a query and a passage expert (CoT-MoTE, arXiv 2304.10195)."""

from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, set_seed

from revela_hub.data.sources.source import Source
from revela_hub.data.text.contexts import build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining
from revela_hub.trainers.common.epochs import NewEpoch
from revela_hub.trainers.common.inputs import ModelLike, default_arguments, prepared_rows, tokenizer_of
from revela_hub.trainers.common.trainer import MethodTrainer
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.arguments import CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_start
from revela_hub.trainers.cot_mote.collator import CoTMoTECollator
from revela_hub.trainers.cot_mote.hybrid import hybrid_encoder

CONTEXT = ("row", "expert", "input_ids", "word_starts", "context_ids", "context_word_starts")
LOSSES = ("encoder_loss", "dense_decoder_loss", "sparse_decoder_loss")


class CoTMoTETrainer(MethodTrainer):
    """Trainer of `CoTMoTEForPreTraining`.

        trainer = CoTMoTETrainer("google-bert/bert-base-uncased", train_dataset=texts)
        trainer.train()
        vectors = trainer.retriever.encode_document(["a passage"])  # dense and sparse
        trainer.write_models(Path("outputs"))  # for SentenceTransformer("outputs/dense"), SparseEncoder("outputs/sparse")

    Args:
        model: the encoder: its Hub id or folder, a loaded one with its masked-LM head, or a `CoTMoTEForPreTraining`.
        args: the run; `args.seed` also draws the masks, other ones in every epoch. By default the paper's, into a folder
            named after the encoder.
        tokenizer: of the encoder, by default its own; saved with every checkpoint. Also under the name `processing_class`.
        max_length: tokens of a text that is made of raw text, with the special ones; by default 144, or the encoder's
            positions if it has fewer.
        encoder_mask_ratio: share of a text's tokens that has to be predicted.
        decoder_mask_ratio: the same of a span, with an "ae" decoder.
        switch_experts: queries through the passage expert and passages through the query expert, for the ablation.
        model_init_kwargs: of `load_cot_mote_start`: `variant`, `decoder`, `fresh_head`, ...
        **kwargs: of `Trainer`: `train_dataset` (raw text in a column text, whose pseudo-queries are extracted, or rows of
            `build_contexts`), `callbacks`, ...

    Raises:
        UserError: if the model cannot be loaded, the tokenizer or the ratios do not suit the collator, or the data set has
            other columns.
    """

    method = COT_MOTE

    _tag_names = ("cot-mote",)

    def __init__(
        self,
        model: ModelLike | CoTMoTEForPreTraining,
        args: CoTMoTETrainingArguments | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.45,
        switch_experts: bool = False,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(CoTMoTETrainingArguments, model, self.method)
        tokenizer = kwargs.pop("processing_class", tokenizer)
        if not isinstance(model, CoTMoTEForPreTraining):
            set_seed(args.seed)  # as the Trainer does, but before the decoder is drawn
            start = load_cot_mote_start(model, pre_training=True, tokenizer=tokenizer, **(model_init_kwargs or {}))
            assert isinstance(start.model, CoTMoTEForPreTraining)
            model, tokenizer = start.model, start.tokenizer
        tokenizer = tokenizer_of(model, tokenizer)
        config = model.config
        length = min(max_length or config.max_seq_length, model.max_length)

        def contexts(source: Source) -> Dataset:
            config.max_seq_length = length  # what is published reads as much as it was trained with
            return build_contexts(source, tokenizer, queries=ExtractiveQueries(), max_length=length)

        kwargs["train_dataset"] = prepared_rows(kwargs.get("train_dataset"), CONTEXT, args, contexts)
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

    def retrieval_encoder(self) -> SentenceTransformer:
        """The encoder as it stands, dense and sparse vector in one."""
        model: Any = self.accelerator.unwrap_model(self.model)
        tokenizer: Any = self.processing_class
        return hybrid_encoder(model.encoder, tokenizer, max_length=min(model.config.max_seq_length, model.max_length))

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
