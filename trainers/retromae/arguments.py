"""Arguments of a RetroMAE run; the defaults are the paper's (arXiv 2205.12035, section 4.1.3)."""

from dataclasses import dataclass, field

from revela_hub.trainers.common.arguments import RunArguments


@dataclass
class RetroMAETrainingArguments(RunArguments):
    """`TrainingArguments` with the paper's defaults; one row of the data set is a span of text."""

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Spans per device and forward pass."})
    num_train_epochs: float = field(default=8.0, metadata={"help": "Times that every span is seen, masked anew."})
    warmup_steps: float = field(
        default=0.1, metadata={"help": "Linear warm-up: steps, or below 1 the share of all steps."}
    )
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay, on all but biases and norms."})
