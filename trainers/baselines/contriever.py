"""Train a retriever on raw text with a contrastive loss: Contriever (arXiv 2112.09118), a baseline.

Two random crops of a passage are a positive pair; the crops of other passages in the batch (or, with --queue_size, of
earlier batches) are negatives. It starts from a sentence-transformers model, or from an encoder or decoder
with mean pooling. In our measurements, it did not improve all-MiniLM-L6-v2: use `revela-hub adapt` for such models.

Writes to --output_dir: retriever/ for SentenceTransformer(...), with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train contriever --data path/to/texts --retriever HuggingFaceTB/SmolLM2-135M --max_steps 200
  revela-hub train contriever --data path/to/texts --retriever google-bert/bert-base-uncased --views inverse_cloze
"""

import copy
import random
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (as everywhere)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.data.text.passages import build_passages
from revela_hub.data.text.same_text import text_hash
from revela_hub.data.text.words import UNSPACED_CHARACTER
from revela_hub.options import option
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability, TextLength
from revela_hub.trainers.base.callbacks import SharedEpoch
from revela_hub.trainers.base.distributed import is_distributed, rank
from revela_hub.trainers.base.in_batch import gathered_rows
from revela_hub.trainers.base.models import ModelLike, default_arguments
from revela_hub.trainers.base.retriever import (
    WrappedRetriever,
    WrappedRetrieverTrainer,
    adapted,
    inputs_of,
    load_retriever,
    print_retriever,
)
from revela_hub.trainers.base.rows import prepare_datasets, prepared_rows
from revela_hub.trainers.baselines import CONTRIEVER
from revela_hub.trainers.baselines.raw_text import RawTextArguments, RetrieverTrainingArguments, train_on_text

_WORD = re.compile(rf"{UNSPACED_CHARACTER.pattern}|\S+")
EMPTY = -1
"""Hash of a place in the queue without a key."""


@dataclass
class ContrieverTrainingArguments(RetrieverTrainingArguments):
    """`TrainingArguments` for an existing retriever; the paper starts from BERT, with learning rate 5e-5."""

    learning_rate: float = option(2e-5, "Peak learning rate (paper: 5e-5).")
    per_device_train_batch_size: int = option(64, "Number of passages per device and batch.")
    views: Literal["cropping", "inverse_cloze", "both"] = option(
        "cropping",
        "Positive pairs: two random crops, a crop and the rest of the text (inverse_cloze), or each for half of the"
        " texts (both).",
    )
    min_ratio: PositiveFloat = option(0.1, "Minimum length of a crop, as a fraction of the passage's words.")
    max_ratio: PositiveFloat = option(0.5, "Maximum length of a crop, as a fraction of the passage's words.")
    deletion: Probability = option(0.1, "Fraction of a crop's words that are deleted.")
    temperature: PositiveFloat = option(0.05, "Temperature that divides the similarities.")
    queue_size: NonNegativeInt = option(
        0, "Number of keys from earlier batches to use as negatives (MoCo; paper: 131072); 0 uses in-batch ones."
    )
    momentum: Probability = option(0.9995, "Momentum of the key encoder, if there is a queue.")

    def __post_init__(self) -> None:
        """Raise a `ValueError` if a value is out of range, or values do not go together."""
        super().__post_init__()
        if not 0 < self.min_ratio <= self.max_ratio <= 1:
            raise ValueError(
                f"min_ratio {self.min_ratio} and max_ratio {self.max_ratio} must be in (0, 1], in this order"
            )
        if not self.queue_size and self.per_device_train_batch_size * self.world_size < 2:
            raise ValueError(
                "a batch of one passage has no negatives: raise per_device_train_batch_size, or set queue_size"
            )


@dataclass(kw_only=True)
class Arguments(RawTextArguments, ContrieverTrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train contriever`: the model, the data's, then those of every transformers Trainer."""

    output_dir: str = option("outputs/contriever", "Output folder.")
    max_words: PositiveInt = option(200, "Maximum number of words per passage.")
    max_length: TextLength | None = option(
        None, "Maximum number of tokens per text (default: the retriever's own limit)."
    )


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    print_retriever(train(arguments), arguments)


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `ContrieverTrainer`, such as `callbacks`."""
    build = partial(build_passages, max_words=arguments.max_words, language=arguments.language)
    return train_on_text(CONTRIEVER, arguments, build, ContrieverTrainer, **trainer_options)


class ViewCollator(SharedEpoch):
    """Turns rows of `build_passages` into two views each, a query and a document, with the model's own preprocessing.

    Independent cropping: two spans of words with random length and position; inverse cloze: a span of words, and the rest of the
    text. Words of both are deleted at random. Unlike the official code, which crops token ids, spans consist of words, so that
    texts are tokenised as at inference time. Random draws depend on `(seed, epoch, row)` only. The trainer sets `epoch`.
    """

    def __init__(self, model: SentenceTransformer, args: ContrieverTrainingArguments) -> None:
        super().__init__()
        self.model, self.args = model, args

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the inputs `query` and `key` of both views, with `input_ids` (B, L) and so on; and `text_hash` (B,)."""
        queries, keys = zip(*(self.views(row["text"], row["row"]) for row in rows), strict=True)
        return {
            "query": inputs_of(self.model, list(queries), "query"),
            "key": inputs_of(self.model, list(keys), "document"),
            "text_hash": torch.tensor([text_hash(row["text"]) for row in rows]),
        }

    def views(self, text: str, row: int) -> tuple[str, str]:
        """Draw two views of a text."""
        draw = random.Random(f"{self.args.seed}/{self.epoch}/{row}")
        words = [match.span() for match in _WORD.finditer(text)]
        crop = list(self._span(len(words), draw))
        if self.args.views == "inverse_cloze" or (self.args.views == "both" and draw.random() < 0.5):
            other = [place for place in range(len(words)) if place not in crop] or crop
        else:
            other = list(self._span(len(words), draw))
        return self._text(text, words, crop, draw), self._text(text, words, other, draw)

    def _span(self, words: int, draw: random.Random) -> range:
        length = max(1, round(words * draw.uniform(self.args.min_ratio, self.args.max_ratio)))
        start = draw.randrange(max(1, words - length + 1))
        return range(start, min(words, start + length))

    def _text(self, text: str, words: list[tuple[int, int]], places: list[int], draw: random.Random) -> str:
        """Return the words at these positions with the white space in front of each."""
        kept = [place for place in places if draw.random() >= self.args.deletion] or places[:1]
        return "".join(text[words[place - 1][1] if place else 0 : words[place][1]] for place in kept).strip()


class Contriever(WrappedRetriever):
    """Computes the contrastive loss of a batch (arXiv 2112.09118, section 3.1), with the retriever and a queue, if there is one.

        L = - mean_i log( exp(q_i . k_i / t) / sum_{k in C_i} exp(q_i . k / t) )

    q_i and k_i are two views of passage i; q . k is the similarity of the published model, cosine or dot product. Without a
    queue, C_i are the keys of the batch on all processes. With a queue (MoCo), C_i is k_i and the last `queue_size` keys of earlier
    batches, computed without gradient by a momentum encoder, w_k <- m w_k + (1 - m) w_q.
    """

    queue_KD: Tensor
    queue_hash_K: Tensor

    def __init__(self, retriever: SentenceTransformer, args: ContrieverTrainingArguments) -> None:
        super().__init__(retriever)
        self.temperature, self.momentum, self.queue_size = args.temperature, args.momentum, args.queue_size
        self.key_encoder: Any = None
        if self.queue_size:
            self.key_encoder = copy.deepcopy(retriever).requires_grad_(False)
            with retriever.truncate_embeddings(None):  # vectors are whole in training
                self.register_buffer("queue_KD", torch.zeros(self.queue_size, retriever.get_embedding_dimension() or 0))
            self.register_buffer("queue_hash_K", torch.full((self.queue_size,), EMPTY))

    def extra_weights(self) -> dict[str, Tensor]:
        """Return the queue and the momentum encoder, which checkpoints need in addition to the retriever."""
        if not self.queue_size:
            return {}
        return {name: value for name, value in self.state_dict().items() if not name.startswith("retriever.")}

    @torch.no_grad()
    def move_key_encoder(self) -> None:
        """Update the momentum encoder, which happens once per step."""
        if self.key_encoder is not None:
            for own, followed in zip(self.key_encoder.parameters(), self.retriever.parameters(), strict=True):
                own.lerp_(followed, 1 - self.momentum)

    def forward(self, query: dict[str, Any], key: dict[str, Any], text_hash: Tensor) -> dict[str, Tensor]:
        """Return the scalar `loss` of a batch of `ViewCollator`, and `accuracy`: how often the other view is the best key.

        Keys of other rows, or in the queue, that are views of the same text are not negatives.
        """
        query_BD = self.embed(query)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.queue_size):
            key_BD = self.embed(key, self.key_encoder)
        with torch.autocast(query_BD.device.type, enabled=False):
            logits, target_B = (self._queued if self.queue_size else self._in_batch)(query_BD, key_BD, text_hash)
            loss = F.cross_entropy(logits / self.temperature, target_B)
            if self.queue_size and self.training:
                self._enqueue(key_BD, text_hash)
        return {"loss": loss, "accuracy": (logits.argmax(1) == target_B).float().mean().detach()}

    def _in_batch(self, query_BD: Tensor, key_BD: Tensor, hash_B: Tensor) -> tuple[Tensor, Tensor]:
        target_B = rank() * len(key_BD) + torch.arange(len(query_BD), device=query_BD.device)
        if is_distributed():
            key_BD = all_gather_with_grad(key_BD.contiguous())
        same_BN = (hash_B[:, None] == gathered_rows(hash_B)).scatter(1, target_B[:, None], False)
        return (query_BD @ key_BD.T).masked_fill(same_BN, -torch.inf), target_B

    def _queued(self, query_BD: Tensor, key_BD: Tensor, hash_B: Tensor) -> tuple[Tensor, Tensor]:
        own_B1 = (query_BD * key_BD).sum(-1, keepdim=True)
        others_BK = query_BD @ self.queue_KD.T
        hidden_BK = (self.queue_hash_K == EMPTY) | (hash_B[:, None] == self.queue_hash_K)
        logits = torch.cat([own_B1, others_BK.masked_fill(hidden_BK, -torch.inf)], dim=1)
        return logits, torch.zeros(len(query_BD), dtype=torch.long, device=query_BD.device)

    @torch.no_grad()
    def _enqueue(self, key_BD: Tensor, hash_B: Tensor) -> None:
        """Add the keys of all processes to the queue, which loses its oldest ones."""
        # New tensors, because autograd keeps the old ones for the backward pass.
        self.queue_KD = torch.cat([self.queue_KD, gathered_rows(key_BD)])[-self.queue_size :]
        self.queue_hash_K = torch.cat([self.queue_hash_K, gathered_rows(hash_B)])[-self.queue_size :]


class _MoveKeyEncoder(TrainerCallback):
    """Moves the momentum encoder once per training step, not once per accumulated batch."""

    def __init__(self, model: Contriever) -> None:
        self.model = model

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.model.move_key_encoder()


class ContrieverTrainer(WrappedRetrieverTrainer):
    """Trainer of `Contriever`.

        trainer = ContrieverTrainer("HuggingFaceTB/SmolLM2-135M", train_dataset=texts)
        trainer.train()
        vectors = trainer.retriever.encode(["a passage"])
        trainer.write_models("outputs")  # for SentenceTransformer(...) of the folder that it returns

    Args:
        model: Hub id or folder of the retriever, or a loaded `SentenceTransformer`, which is trained in place.
        args: training arguments; by default, the output folder is named after the retriever.
        peft_config: configuration of LoRA adapters, instead of the LoRA settings in `args`.
        max_length: maximum number of tokens of a text, by default the model's own.
        model_init_kwargs: passed to `load_retriever`: `trust_remote_code`, `pooling`, `prompts`.
        **kwargs: passed to `Trainer`: `train_dataset` (raw text in a column text, or rows of `build_passages`), `callbacks`, ...

    Raises:
        UserError: the retriever cannot be loaded, or the data set has the wrong columns.
    """

    method = CONTRIEVER
    metric = "accuracy"

    args: ContrieverTrainingArguments

    def __init__(
        self,
        model: ModelLike,
        args: ContrieverTrainingArguments | None = None,
        *,
        peft_config: PeftConfig | None = None,
        max_length: int | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(ContrieverTrainingArguments, model, self.method)
        loading = {"max_length": max_length} | (model_init_kwargs or {})
        retriever = load_retriever(model, **loading)
        prepare_datasets(kwargs, lambda rows: prepared_rows(rows, ("row", "text"), args, build_passages))
        self.adapters = adapted(retriever, peft_config, args)
        contrastive = Contriever(retriever, args)
        super().__init__(model=contrastive, args=args, data_collator=ViewCollator(retriever, args), **kwargs)
        self.add_callback(_MoveKeyEncoder(contrastive))
