"""Arguments of the retriever of RA-DIT."""

from dataclasses import dataclass, field

from revela_hub.ranges import NonNegativeFloat, PositiveFloat
from revela_hub.trainers.common.arguments import RunArguments


@dataclass
class RADITTrainingArguments(RunArguments):
    """`TrainingArguments` of RA-DIT's retriever (arXiv 2310.01352, section 2.3)."""

    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Prompts per device and forward pass."})
    retrieval_warmup_epochs: NonNegativeFloat = field(
        default=0,
        metadata={"help": "Epochs with another retriever's rankings as labels before; RA-DIT-Llama needs some."},
    )
    temperature: PositiveFloat | None = field(
        default=None,
        metadata={"help": "Scores are divided by it; by default the square root of the vectors' dimension."},
    )
    likelihood_temperature: PositiveFloat = field(
        default=0.01, metadata={"help": "Likelihoods are divided by it before their softmax (equation 4)."}
    )
