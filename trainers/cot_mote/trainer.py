"""Trainers of CoT-MoTE (arXiv 2304.10195): pre-training with a query and a passage expert, and fine-tuning as a hybrid retriever.

The loss of fine-tuning is `MultipleNegativesRankingLoss` over the sum of dense and sparse scores, with the row's hard negatives and the
passages of the other rows on all devices.
"""

from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, set_seed

from revela_hub.data.text.contexts import build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.errors import UserError
from revela_hub.modeling.modeling_cot_mote import CoTMoTEForPreTraining, CoTMoTEModel
from revela_hub.trainers.base.adapters import merged_copy
from revela_hub.trainers.base.in_batch import InBatchNegatives, MaskedSimilarity, TextHashCollator
from revela_hub.trainers.base.masked import MaskedTrainer
from revela_hub.trainers.base.models import ModelLike, default_arguments, tokenizer_of
from revela_hub.trainers.base.rows import as_dataset, pair_columns, prepare_datasets, refuse_single_pair
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.base.weights import load_in_place
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.checkpoint import CoTMoTECheckpoint, hybrid_encoder, load_cot_mote_start
from revela_hub.trainers.cot_mote.data import CoTMoTECollator, CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.verification import EXPERTS


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
        encoder_mask_ratio: fraction of a text's tokens to predict; by default 0.3.
        decoder_mask_ratio: fraction of a span's tokens to predict, with an "ae" decoder; by default 0.45.
        model_init_kwargs: arguments of `load_cot_mote_start`: `variant`, `decoder`, `bottlenecks`, ...
        **kwargs: arguments of `Trainer`: `train_dataset` (raw text in a column `text`, from which pseudo-queries are
            extracted, or rows of `build_contexts`), `callbacks`, ...

    Raises:
        UserError: the model cannot be loaded, the tokenizer or a ratio is not suitable, or the data set has the wrong columns.
    """

    method = COT_MOTE
    models = CoTMoTEForPreTraining
    load = staticmethod(partial(load_cot_mote_start, pre_training=True))
    checkpoint = CoTMoTECheckpoint
    arguments = CoTMoTETrainingArguments
    build = staticmethod(partial(build_contexts, queries=ExtractiveQueries()))
    collators = CoTMoTECollator
    collated = ("switch_experts",)
    losses = ("encoder_loss", "dense_decoder_loss", "sparse_decoder_loss")

    @property
    def retriever(self) -> SentenceTransformer:
        """Return the current encoder, which returns the dense and the sparse vector as one."""
        model: Any = self.accelerator.unwrap_model(self.model)
        tokenizer: Any = self.processing_class
        return hybrid_encoder(model.encoder, tokenizer, max_length=min(model.config.max_seq_length, model.max_length))


class CoTMoTEFinetuner(MethodTrainer, SentenceTransformerTrainer):
    """Trainer of a `CoTMoTEModel`.

        trainer = CoTMoTEFinetuner("outputs", train_dataset=pairs)  # the output folder of a pre-training
        trainer.train()
        vectors = trainer.retriever.encode_query(["a query"])  # dense and sparse
        trainer.write_models("tuned")  # for SentenceTransformer("tuned/dense"), SparseEncoder("tuned/sparse")

    Args:
        model: folder or Hub id of a CoT-MoTE model or an encoder, a loaded encoder with its masked-LM head, or a
            `CoTMoTEModel` or the model of a `CoTMoTETrainer`, which is trained in place.
        args: training arguments with `stage="finetune"`; by default the paper's, with an output folder named after the model.
        processing_class: tokenizer of the model, by default its own; saved with every checkpoint.
        train_dataset: columns anchor, positive, and for hard negatives negative, or negative_1 to negative_N; others are ignored.
        query_max_length: maximum tokens of a query, special tokens included.
        max_length: maximum tokens of a passage, special tokens included.
        model_init_kwargs: arguments of `load_cot_mote_start`: `variant`, ...
        **kwargs: arguments of `SentenceTransformerTrainer`: `callbacks`, ...

    Raises:
        UserError: the model cannot be loaded, a column is missing, or a value is not text.
    """

    method = COT_MOTE
    data_collator_class = TextHashCollator

    def __init__(
        self,
        model: ModelLike | CoTMoTEModel | CoTMoTEForPreTraining,
        args: CoTMoTETrainingArguments | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        train_dataset: Dataset | IterableDataset,
        query_max_length: int = 32,
        max_length: int = 144,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["train_dataset"] = train_dataset
        prepare_datasets(kwargs, lambda rows: (rows := as_dataset(rows)).select_columns(pair_columns(rows)))
        train_dataset = kwargs.pop("train_dataset")
        refuse_single_pair(train_dataset)
        args = args or default_arguments(CoTMoTETrainingArguments, model, self.method, stage="finetune")
        self.args: CoTMoTETrainingArguments
        if isinstance(model, CoTMoTEForPreTraining):
            model = model.encoder
        if not isinstance(model, CoTMoTEModel):
            set_seed(args.seed)  # as the Trainer does, but before new weights are initialised
            own = {"tokenizer": processing_class} | (model_init_kwargs or {})
            start = load_cot_mote_start(model, pre_training=False, **own)
            model, processing_class = start.encoder, start.tokenizer
            max_length = min(max_length, model.max_length)
            model.config.max_seq_length = max_length  # the published model reads texts as long as those in training
        tokenizer = tokenizer_of(model, processing_class)
        self.cot_mote = model
        if len(train_dataset.column_names) == 2 and args.per_device_train_batch_size * args.world_size < 2:
            raise UserError("a batch of one pair has no negatives: raise per_device_train_batch_size or num_negatives")
        encoders = {id(w) for route in EXPERTS.values() for w in model.route(route).base_model.parameters()}
        for weight in model.parameters():  # without sparse vectors, heads get no gradient, which is an error of DDP
            weight.requires_grad_(args.scores != "dense" or id(weight) in encoders)
        # The expert of each column; sentence-transformers passes it to the module as its task.
        columns = train_dataset.column_names
        args.router_mapping = {name: "query" if name == "anchor" else "document" for name in columns}
        encoder = hybrid_encoder(
            model,
            tokenizer,
            query_max_length=query_max_length,
            max_length=max_length,
            scores=args.scores,
            switch_experts=args.switch_experts,
        )
        similarity = MaskedSimilarity(dot_score)
        scored: Any = {"similarity_fct": similarity, "gather_across_devices": args.world_size > 1}
        loss = InBatchNegatives(encoder, MultipleNegativesRankingLoss(encoder, scale=1.0, **scored), similarity)
        super().__init__(model=encoder, args=args, train_dataset=train_dataset, loss=loss, **kwargs)

    @property
    def retriever(self) -> SentenceTransformer:
        """Return the current model, which returns the dense and the sparse vector as one."""
        return self.accelerator.unwrap_model(self.model)  # type: ignore[no-any-return]

    def exportable(self) -> CoTMoTECheckpoint:
        """Return the model, as `load_cot_mote_checkpoint` does."""
        return CoTMoTECheckpoint(merged_copy(self.cot_mote), self.model.tokenizer)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the model, which `CoTMoTEModel.from_pretrained` loads, and the tokenizer."""
        module: Any = self.model[0]
        module.save(str(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights in place; sentence-transformers would load the model a second time."""
        folder = Path(resume_from_checkpoint)
        expected = set(self.cot_mote.state_dict()) - set(self.cot_mote.all_tied_weights_keys)
        if not load_in_place(self.cot_mote, folder.glob("model*.safetensors"), expected):
            raise UserError(f"{folder} is not a checkpoint of this run: use the same encoder and variant")
