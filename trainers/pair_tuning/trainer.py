r"""Fine-tunes a retriever on query-passage pairs with sentence-transformers' loss and batch sampler.

    L = - mean_i log( exp(s(q_i, p_i) / t) / sum_{p in P} exp(s(q_i, p) / t) )

P holds the passages and hard negatives of the whole batch, on all devices, without false negatives (`trainers.base.in_batch`); s is the
model's own similarity. With a `mini_batch_size` below the batch size the loss is `CachedMultipleNegativesRankingLoss` (GradCache, Gao et
al. 2021, arXiv 2101.06983, equation 2): less memory, a second forward pass, the same result. With `matryoshka_dims` L is the mean over
truncated vectors (`MatryoshkaLoss`).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from peft import PeftConfig
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim, dot_score
from torch import nn
from torch.utils.data import BatchSampler
from transformers import set_seed

from revela_hub.data.text.same_text import text_hash
from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from revela_hub.retrieval.encoder import similarity_of
from revela_hub.trainers.base.adapters import add_adapters, freeze_pooler, lora_config
from revela_hub.trainers.base.arguments import WARMUP, AdapterArguments, RunArguments
from revela_hub.trainers.base.in_batch import InBatchNegatives, MaskedSimilarity, TextHashCollator
from revela_hub.trainers.base.matryoshka import MatryoshkaArguments
from revela_hub.trainers.base.models import ModelLike, default_arguments
from revela_hub.trainers.base.query_route import (
    DOCUMENT,
    QUERY,
    frozen_route,
    identity_of_documents,
    record_documents,
    refuse_frozen_documents,
    trained_backbone,
    with_query_route,
)
from revela_hub.trainers.base.retriever import RetrieverTrainer, adapted_backbone, load_retriever
from revela_hub.trainers.base.rows import (
    checked_stream,
    in_order,
    pair_columns,
    prepare_datasets,
    refuse_single_pair,
    training_rows,
)
from revela_hub.trainers.pair_tuning import PAIR_TUNING

NO_DUPLICATES = (BatchSamplers.NO_DUPLICATES, BatchSamplers.NO_DUPLICATES_HASHED)
LABELS = ("label", "labels", "score", "scores")
"""Columns in which sentence-transformers looks for labels, in this order."""


@dataclass
class PairsTrainingArguments(MatryoshkaArguments, AdapterArguments, RunArguments, SentenceTransformerTrainingArguments):
    """`SentenceTransformerTrainingArguments` for fine-tuning on pairs."""

    learning_rate: float = option(2e-5, "Peak learning rate.")
    num_train_epochs: float = option(3.0, "Number of epochs.")
    per_device_train_batch_size: int = option(64, "Number of pairs per device and step.")
    warmup_steps: float = option(0.1, WARMUP)
    batch_sampler: str = option(
        "no_duplicates", "Batch sampler of sentence-transformers; no_duplicates keeps equal texts out of a batch."
    )
    temperature: PositiveFloat = option(0.05, "Temperature that divides the similarities.")
    mini_batch_size: PositiveInt = option(64, "Number of pairs in memory at a time (GradCache if less than a batch).")
    query_only: bool = option(False, "Train the encoder of queries only, so that existing document vectors stay valid.")
    lora_rank: NonNegativeInt = option(0, "Rank of the LoRA adapters; 0 trains all weights.")

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a value is out of range."""
        super().__post_init__()
        if self.per_device_train_batch_size * self.world_size < 2:
            raise ValueError("a batch of one pair has no negatives: raise per_device_train_batch_size")
        if self.prompts:
            raise ValueError(
                "prompts would be missing from the exported model: set them in its config_sentence_transformers.json"
            )


class PairsTrainer(RetrieverTrainer, SentenceTransformerTrainer):  # type: ignore[misc] # both declare their model
    """Trainer of a retriever on pairs.

        trainer = PairsTrainer("sentence-transformers/all-MiniLM-L6-v2", train_dataset=pairs)  # columns anchor, positive
        trainer.train()
        vectors = trainer.retriever.encode_query(["a query"])

    Args:
        model: Hub id or folder of a retriever or an encoder, or a loaded `SentenceTransformer`, which is trained in place.
        args: the run; by default into a folder named after the model.
        train_dataset: columns `anchor` and `positive`, and for hard negatives `negative_1`, `negative_2`, ...
        loss: a loss of sentence-transformers for the same columns, instead of the contrastive one; the column of its labels, `label`,
            `labels`, `score` or `scores`, is kept.
        peft_config: of the adapters, instead of LoRA as `args` says.
        max_length: maximum tokens of a text, by default the model's own.
        model_init_kwargs: of `load_retriever`: `trust_remote_code`.
        **kwargs: of `SentenceTransformerTrainer`, and `retrieval_task`.

    Raises:
        UserError: the model cannot be loaded, or the data set has other columns.
    """

    method = PAIR_TUNING

    args: PairsTrainingArguments
    documents: str | None = None
    """With `query_only`, the identity of the model whose document vectors stay valid (`identity_of_documents`)."""

    def __init__(
        self,
        model: ModelLike,
        args: PairsTrainingArguments | None = None,
        *,
        train_dataset: Dataset | IterableDataset,
        loss: Callable[[SentenceTransformer], nn.Module] | nn.Module | None = None,
        peft_config: PeftConfig | None = None,
        max_length: int | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # A copy: prompts and routes of this model are set in it.
        args = copy(args) if args else default_arguments(PairsTrainingArguments, model, self.method)
        loading = {"max_length": max_length} | (model_init_kwargs or {})
        length = loading.pop("max_length") if args.query_only else None  # of queries; documents keep their own limit
        retriever = load_retriever(model, **loading)
        prompts: dict[str, str] = {}  # of the columns of all data sets, some of which may have more negatives
        routes: dict[str, str] = {}
        own_prompts = retriever.prompts

        def prepared(rows: Any) -> Dataset | IterableDataset:
            pairs = _pairs(rows, args, labels=loss is not None)
            for name in in_order(pairs.column_names):
                routes[name] = QUERY if name == "anchor" else DOCUMENT
                prompts[name] = own_prompts.get(routes[name]) or ""
            return pairs

        kwargs["train_dataset"] = train_dataset
        prepare_datasets(kwargs, prepared)
        if loss is None:
            refuse_single_pair(kwargs["train_dataset"])
        _check_batches(kwargs["train_dataset"], args)
        if args.query_only:
            retriever = with_query_route(retriever, max_length=length)
            self.documents = identity_of_documents(str(model)) if isinstance(model, (str, Path)) else None
        else:
            refuse_frozen_documents(retriever)
        _note_small_rate(retriever, args)
        set_seed(args.seed)  # as the Trainer does, but before the adapters are drawn
        if args.lora_rank or peft_config:
            backbone = adapted_backbone(retriever, query_only=args.query_only)
            if adapters := peft_config or lora_config(args, backbone):
                self.adapters = add_adapters(backbone, adapters)
        freeze_pooler(retriever)
        if isinstance(retriever[0], Router):
            args.router_mapping = routes
        made = self._contrastive(retriever, args) if loss is None else _given_loss(loss, retriever, args)
        if loss is None:
            self.data_collator_class = TextHashCollator
        args.prompts = prompts
        super().__init__(model=retriever, args=args, loss=made, **kwargs)
        # The collator has all; in the run's settings, evaluation data change nothing.
        args.prompts = {name: prompts[name] for name in in_order(kwargs["train_dataset"].column_names)}

    def _contrastive(self, retriever: SentenceTransformer, args: PairsTrainingArguments) -> nn.Module:
        cosine = similarity_of(retriever, "the retriever") == "cosine"
        similarity = MaskedSimilarity(cos_sim if cosine else dot_score)
        settings: dict[str, Any] = {
            "scale": 1 / args.temperature,
            "similarity_fct": similarity,
            "gather_across_devices": args.world_size > 1,
        }
        # GradCache needs gradients of all columns; frozen documents keep no activations in memory anyway.
        if args.mini_batch_size < args.per_device_train_batch_size and not args.query_only:
            loss: nn.Module = CachedMultipleNegativesRankingLoss(
                retriever, mini_batch_size=args.mini_batch_size, **settings
            )
        else:  # the same loss without a second forward pass
            loss = MultipleNegativesRankingLoss(retriever, **settings)
        with retriever.truncate_embeddings(None):  # vectors are whole in training
            size = retriever.get_embedding_dimension()
        if dims := args.checked_dims(size, similarity_of(retriever, "the retriever")):
            loss = MatryoshkaLoss(retriever, loss, dims, [1 / len(dims)] * len(dims))
        return InBatchNegatives(retriever, loss, similarity)

    def get_batch_sampler(self, dataset: Dataset, *args: Any, **kwargs: Any) -> BatchSampler | None:
        """Return the sampler of the base class; `no_duplicates` compares hashes of `text_key`."""
        hashed = _hashed(dataset) if self.args.batch_sampler in NO_DUPLICATES else dataset
        sampler: BatchSampler | None = super().get_batch_sampler(hashed, *args, **kwargs)
        return sampler

    @property
    def retriever(self) -> Any:
        """The sentence-transformers model that is trained."""
        return self.accelerator.unwrap_model(self.model)

    def compute_loss(self, model: Any, *inputs: Any, **options: Any) -> Any:
        """Return the loss; a frozen document encoder has no dropout."""
        if self.args.query_only:
            frozen_route(self.retriever).eval()
        return super().compute_loss(model, *inputs, **options)

    def write_retriever(self, folder: Path) -> None:
        """Write the exported folder; with `query_only`, also the identity of the model that encodes documents."""
        super().write_retriever(folder)
        if self.documents is not None:
            record_documents(folder, self.documents)


def _given_loss(loss: Any, retriever: SentenceTransformer, args: PairsTrainingArguments) -> nn.Module:
    """Return the loss that a class or function makes, or a loss of this model."""
    if args.matryoshka_dims:  # the model would be exported as trained for these sizes
        raise UserError("--matryoshka_dims changes the contrastive loss: leave it out, or the other loss")
    made: nn.Module = loss if isinstance(loss, nn.Module) else loss(retriever)
    if getattr(made, "model", retriever) is not retriever:
        raise UserError("the loss was made for another model: pass its class, or the same loaded model")
    return made


def _check_batches(rows: Dataset | IterableDataset, args: PairsTrainingArguments) -> None:
    """Allow equal texts in the batches of a stream, and raise a `UserError` if a run would have no batch."""
    if isinstance(rows, IterableDataset):
        if args.batch_sampler != BatchSamplers.BATCH_SAMPLER:
            args.log(
                "train_dataset is a stream: a batch may contain equal texts, which a loss of your own has to handle"
            )
        args.batch_sampler = BatchSamplers.BATCH_SAMPLER
    elif args.batch_sampler in NO_DUPLICATES and args.dataloader_drop_last:
        fewest = min(len(set(column)) for column in _hashed(rows).to_dict().values())
        if fewest < args.train_batch_size:
            raise UserError(
                f"a column has only {fewest} different texts, fewer than a batch, and incomplete batches are dropped: lower"
                " --per_device_train_batch_size"
            )


def _hashed(rows: Dataset) -> Dataset:
    """Return the hashes of the texts, in the same columns."""
    columns: dict[str, list[int]] = {name: [] for name in in_order(rows.column_names)}
    for batch in rows.select_columns(list(columns)).iter(batch_size=1024):
        for name, hashes in columns.items():
            hashes.extend(map(text_hash, batch[name]))
    return Dataset.from_dict(columns)


def _note_small_rate(retriever: SentenceTransformer, args: PairsTrainingArguments) -> None:
    if trained_backbone(retriever) is None and args.learning_rate < 1e-3:
        args.log(f"static embeddings hardly change at a learning rate of {args.learning_rate:g}: 1e-2 suits them")


def _pairs(rows: Any, args: PairsTrainingArguments, *, labels: bool) -> Dataset | IterableDataset:
    """Return the columns of a data set that the loss reads: anchor, positive, negatives, and with `labels` the label."""
    rows = training_rows(rows, args)
    columns = pair_columns(rows)
    label = [name for name in LABELS if labels and name in rows.column_names][:1]
    selected: Dataset | IterableDataset = rows.select_columns([*columns, *label])
    return checked_stream(selected, columns) if isinstance(selected, IterableDataset) else selected
