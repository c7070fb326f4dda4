"""Fine-tunes a CoT-MoTE as a hybrid retriever, on sentence-transformers' trainer and losses.

The loss is `MultipleNegativesRankingLoss` over the sum of the dense and the sparse score, with the row's hard negatives and
the passages of the other rows, on all devices; with weights for it, sentence-transformers' FLOPs regulariser on the sparse
vectors. What this adds to `SentenceTransformerTrainer`: checkpoints that are a `CoTMoTEModel`, what is shared stored once.
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sparse_encoder.losses import FlopsLoss, SpladeLoss
from sentence_transformers.util import dot_score
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINING_ARGS_NAME

from revela_hub.errors import UserError
from revela_hub.modeling.configuration_cot_mote import CoTMoTEConfig
from revela_hub.modeling.modeling_cot_mote import CoTMoTEModel
from revela_hub.trainers.common.inputs import ModelLike, check_split, default_arguments, tokenizer_of, wrong_columns
from revela_hub.trainers.common.trainer import MethodTrainer
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.arguments import CoTMoTETrainingArguments
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_start
from revela_hub.trainers.cot_mote.hybrid import hybrid_encoder


class CoTMoTEFinetuner(MethodTrainer, SentenceTransformerTrainer):
    """Trainer of a `CoTMoTEModel`.

        trainer = CoTMoTEFinetuner("outputs", train_dataset=pairs)  # what a pre-training left
        trainer.train()
        vectors = trainer.retriever.encode_query(["a query"])  # dense and sparse
        trainer.write_models(Path("tuned"))  # for SentenceTransformer("tuned/dense"), SparseEncoder("tuned/sparse")

    Args:
        model: what to start from: the folder or id of a CoT-MoTE or of an encoder, a loaded encoder with its masked-LM
            head, or a `CoTMoTEModel`, which is trained in place.
        args: the run, with `stage="finetune"`; by default the paper's, into a folder named after the model.
        tokenizer: of the model, by default its own; saved with every checkpoint. Also under the name `processing_class`.
        train_dataset: columns anchor, positive, negative_1 to negative_N.
        query_max_length: tokens kept of a query, special ones included.
        max_length: tokens kept of a passage, special ones included.
        model_init_kwargs: of `load_cot_mote_start`: `variant`, `fresh_head`, ...
        **kwargs: of `SentenceTransformerTrainer`: `callbacks`, ...

    Raises:
        UserError: if the model cannot be loaded, a column is missing, a length leaves no room for text, or no negative differs from its positive.
    """

    method = COT_MOTE

    def __init__(
        self,
        model: ModelLike | CoTMoTEModel,
        args: CoTMoTETrainingArguments | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        train_dataset: Dataset,
        query_max_length: int = 32,
        max_length: int = 144,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_split(train_dataset)
        columns = train_dataset.column_names
        if not {"anchor", "positive"} <= set(columns):
            raise wrong_columns(train_dataset, "anchor, positive, and for hard negatives negative_1, negative_2, ...")
        args = args or default_arguments(CoTMoTETrainingArguments, model, self.method, stage="finetune")
        self.args: CoTMoTETrainingArguments
        tokenizer = kwargs.pop("processing_class", tokenizer)
        if not isinstance(model, CoTMoTEModel):
            set_seed(args.seed)  # as the Trainer does, but before anything fresh is drawn
            start = load_cot_mote_start(model, pre_training=False, tokenizer=tokenizer, **(model_init_kwargs or {}))
            model, tokenizer = start.encoder, start.tokenizer
            max_length = min(max_length, model.max_length)
            model.config.max_seq_length = max_length  # what is published reads as much as it was trained with
        tokenizer = tokenizer_of(model, tokenizer)
        self.cot_mote = model
        if len(columns) == 2 and args.per_device_train_batch_size * args.world_size < 2:
            raise UserError("a batch of one pair has no negatives: raise per_device_train_batch_size or num_negatives")
        _check_lengths(tokenizer, query_max_length=query_max_length, max_length=max_length)
        _check_negatives(train_dataset, tokenizer, max_length)
        # Which expert reads a column; sentence-transformers hands it to the module as its task.
        args.router_mapping = {name: "query" if name == "anchor" else "document" for name in columns}
        encoder = hybrid_encoder(
            model,
            tokenizer,
            query_max_length=query_max_length,
            max_length=max_length,
            scores=args.scores,
            switch_experts=args.switch_experts,
        )
        if args.scores == "dense":
            _freeze_heads(model)
        if args.ddp_find_unused_parameters is None:
            # The columns go through the model one after the other: to look for weights that one of them does not use
            # would find the other expert's. All of them together use all.
            args.ddp_find_unused_parameters = False
        super().__init__(
            model=encoder, args=args, train_dataset=train_dataset, loss=hybrid_loss(encoder, args), **kwargs
        )

    def trained_config(self) -> CoTMoTEConfig:
        """That of the model inside of the sentence-transformers one."""
        return self.cot_mote.config

    def retrieval_encoder(self) -> SentenceTransformer:
        """The model as it stands, dense and sparse vector in one."""
        return self.accelerator.unwrap_model(self.model)  # type: ignore[no-any-return]

    def model_names(self) -> str:
        """The encoder's."""
        return f"CoT-MoTE on {self.trained_config().encoder._name_or_path or 'an encoder'}"

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """None: our card is written by `hub_cards` after the run, without another pass over the data."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """A checkpoint is the model, as `CoTMoTEModel.from_pretrained` reads it, and the tokenizer."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        module: Any = self.model[0]
        module.save(str(folder))
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, checkpoint_path: str, model: nn.Module | None = None) -> None:
        """Reads the weights back in place; sentence-transformers would load the model a second time."""
        expected = set(self.cot_mote.state_dict()) - set(self.cot_mote.all_tied_weights_keys)
        for file in sorted(Path(checkpoint_path).glob("model*.safetensors")):
            weights = load_file(file)
            if self.cot_mote.load_state_dict(weights, strict=False).unexpected_keys:
                break
            expected -= weights.keys()
        if expected:
            raise UserError(f"{checkpoint_path} is not a checkpoint of this run: is --variant or the encoder another?")


def _check_lengths(tokenizer: PreTrainedTokenizerBase, **lengths: int) -> None:
    special = tokenizer.num_special_tokens_to_add()
    for name, length in lengths.items():
        if length <= special:
            raise UserError(
                f"{name} {length} leaves no room for text: each text has {special} special tokens; raise it to"
                f" {special + 1} or more"
            )


def _check_negatives(rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Reads on until a row has a negative whose tokens are not the positive's."""
    negatives = [name for name in rows.column_names if name not in ("anchor", "positive")]
    for row in rows if negatives else ():
        texts = [row["positive"], *(row[name] for name in negatives)]
        positive, *others = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
        if any(tokens != positive for tokens in others):
            return
    if negatives:
        raise UserError(
            f"in every row the negatives equal the positive within max_length {max_length}: mine other negatives, or raise"
            " max_length"
        )


def _freeze_heads(model: CoTMoTEModel) -> None:
    """Without sparse vectors the masked-LM heads score nothing, and what gets no gradient breaks DDP."""
    for route in (model.route("query"), model.route("passage")):
        for name, parameter in route.named_parameters():
            if not name.startswith(f"{route.base_model_prefix}."):
                parameter.requires_grad_(False)


def hybrid_loss(encoder: Any, args: CoTMoTETrainingArguments) -> nn.Module:
    """Contrastive over dot products of what the encoder makes, with the FLOPs regulariser where it has a weight."""
    contrastive = MultipleNegativesRankingLoss(
        encoder, scale=1.0, similarity_fct=dot_score, gather_across_devices=args.world_size > 1
    )
    if not args.query_flops_weight and not args.passage_flops_weight:
        return contrastive
    regulariser = _SparseFlops(encoder)
    return SpladeLoss(
        encoder,
        contrastive,
        document_regularizer_weight=args.passage_flops_weight,
        query_regularizer_weight=args.query_flops_weight,
        document_regularizer=regulariser,
        query_regularizer=regulariser,
    )


class _SparseFlops(FlopsLoss):
    """Of the sparse part of the vectors."""

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        module: Any = self.model[0]  # a HybridEncoder
        loss: Tensor = super().compute_loss_from_embeddings(module.sparse_part(embeddings))
        return loss
