"""Trains a generalist embedder from a decoder (NV-Embed, arXiv 2405.17428, section 4), on sentence-transformers' trainer.

What this adds to `SentenceTransformerTrainer`: an instruction for each row of a batch (`NVEmbedCollator`), the loss with
or without the other rows (`NVEmbedLoss`), adapters on the decoder beside a pooling that is trained in full, checkpoints of
what is trained, and batches of one task as an option. Checkpoints resume with the same numbers as if nothing had happened.

The paper trains two stages, each with an optimizer and a warm-up of its own: two runs of this trainer, the second one on
the model of the first.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from packaging.version import Version
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINING_ARGS_NAME

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembled, Assembly
from revela_hub.modeling.configuration_nvembed import NVEmbedConfig
from revela_hub.modeling.modeling_nvembed import NVEmbedModel
from revela_hub.retrieval.encoder import Encoder
from revela_hub.trainers.common.adapters import add_adapters
from revela_hub.trainers.common.inputs import ModelLike, check_split, default_arguments, wrong_columns
from revela_hub.trainers.common.trainer import MethodTrainer
from revela_hub.trainers.nvembed import NVEMBED
from revela_hub.trainers.nvembed.arguments import NVEmbedTrainingArguments
from revela_hub.trainers.nvembed.checkpoint import EMBEDDER, PROMPTS, TRAINED_WEIGHTS, NVEmbedStart, load_nvembed
from revela_hub.trainers.nvembed.collator import ANCHOR_PROMPT, DOCUMENT_PROMPT, TASK, NVEmbedCollator, text_columns
from revela_hub.trainers.nvembed.export import assemble_nvembed, nvembed_encoder
from revela_hub.trainers.nvembed.loss import NVEmbedLoss


class NVEmbedTrainer(MethodTrainer, SentenceTransformerTrainer):
    """Trainer of an `NVEmbedModel` as `nvembed_encoder` wraps it.

        trainer = NVEmbedTrainer("Qwen/Qwen3-0.6B", train_dataset=pairs)  # columns anchor, positive, negative_1, ...
        trainer.train()
        vectors = trainer.retriever.encode_query(["a query"])
        trainer.write_models(Path("outputs"))  # for SentenceTransformer("outputs/embedder", trust_remote_code=True)

    Args:
        model: the Hub id or folder of a decoder or of an NV-Embed, or a loaded decoder, or what `nvembed_encoder` gives:
            Transformer (an `NVEmbedModel`), Pooling, Normalize. Its decoder gets adapters in place, unless all weights are
            trained. The pooling on top is always trained in full.
        args: the run; by default the paper's stage one, into a folder named after the model.
        train_dataset: pairs (anchor, positive, and for hard negatives negative_1 to negative_N), whose anchors get the
            model's prompt for queries; or the rows of a mixture (`revela_hub.data.Mixture.dataset`), which have the columns
            task, anchor_prompt and document_prompt, too.
        processing_class: the tokenizer, by default the decoder's own.
        peft_config: of the adapters, instead of LoRA as `args` says; without `target_modules` on every linear layer.
        max_length: tokens of a text, instruction and EOS included; of a model that `nvembed_encoder` gave, its own.
        query_instruction: what goes before queries; of a model that `nvembed_encoder` gave, its own.
        model_init_kwargs: of `load_nvembed`: `pooling`, `mask`, `num_latents`, `dtype`, ...
        **kwargs: of `MethodTrainer` (`retrieval_task`) and `SentenceTransformerTrainer`: `eval_dataset` with the same columns, `callbacks`, ...

    Raises:
        UserError: if the model cannot be loaded, a column is missing, or an instruction leaves no room for a text.
    """

    method = NVEMBED

    def __init__(
        self,
        model: ModelLike,
        args: NVEmbedTrainingArguments | None = None,
        *,
        train_dataset: Dataset,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        max_length: int = 512,
        query_instruction: str = "Given a question, retrieve passages that answer the question",
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(NVEmbedTrainingArguments, model, self.method)
        self.args: NVEmbedTrainingArguments
        if not isinstance(model, SentenceTransformer):
            set_seed(args.seed)  # as the Trainer does, but before the pooling is drawn
            start = load_nvembed(model, tokenizer=processing_class, **(model_init_kwargs or {}))
            prompts = start.prompts | {"query": query_prompt(query_instruction), "document": ""}
            length = min(max_length, start.model.config.text_config.max_position_embeddings)
            model = nvembed_encoder(start.model, start.tokenizer, max_length=length, prompts=prompts)
        train_dataset = _with_prompts(train_dataset, model.prompts)
        transformer: Any = model[0]
        self.nvembed: NVEmbedModel = transformer.auto_model
        self.columns = text_columns(train_dataset)
        _check_processes(args)
        collator = NVEmbedCollator(model, self.columns)
        collator.check_prompts(train_dataset)
        set_seed(args.seed)  # as the Trainer does, but before the adapters are drawn
        adapters = peft_config or args.lora_config(self.nvembed.embedding_model)
        self._adapters = None if adapters is None else add_adapters(self.nvembed.embedding_model, adapters)
        for parameter in self.nvembed.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()  # the pooling, also beside a decoder that is frozen in bf16
        self._trained = [name for name, parameter in self.nvembed.named_parameters() if parameter.requires_grad]
        loss = NVEmbedLoss(
            model,
            temperature=args.temperature,
            in_batch_negatives=args.in_batch_negatives,
            mini_batch_size=args.mini_batch_size,
            mini_batch_num_tokens=args.mini_batch_num_tokens,
        )
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset if args.blend_tasks else by_task(train_dataset),
            loss=loss,
            data_collator=collator,  # it is called, and read for its label columns
            **kwargs,
        )

    def trained_config(self) -> NVEmbedConfig:
        """That of the model inside of the sentence-transformers one."""
        return self.nvembed.config

    def retrieval_encoder(self) -> Encoder:
        """The model as it stands, in the precision of its training: decoder and pooling may differ in theirs."""
        return _EncoderInTraining(self.accelerator.unwrap_model(self.model), self.accelerator.autocast)

    def model_names(self) -> str:
        """The decoder's."""
        return f"NV-Embed on {self.nvembed.config.text_config._name_or_path or 'a decoder'}"

    def merge_adapters(self) -> NVEmbedModel:
        """Puts the adapters into the decoder's weights, in place, and returns the model; training ends with this."""
        if self._adapters is not None:
            self._adapters.merge_and_unload()
            self._adapters = None
        return self.nvembed

    def export(self, dtype: torch.dtype | None = None) -> Path:
        """Writes `embedder/` into the output folder, a folder that loads without this package; training ends with this.

        Args:
            dtype: of the weights from here on; by default the decoder's.
        """
        folder = Path(self.args.output_dir or ".") / EMBEDDER
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's
        return self.assemble(folder.parent, folder, Assembly(dtype=dtype)).folder

    def write_models(self, output: Path) -> list[Path]:
        """Writes `embedder/` from the model in memory."""
        return [self.export()] if self.args.should_save else []

    def get_batch_sampler(self, dataset: Dataset, *args: Any, **kwargs: Any) -> BatchSampler | None:
        """As in the base class; `--batch_sampler no_duplicates` looks at texts alone, not at task and instruction."""
        sampler: BatchSampler | None = super().get_batch_sampler(dataset.select_columns(self.columns), *args, **kwargs)
        return sampler

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """None: our card is written by `hub_cards` after the run, without another pass over the data."""

    def assemble(self, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
        """What `push_to_hub` publishes: the model as it stands, adapters merged; training ends with this."""
        prompts = {name: prompt or "" for name, prompt in self.model.prompts.items()}
        model = self.merge_adapters()
        nn.Module.to(model, assembly.dtype or model.dtype)  # the pooling is float32 beside a decoder in bf16
        return assemble_nvembed(NVEmbedStart(model, self.model.tokenizer, prompts), checkpoint, folder, assembly)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """A checkpoint holds what is trained (adapters and pooling, or everything), the configuration and the tokenizer."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if state_dict is None:
            weights = self.nvembed.state_dict()
        else:  # gathered from shards, under the names that the model has within the sentence-transformers one
            prefix = next(name for name, module in self.model.named_modules() if module is self.nvembed)
            weights = {name.removeprefix(f"{prefix}."): value for name, value in state_dict.items()}
        if self._adapters is None:
            self.nvembed.save_pretrained(folder, state_dict=weights)
        else:
            trained = {name: weights[name].detach().contiguous() for name in self._trained}
            save_file(trained, folder / TRAINED_WEIGHTS, metadata={"format": "pt"})
            self.nvembed.config.save_pretrained(folder)
            adapters, config = self._adapters.peft_config["default"], self.nvembed.config
            # What they belong to: an NV-Embed, or the decoder that got fresh pooling.
            adapters.base_model_name_or_path = config._name_or_path or config.text_config._name_or_path
            adapters.save_pretrained(str(folder))
        self.model.tokenizer.save_pretrained(folder)
        prompts = json.dumps({"prompts": self.model.prompts}, ensure_ascii=False, indent=2)
        (folder / PROMPTS).write_text(prompts + "\n", encoding="utf-8")
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Reads the weights back in place; sentence-transformers would load the model a second time."""
        folder = Path(resume_from_checkpoint)
        expected = {name for name, parameter in self.nvembed.named_parameters() if parameter.requires_grad}
        for file in sorted(folder.glob("model*.safetensors" if self._adapters is None else TRAINED_WEIGHTS)):
            weights = load_file(file)
            if self.nvembed.load_state_dict(weights, strict=False).unexpected_keys:
                break
            expected -= weights.keys()
        if expected:
            raise UserError(
                f"{folder} is not a checkpoint of this run: is --lora_rank, --pooling or the model another?"
            )


def _with_prompts(rows: Dataset, prompts: Mapping[str, str | None]) -> Dataset:
    """Pairs as the rows of a mixture of one task, with the model's own prompts; the rows of a mixture as they are."""
    check_split(rows)
    columns = {TASK: "retrieval", ANCHOR_PROMPT: prompts.get("query"), DOCUMENT_PROMPT: prompts.get("document")}
    if not {"anchor", "positive"} <= set(rows.column_names):
        raise wrong_columns(rows, "anchor, positive, and for hard negatives negative_1, negative_2, ...")
    if set(columns) & set(rows.column_names):
        return rows
    for name, value in columns.items():
        rows = rows.add_column(name, [value or ""] * len(rows))
    return rows


def _check_processes(args: NVEmbedTrainingArguments) -> None:
    """Refuses what would hang: before 6.2, sentence-transformers synchronises the processes at every mini-batch.

    Of a batch's distinct texts one process may have more than another, and so more mini-batches.
    """
    if args.world_size > 1 and Version(version("sentence-transformers")) < Version("6.2"):
        raise UserError(
            f"NV-Embed on {args.world_size} processes needs sentence-transformers 6.2 or newer, this is"
            f" {version('sentence-transformers')}: pip install -U sentence-transformers"
        )


def by_task(dataset: Dataset) -> DatasetDict:
    """One data set for each task, of which sentence-transformers makes batches of one task each."""
    task_N = np.asarray(dataset[TASK])
    return DatasetDict({str(task): dataset.select(np.flatnonzero(task_N == task)) for task in np.unique(task_N)})


class _EncoderInTraining:
    """A sentence-transformers model that encodes under autocast."""

    def __init__(self, model: SentenceTransformer, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model, self.autocast = model, autocast
        self.similarity_fn_name = model.similarity_fn_name

    def encode_query(self, texts: list[str], **kwargs: Any) -> Any:
        """(n, d) vectors of queries."""
        with self.autocast():
            return self.model.encode_query(texts, **kwargs)

    def encode_document(self, texts: list[str], **kwargs: Any) -> Any:
        """(n, d) vectors of documents."""
        with self.autocast():
            return self.model.encode_document(texts, **kwargs)
