"""Training arguments of RA-IT and RA-DIT, the baselines of ImpRAG."""

from dataclasses import dataclass, field, fields
from typing import Any

from trl import SFTConfig

from revela_hub.options import option
from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TwoOrMore
from revela_hub.trainers.base.arguments import WARMUP, AdapterArguments, RunArguments

UNUSED_SFT_OPTIONS = {
    *("chat_template_path", "dataset_text_field", "dataset_num_proc", "eos_token", "pad_token", "truncation_mode"),
    *("shuffle_dataset", "packing", "packing_strategy", "eval_packing", "completion_only_loss", "assistant_only_loss"),
    "model_init_kwargs",
}


@dataclass
class RAITTrainingArguments(AdapterArguments, RunArguments, SFTConfig):
    """`SFTConfig` of RA-IT (arXiv 2310.01352, section 2.2), with ImpRAG's defaults for settings that both have."""

    learning_rate: float = option(1e-5, "Peak learning rate.")
    warmup_steps: float = option(100, WARMUP)
    num_train_epochs: float = option(10, "Number of epochs.")
    per_device_train_batch_size: int = option(8, "Number of prompts per device and forward pass.")
    lora_rank: NonNegativeInt = option(0, "Rank of the LoRA adapters; 0 trains all weights.")
    # Rows are tokenised as ImpRAG's are and never truncated: TRL would cut off the answers.
    dataset_kwargs: dict[str, Any] | None = field(
        default_factory=lambda: {"skip_prepare_dataset": True}, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raise a `ValueError` if an option would have no effect, or a value is out of range."""
        for entry in fields(SFTConfig):
            if entry.name in UNUSED_SFT_OPTIONS and getattr(self, entry.name) != entry.default:
                raise ValueError(
                    f"{entry.name} is for rows that TRL prepares, but these are tokenised as ImpRAG's are: remove it"
                )
        super().__post_init__()


@dataclass
class RADITTrainingArguments(RunArguments):
    """`TrainingArguments` of RA-DIT's retriever (arXiv 2310.01352, section 2.3)."""

    learning_rate: float = option(1e-5, "Peak learning rate.")
    per_device_train_batch_size: int = option(16, "Number of prompts per device and forward pass.")
    retrieval_warmup_epochs: NonNegativeFloat = option(
        0, "Number of warm-up epochs with the ranking of --pseudo_labels as labels; needed with --backbone."
    )
    num_candidates: TwoOrMore = option(
        10, "Number of top passages of --pseudo_labels whose likelihoods are compared for each prompt."
    )
    num_positives: PositiveInt = option(
        5, "Warm-up: Number of top passages that are positives; the other candidates are negatives."
    )
    temperature: PositiveFloat | None = option(
        None, "Temperature that divides the scores (default: 0.05 for cosine, else 1 or the root of the dimension)."
    )
    likelihood_temperature: PositiveFloat = option(0.01, "Temperature that divides the likelihoods (equation 4).")
    likelihood_batch_size: PositiveInt = option(
        16, "Number of prompts with a passage per forward pass of the reader; affects memory only."
    )

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a value is out of range, or the warm-up has no negatives."""
        super().__post_init__()
        if self.retrieval_warmup_epochs and self.num_positives >= self.num_candidates:
            raise ValueError(
                f"num_positives {self.num_positives} leaves no negatives among num_candidates {self.num_candidates}"
            )
