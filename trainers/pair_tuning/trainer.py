r"""Fine-tunes a retriever on query-passage pairs with sentence-transformers' loss and batch sampler.

    L = - mean_i log( exp(s(q_i, p_i) / t) / sum_{p in P} exp(s(q_i, p) / t) )

P holds the passages and hard negatives of the whole batch, on all devices, without false negatives (`trainers.base.in_batch`); s is the
model's own similarity. With a `mini_batch_size` below the batch size the loss is `CachedMultipleNegativesRankingLoss` (GradCache, Gao et
al. 2021, arXiv 2101.06983, equation 2): less memory, a second forward pass, the same result.

With `matryoshka_dims` M, L is the mean over vectors truncated to m components (`MatryoshkaLoss`, Kusupati et al. 2022, arXiv 2205.13147).
Afterwards vectors can be truncated to any m in M (`SentenceTransformer(..., truncate_dim=m)`, `revela-hub index --truncate_dim m`).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from peft import PeftConfig
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim, dot_score
from torch import nn

from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from revela_hub.retrieval.encoder import similarity_of
from revela_hub.trainers.base.arguments import WARMUP, AdapterArguments, RunArguments
from revela_hub.trainers.base.in_batch import InBatchNegatives, MaskedSimilarity, TextHashCollator
from revela_hub.trainers.base.models import ModelLike, default_arguments, trained_transformer
from revela_hub.trainers.base.retriever import RetrieverTrainer, adapted, load_retriever
from revela_hub.trainers.base.rows import pair_columns, prepare_datasets, refuse_single_pair, training_rows
from revela_hub.trainers.pair_tuning import PAIR_TUNING
from revela_hub.trainers.pair_tuning.query_route import (
    DOCUMENT,
    QUERY,
    frozen_route,
    identity_of_documents,
    record_documents,
    with_query_route,
)


@dataclass
class PairsTrainingArguments(AdapterArguments, RunArguments, SentenceTransformerTrainingArguments):
    """`SentenceTransformerTrainingArguments` for fine-tuning on pairs."""

    learning_rate: float = option(2e-5, "Peak learning rate (static embeddings: about 1e-2).")
    num_train_epochs: float = option(3.0, "Number of epochs.")
    per_device_train_batch_size: int = option(64, "Number of pairs per device and step.")
    warmup_steps: float = option(0.1, WARMUP)
    batch_sampler: str = option(
        "no_duplicates", "Batch sampler of sentence-transformers; no_duplicates keeps equal texts out of a batch."
    )
    temperature: PositiveFloat = option(0.05, "Temperature that divides the similarities.")
    mini_batch_size: PositiveInt = option(64, "Number of pairs in memory at a time (GradCache if less than a batch).")
    matryoshka_dims: list[PositiveInt] | None = option(
        None, "Also train the first N components of each vector for these N, e.g. 384 192 96 (default: whole vectors)."
    )
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
        query_max_length: maximum tokens of a query, also of the exported model, by default as of any text.
        model_init_kwargs: of `load_retriever`: `trust_remote_code`, `pooling`, `similarity`, ...
        **kwargs: of `SentenceTransformerTrainer`, and `retrieval_task`.

    Raises:
        UserError: the model cannot be loaded, or the data set has other columns.
    """

    method = PAIR_TUNING

    args: PairsTrainingArguments
    documents: str | None = None
    """With `query_only`, the identity of the model whose document vectors stay valid."""

    def __init__(
        self,
        model: ModelLike,
        args: PairsTrainingArguments | None = None,
        *,
        train_dataset: Dataset | IterableDataset,
        loss: Callable[[SentenceTransformer], nn.Module] | nn.Module | None = None,
        peft_config: PeftConfig | None = None,
        max_length: int | None = None,
        query_max_length: int | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # A copy: prompts and routes of this model are set in it.
        args = copy(args) if args else default_arguments(PairsTrainingArguments, model, self.method)
        loading = {"max_length": max_length} | (model_init_kwargs or {})
        length = loading.pop("max_length") if args.query_only else None  # of queries; documents keep their own limit
        retriever = load_retriever(model, **loading)
        if query_max_length is not None:
            if not hasattr(trained_transformer(retriever), "query_length"):
                raise UserError("query_max_length needs a transformer")
            trained_transformer(retriever).query_length = query_max_length
        routes: dict[str, str] = {}  # of the columns of all data sets, some of which may have more negatives

        def prepared(rows: Any) -> Dataset | IterableDataset:
            rows = training_rows(rows, args)
            columns = pair_columns(rows)
            routes.update((name, QUERY if name == "anchor" else DOCUMENT) for name in columns)
            # The column in which sentence-transformers looks for labels, in this order.
            names = ("label", "labels", "score", "scores") if loss is not None else ()
            label = [name for name in names if name in rows.column_names][:1]
            pairs: Dataset | IterableDataset = rows.select_columns([*columns, *label])
            return pairs

        kwargs["train_dataset"] = train_dataset
        prepare_datasets(kwargs, prepared)
        if isinstance(kwargs["train_dataset"], IterableDataset):
            args.batch_sampler = BatchSamplers.BATCH_SAMPLER  # equal texts are no negatives of each other
        if loss is None:
            refuse_single_pair(kwargs["train_dataset"])
        if args.query_only:
            retriever = with_query_route(retriever, max_length=length)
            self.documents = identity_of_documents(model)
        self.adapters = adapted(retriever, peft_config, args, query_only=args.query_only)
        args.router_mapping = routes
        args.prompts = {name: retriever.prompts.get(route) or "" for name, route in routes.items()}
        if loss is None:
            self.data_collator_class = TextHashCollator
            loss = self._contrastive(retriever, args)
        elif args.matryoshka_dims:  # the model would be exported as trained for these sizes
            raise UserError("matryoshka_dims changes the contrastive loss: leave it out, or the other loss")
        elif isinstance(loss, nn.Module) and getattr(loss, "model", retriever) is not retriever:
            raise UserError("the loss was made for another model: pass its class, or the same loaded model")
        super().__init__(model=retriever, args=args, loss=loss, **kwargs)
        # The option of the command, by whose name sentence-transformers would also limit queries; the model has its limits.
        self.data_collator.max_length = None

    def _contrastive(self, retriever: SentenceTransformer, args: PairsTrainingArguments) -> nn.Module:
        compared = similarity_of(retriever, "the retriever")
        similarity = MaskedSimilarity(cos_sim if compared == "cosine" else dot_score)
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
        if dims := args.matryoshka_dims:
            if compared != "cosine":  # truncated vectors are normalized
                raise UserError(f"matryoshka_dims requires a model that compares by cosine, not by {compared}")
            loss = MatryoshkaLoss(retriever, loss, dims, [1 / len(dims)] * len(dims))
        return InBatchNegatives(retriever, loss, similarity)

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
