"""Arguments of a Revela run; the defaults are the paper's (arXiv 2506.16552, section 4)."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from revela_hub.trainers.common.precision import settle_precision


@dataclass
class RevelaTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults; one row of the data set is a group of chunks.

    A batch per device is `per_device_train_batch_size` groups, so 1 group of 16 chunks x 8 accumulation steps by default.
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of the language model."})
    warmup_steps: float = field(
        default=100, metadata={"help": "Steps of linear warm-up; the retriever gets as many after its own start."}
    )
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Batches added up before each update."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Groups per device and forward pass."})
    bf16: bool | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Train under bf16 autocast; by default where the hardware has bf16."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many updates."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept off: the collator reads the columns."})
    retriever_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the retriever; by default that of the language model."}
    )
    retriever_start_step: int = field(
        default=0,
        metadata={
            "help": "Updates in which the language model learns alone to use the other chunks, before the retriever"
            " moves. 0 is the paper's; a small or freshly trained language model needs some, or what it cannot use"
            " yet pushes the similarities to uniform."
        },
    )
    temperature_start: float | None = field(
        default=None,
        metadata={"help": "Start at this temperature and go to the model's, geometrically over the run."},
    )
    lora_rank: int = field(default=256, metadata={"help": "Rank of the adapters of both models; 0 trains all weights."})
    lora_alpha: int | None = field(default=None, metadata={"help": "LoRA alpha; by default equal to the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of the adapters."})

    def __post_init__(self) -> None:
        """Resolves what depends on the hardware and checks the rest.

        Raises:
            ValueError: for a value out of range.
        """
        settle_precision(self)
        super().__post_init__()
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be 0 (all weights) or positive, got {self.lora_rank}")
        if self.retriever_start_step < 0:
            raise ValueError(f"retriever_start_step must not be negative, got {self.retriever_start_step}")
        if self.temperature_start is not None and self.temperature_start <= 0:
            raise ValueError(f"temperature_start must be positive, got {self.temperature_start}")
        if self.lora_alpha is None:
            self.lora_alpha = self.lora_rank
