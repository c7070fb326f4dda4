"""Training arguments of NV-Embed, with the paper's defaults for stage one (arXiv 2405.17428, section 5.1 and appendix)."""

from dataclasses import dataclass

from sentence_transformers import SentenceTransformerTrainingArguments

from revela_hub.options import option
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability
from revela_hub.trainers.base.arguments import WEIGHT_DECAY, AdapterArguments, RunArguments

QUERY_INSTRUCTION = "Given a question, retrieve passages that answer the question"


@dataclass
class NVEmbedTrainingArguments(AdapterArguments, RunArguments, SentenceTransformerTrainingArguments):
    """`SentenceTransformerTrainingArguments` for both stages of NV-Embed.

    | | `in_batch_negatives` | `learning_rate` | data |
    |---|---|---|---|
    | stage one | true | 2e-5 | retrieval |
    | stage two | false | 1.5e-5 | retrieval and all other tasks, blended |

    A batch is `per_device_train_batch_size` rows on each device. `mini_batch_size` or `mini_batch_num_tokens` limits the texts in
    memory at a time, without changing the result. `gradient_accumulation_steps` does change it, because batches do not share
    negatives.
    """

    learning_rate: float = option(2e-5, "Peak learning rate.")
    warmup_steps: float = option(
        50, "Linear warm-up: number of steps, or a fraction below 1 of all steps; it is repeated in stage 2."
    )
    weight_decay: float = option(0.03, WEIGHT_DECAY)
    per_device_train_batch_size: int = option(128, "Number of rows per device and batch (paper: 128 over all devices).")
    in_batch_negatives: bool = option(
        True, "Also use the passages of the other rows, on all devices, as negatives (stage 1)."
    )
    temperature: PositiveFloat = option(0.02, "Temperature that divides the cosine similarities.")
    mini_batch_size: PositiveInt = option(
        32, "Number of texts in memory at a time (GradCache); a whole batch at once is twice as fast."
    )
    mini_batch_num_tokens: PositiveInt | None = option(
        None, "Number of tokens in memory at a time, instead of --mini_batch_size."
    )
    blend_tasks: bool = option(
        True, "Mix rows of all tasks in a batch (as in the paper) instead of one task per batch."
    )
    lora_rank: NonNegativeInt = option(16, "Rank of the decoder's LoRA adapters; 0 trains all weights.")
    lora_alpha: PositiveInt | None = option(None, "LoRA alpha (default: twice the rank).")
    lora_dropout: Probability = option(0.1, "Dropout of the LoRA adapters.")

    def __post_init__(self) -> None:
        """Set defaults that depend on other fields; raise a `ValueError` if a value is out of range."""
        super().__post_init__()
        if self.prompts:
            raise ValueError(
                "prompts has no effect on NV-Embed: set query_instruction, and the instructions of the tasks in the mixture"
            )
        if self.lora_alpha is None and self.lora_rank:
            self.lora_alpha = 2 * self.lora_rank
