"""Training arguments of the two stages of CoT-MoTE, with the paper's defaults (arXiv 2304.10195, section 4)."""

from dataclasses import dataclass, field
from typing import Any, Literal

from sentence_transformers import SentenceTransformerTrainingArguments

from revela_hub.ranges import NonNegativeFloat
from revela_hub.trainers.common.arguments import WARMUP, WEIGHT_DECAY, RunArguments

# Defaults of each stage. A step of pre-training has 2k rows: 32 per device x 64 accumulation steps.
STAGES: dict[str, dict[str, Any]] = {
    "pretrain": {
        "learning_rate": 3e-4,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 64,
        "max_steps": 80_000,
    },
    "finetune": {
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
    },
}
EPOCHS = 3.0


@dataclass
class CoTMoTETrainingArguments(RunArguments, SentenceTransformerTrainingArguments):
    """`SentenceTransformerTrainingArguments` for both stages.

    | | a row | `learning_rate` | `per_device_train_batch_size` | `gradient_accumulation_steps` | length of the run |
    |---|---|---|---|---|---|
    | pretrain | a text and a contextual span of it | 3e-4 | 32 | 64 | 80,000 steps |
    | finetune | a query, its passage, hard negatives | 2e-5 | 8 | 1 | 3 epochs |
    """

    stage: Literal["pretrain", "finetune"] = field(
        default="pretrain",
        metadata={"help": "pretrain on raw text, or finetune on queries with passages and hard negatives."},
    )
    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Peak learning rate (default: 3e-4, or 2e-5 in finetune)."}
    )
    per_device_train_batch_size: int | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Number of rows per device and forward pass (default: 32, or 8 in finetune)."},
    )  # fmt: skip
    gradient_accumulation_steps: int | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Number of batches per training step (default: 64, or 1 in finetune)."},
    )  # fmt: skip
    max_steps: int | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Number of training steps (default: 80000 in pretrain)."}
    )
    num_train_epochs: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Number of epochs, instead of --max_steps (default in finetune: 3)."},
    )
    warmup_steps: float = field(default=0.1, metadata=WARMUP)
    weight_decay: float = field(default=0.01, metadata=WEIGHT_DECAY)
    switch_experts: bool = field(
        default=False,
        metadata={"help": "Encode queries with the passage expert and passages with the query expert (a control)."},
    )
    scores: Literal["hybrid", "dense", "sparse"] = field(
        default="hybrid",
        metadata={"help": "finetune: Score to train: the sum of dense and sparse (as in the paper), or one of them."},
    )
    query_flops_weight: NonNegativeFloat = field(
        default=0.0, metadata={"help": "finetune: Weight of the FLOPs regulariser on the queries' sparse vectors."}
    )
    passage_flops_weight: NonNegativeFloat = field(
        default=0.0, metadata={"help": "finetune: Weight of the FLOPs regulariser on the passages' sparse vectors."}
    )

    def __post_init__(self) -> None:
        """Set the defaults of the stage, and check the values.

        Raises:
            ValueError: a value is out of range, or options conflict.
        """
        if self.stage not in STAGES:
            raise ValueError(f"stage must be pretrain or finetune, got {self.stage}")
        if self.max_steps is None and self.num_train_epochs is not None:
            self.max_steps = -1
        self.num_train_epochs = EPOCHS if self.num_train_epochs is None else self.num_train_epochs
        for name, value in STAGES[self.stage].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__()
        if self.scores not in ("hybrid", "dense", "sparse"):
            raise ValueError(f"scores must be hybrid, dense or sparse, got {self.scores}")
        for name in ("query_flops_weight", "passage_flops_weight"):
            if getattr(self, name) and self.scores == "dense":
                raise ValueError(f"{name} is for sparse vectors, which --scores dense does not train: leave it out")
