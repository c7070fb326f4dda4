"""Training arguments of ImpRAG (arXiv 2506.02279); defaults are the paper's, or ours if it gives no value."""

from dataclasses import dataclass, field

from revela_hub.errors import require
from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rank, TwoOrMore
from revela_hub.retrieval.index_options import IndexArguments
from revela_hub.trainers.common.arguments import WARMUP, AdapterArguments, RunArguments


@dataclass
class ImpRAGTrainingArguments(IndexArguments, AdapterArguments, RunArguments):
    """`TrainingArguments` with the two stages of ImpRAG: warm-up by a retriever's rankings, then self-distillation."""

    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate."})
    warmup_steps: float = field(default=100, metadata=WARMUP)
    num_train_epochs: float = field(default=10, metadata={"help": "Number of epochs, including the retrieval warm-up."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Number of prompts per device and forward pass."}
    )
    retrieval_weight: NonNegativeFloat = field(
        default=1.0, metadata={"help": "Weight of the retrieval loss (lambda in the paper)."}
    )
    retrieval_warmup_epochs: NonNegativeFloat = field(
        default=3,
        metadata={"help": "Number of epochs with a retriever's rankings as labels, before self-distillation."},
    )
    retrieval_only_steps: NonNegativeInt = field(
        default=0,
        metadata={
            "help": "Warm-up: Number of first steps that train retrieval alone, with the layers up to --retrieval_layer."
        },
    )
    temperature: PositiveFloat | None = field(
        default=None,
        metadata={
            "help": "Temperature that divides the retrieval scores (default: square root of the vector dimension)."
        },
    )
    likelihood_temperature: PositiveFloat = field(
        default=1.0, metadata={"help": "Temperature that divides the answers' log-likelihoods."}
    )
    num_positives: PositiveInt = field(
        default=5, metadata={"help": "Warm-up: Number of top-ranked passages that are positives."}
    )
    num_negatives: NonNegativeInt = field(default=5, metadata={"help": "Warm-up: Number of hard negatives per prompt."})
    first_negative_rank: Rank = field(
        default=10, metadata={"help": "Warm-up: First rank from which hard negatives are drawn."}
    )
    last_negative_rank: Rank = field(
        default=50, metadata={"help": "Warm-up: Last rank from which hard negatives are drawn."}
    )
    num_candidates: TwoOrMore = field(
        default=10,
        metadata={"help": "Self-distillation: Number of passages per prompt whose likelihoods are compared."},
    )
    index_steps: NonNegativeInt = field(
        default=0, metadata={"help": "Self-distillation: Rebuild the index every N steps; 0 rebuilds it every epoch."}
    )
    likelihood_batch_size: PositiveInt = field(
        default=16,
        metadata={"help": "Number of candidate passages in memory at a time while likelihoods are computed."},
    )
    encode_batch_size: PositiveInt = field(
        default=32, metadata={"help": "Number of texts per forward pass while the index is rebuilt."}
    )
    lora_rank: NonNegativeInt = field(default=0, metadata={"help": "Rank of the LoRA adapters; 0 trains all weights."})

    def __post_init__(self) -> None:
        """Check the ranks.

        Raises:
            ValueError: a value is out of range.
        """
        super().__post_init__()
        if self.index_type != "exact":
            require("pymilvus" if self.index_type == "milvus" else "faiss")
        if self.retrieval_only_steps and not self.retrieval_weight:
            raise ValueError("retrieval_only_steps would train nothing: set retrieval_weight above 0")
        if not self.num_positives < self.first_negative_rank <= self.last_negative_rank:
            raise ValueError(
                f"ranks must be in this order: num_positives {self.num_positives} < first_negative_rank"
                f" {self.first_negative_rank} <= last_negative_rank {self.last_negative_rank}"
            )
        ranks = self.last_negative_rank - self.first_negative_rank + 1
        if self.num_negatives > ranks:
            raise ValueError(
                f"num_negatives {self.num_negatives} cannot be drawn from {ranks} ranks, {self.first_negative_rank} to"
                f" {self.last_negative_rank}: lower it or raise last_negative_rank"
            )
