"""Arguments of a Revela run; the defaults are the paper's (arXiv 2506.16552, section 4)."""

from dataclasses import dataclass, field

from revela_hub.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat
from revela_hub.trainers.common.arguments import AdapterArguments, RunArguments


@dataclass
class RevelaTrainingArguments(AdapterArguments, RunArguments):
    """`TrainingArguments` with the paper's defaults; one row of the data set is a group of chunks.

    A batch per device is `per_device_train_batch_size` groups, so 1 group of 16 chunks x 8 accumulation steps by default.
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of the language model."})
    warmup_steps: float = field(
        default=100, metadata={"help": "Steps of linear warm-up; the retriever gets as many after its own start."}
    )
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Batches added up before each update."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Groups per device and forward pass."})
    retriever_learning_rate: NonNegativeFloat | None = field(
        default=None, metadata={"help": "Peak learning rate of the retriever; by default that of the language model."}
    )
    retriever_start_step: NonNegativeInt = field(
        default=0,
        metadata={
            "help": "Updates in which the language model learns alone to use the other chunks, before the retriever"
            " moves. 0 is the paper's; a small or freshly trained language model needs some, or what it cannot use"
            " yet pushes the similarities to uniform."
        },
    )
    temperature_start: PositiveFloat | None = field(
        default=None,
        metadata={"help": "Start at this temperature and go to the model's, geometrically over the run."},
    )
    lora_rank: NonNegativeInt = field(
        default=256, metadata={"help": "Rank of the adapters of both models; 0 trains all weights."}
    )
