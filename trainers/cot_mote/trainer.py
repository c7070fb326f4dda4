"""Trainer that pre-trains an encoder with a query and a passage expert (CoT-MoTE, arXiv 2304.10195)."""

from functools import partial
from typing import Any

from sentence_transformers import SentenceTransformer
from transformers import PreTrainedTokenizerBase, set_seed

from revela_hub.data.text.contexts import build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.errors import UserError
from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining
from revela_hub.trainers.base.inputs import ModelLike, default_arguments, tokenizer_of
from revela_hub.trainers.base.masked import MaskedTrainer
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.arguments import CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.checkpoint import CoTMoTECheckpoint, load_cot_mote_start
from revela_hub.trainers.cot_mote.collator import CoTMoTECollator
from revela_hub.trainers.cot_mote.hybrid import hybrid_encoder


class CoTMoTETrainer(MaskedTrainer):
    """Trainer of `CoTMoTEForPreTraining`.

        trainer = CoTMoTETrainer("google-bert/bert-base-uncased", train_dataset=texts)
        trainer.train()
        vectors = trainer.retriever.encode_document(["a passage"])  # dense and sparse
        trainer.write_models("outputs")  # for SentenceTransformer("outputs/dense"), SparseEncoder("outputs/sparse")

    Args:
        model: encoder as Hub id or folder, as a loaded model with masked-LM head, or as a `CoTMoTEForPreTraining`.
        args: training arguments; `args.seed` also seeds the masks, which differ between epochs. By default the paper's, with
            an output folder named after the encoder.
        processing_class: tokenizer of the encoder, by default its own; saved with every checkpoint.
        max_length: maximum tokens of a text made from raw text, special tokens included; by default 144, or the number of
            the encoder's positions if that is lower.
        encoder_mask_ratio: fraction of a text's tokens to predict.
        decoder_mask_ratio: fraction of a span's tokens to predict, with an "ae" decoder.
        switch_experts: ablation that encodes queries with the passage expert and passages with the query expert.
        model_init_kwargs: arguments of `load_cot_mote_start`: `variant`, `decoder`, `fresh_head`, ...
        **kwargs: arguments of `Trainer`: `train_dataset` (raw text in a column `text`, from which pseudo-queries are
            extracted, or rows of `build_contexts`), `callbacks`, ...

    Raises:
        UserError: the model cannot be loaded, the tokenizer or a ratio is not suitable, or the data set has the wrong columns.
    """

    method = COT_MOTE
    checkpoint = CoTMoTECheckpoint
    collators = CoTMoTECollator

    losses = ("encoder_loss", "dense_decoder_loss", "sparse_decoder_loss")

    def __init__(
        self,
        model: ModelLike | CoTMoTEForPreTraining,
        args: CoTMoTETrainingArguments | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.45,
        switch_experts: bool = False,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("compute_metrics") is not None:  # evaluations keep no predictions, as in sentence-transformers
            raise UserError(
                "CoTMoTETrainer does not support compute_metrics: pass retrieval_task=RetrievalTask(...) instead"
            )
        args = args or default_arguments(CoTMoTETrainingArguments, model, self.method)
        if not isinstance(model, CoTMoTEForPreTraining):
            set_seed(args.seed)  # as the Trainer does, but before the decoder is initialised
            own = {"tokenizer": processing_class} | (model_init_kwargs or {})
            start = load_cot_mote_start(model, pre_training=True, **own)
            assert isinstance(start.model, CoTMoTEForPreTraining)
            model, processing_class = start.model, start.tokenizer
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True  # a batch may contain texts of one expert only
        tokenizer = tokenizer_of(model, processing_class)
        build = partial(build_contexts, queries=ExtractiveQueries())
        collating = {"encoder_mask_ratio": encoder_mask_ratio, "decoder_mask_ratio": decoder_mask_ratio}
        collating["switch_experts"] = switch_experts
        super().__init__(model, args, tokenizer, build, max_length=max_length, collating=collating, **kwargs)

    def retrieval_encoder(self) -> SentenceTransformer:
        """Return the current encoder, which returns the dense and the sparse vector as one."""
        model: Any = self.accelerator.unwrap_model(self.model)
        tokenizer: Any = self.processing_class
        return hybrid_encoder(model.encoder, tokenizer, max_length=min(model.config.max_seq_length, model.max_length))
