"""Trainer of a generalist embedder made from a decoder (NV-Embed, arXiv 2405.17428, section 4).

Added to `SentenceTransformerTrainer`: an instruction for each row of a batch (`NVEmbedCollator`), a loss with or without the
negatives of other rows (`NVEmbedLoss`), adapters on the decoder with fully trained pooling, and checkpoints of the trained weights
that resume bit for bit.

The paper trains two stages, each with its own optimizer and warm-up. These are two runs of this trainer, the second one on the model
of the first.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from transformers import PreTrainedTokenizerBase, set_seed

from revela_hub.errors import UserError
from revela_hub.hub_cards.export import save_config
from revela_hub.modeling.configuration_nvembed import NVEmbedConfig
from revela_hub.modeling.modeling_nvembed import NVEmbedModel
from revela_hub.retrieval.encoder import Encoder, text_positions
from revela_hub.trainers.base.adapters import merged_copy, saving_merged, with_adapters
from revela_hub.trainers.base.models import ModelLike, default_arguments, trained_backbone
from revela_hub.trainers.base.rows import as_dataset, in_order, pair_columns, prepare_datasets, refuse_single_pair
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.base.weights import load_in_place
from revela_hub.trainers.nvembed import NVEMBED
from revela_hub.trainers.nvembed.checkpoint import PROMPTS, TRAINED_WEIGHTS, NVEmbedStart, load_nvembed, nvembed_encoder
from revela_hub.trainers.nvembed.data import (
    ANCHOR_PROMPT,
    DOCUMENT_PROMPT,
    TASK,
    NVEmbedCollator,
    NVEmbedTrainingArguments,
)
from revela_hub.trainers.nvembed.loss import NVEmbedLoss


class NVEmbedTrainer(MethodTrainer, SentenceTransformerTrainer):
    """Trainer of an `NVEmbedModel` as `nvembed_encoder` wraps it.

        trainer = NVEmbedTrainer("Qwen/Qwen3-0.6B", train_dataset=pairs)  # columns anchor, positive, negative_1, ...
        trainer.train()
        vectors = trainer.retriever.encode_query(["a query"])
        trainer.write_models("outputs")  # for SentenceTransformer("outputs/embedder", trust_remote_code=True)

    Args:
        model: Hub id or folder of a decoder, an NV-Embed model, or a model from `nvembed_encoder`, which
            consists of Transformer (an `NVEmbedModel`), Pooling and Normalize. The decoder gets adapters in place, unless all
            weights are trained. The pooling layer is always fully trained. A loaded decoder is changed: unless `mask` is causal,
            its tokens attend to later ones from then on, so it is no longer a language model.
        args: training arguments; by default the paper's stage one, with an output folder named after the model.
        train_dataset: pairs (anchor, positive, and for hard negatives negative, or negative_1 to negative_N), whose anchors get
            the model's query prompt; or rows of a mixture (`revela_hub.data.Mixture.dataset`), which also have the columns
            task, anchor_prompt and document_prompt.
        processing_class: tokenizer, by default the decoder's own.
        peft_config: configuration of the adapters, instead of the LoRA settings in `args`; without `target_modules` it applies
            to every linear layer.
        max_length: maximum tokens per text, instruction and EOS included; not used with a model from `nvembed_encoder`.
        query_instruction: instruction of queries, by default the model's own, or `QUERY_INSTRUCTION` for a decoder; not used with
            a model from `nvembed_encoder`.
        model_init_kwargs: arguments of `load_nvembed`: `pooling`, `mask`, `num_latents`, `dtype`, ...
        **kwargs: arguments of `MethodTrainer` (`retrieval_task`) and `SentenceTransformerTrainer`: `eval_dataset` with the
            same columns, `callbacks`, ...

    Raises:
        UserError: the model cannot be loaded, a column is missing, a value is not text, an instruction leaves no room for text,
            or the rows have no negatives and `in_batch_negatives` is false.
    """

    method = NVEMBED
    saves_with_models = False
    adapters: PeftModel | None = None

    def __init__(
        self,
        model: ModelLike,
        args: NVEmbedTrainingArguments | None = None,
        *,
        train_dataset: Dataset | IterableDataset,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        max_length: int = 512,
        query_instruction: str | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(NVEmbedTrainingArguments, model, self.method)
        self.args: NVEmbedTrainingArguments
        if not _is_nvembed(model):
            set_seed(args.seed)  # as the Trainer does, but before the pooling is initialised
            start = load_nvembed(model, tokenizer=processing_class, **(model_init_kwargs or {}))
            prompts = start.encoding_prompts(query_instruction)
            length = min(max_length, text_positions(start.model.config.text_config) or max_length)
            model = nvembed_encoder(start.model, start.tokenizer, max_length=length, prompts=prompts)
        own_prompts, collator = model.prompts, NVEmbedCollator(model)

        def prepared(rows: Dataset | IterableDataset) -> Dataset:
            mixture = _with_prompts(rows, own_prompts)
            if len(in_order(mixture.column_names)) == 2 and not args.in_batch_negatives:
                raise UserError("the rows have no negatives, so without in_batch_negatives the loss is always 0")
            return mixture

        kwargs["train_dataset"] = train_dataset
        prepare_datasets(kwargs, prepared)
        train_dataset = kwargs.pop("train_dataset")
        refuse_single_pair(train_dataset)
        transformer: Any = model[0]
        self.nvembed: NVEmbedModel = transformer.auto_model
        self.adapters = with_adapters(self.nvembed.embedding_model, peft_config, args)
        if self.adapters is not None:
            saving_merged(self.nvembed, self.adapters)  # `model` saves this, not the decoder in it
        # Autocast computes with trained weights in float32 and a frozen decoder in 16 bits; without it, types have to be equal.
        kept = (torch.bfloat16, torch.float16) if args.bf16 or args.fp16 else ()
        for parameter in self.nvembed.parameters():
            if parameter.requires_grad or (parameter.is_floating_point() and parameter.dtype not in kept):
                parameter.data = parameter.data.float()
        self._trained = [name for name, parameter in self.nvembed.named_parameters() if parameter.requires_grad]
        names = ("temperature", "in_batch_negatives", "mini_batch_size")
        loss = NVEmbedLoss(model, **{name: getattr(args, name) for name in names})
        given = {"args": args, "train_dataset": train_dataset, "loss": loss, "data_collator": collator}
        super().__init__(model=model, **given, **kwargs)

    @property
    def retriever(self) -> Encoder:
        """Return the current model, which encodes under the autocast of training, because dtypes may be mixed."""
        model: SentenceTransformer = self.accelerator.unwrap_model(self.model)
        autocast: Any = self.accelerator.autocast()  # as a decorator
        encode = {name: autocast(getattr(model, name)) for name in ("encode_query", "encode_document")}
        return SimpleNamespace(model=model, similarity_fn_name=model.similarity_fn_name, **encode)

    def exportable(self) -> NVEmbedStart:
        """Return the model with adapters merged, in the decoder's type, as `load_nvembed` does."""
        model = merged_copy(self.nvembed, self.adapters)
        dtype = model.dtype
        for parameter in model.parameters():  # next to a bf16 decoder, the pooling is trained in float32
            parameter.data = parameter.data.to(dtype)
        prompts = {name: prompt or "" for name, prompt in self.model.prompts.items()}
        return NVEmbedStart(model, self.model.tokenizer, prompts)

    def get_batch_sampler(self, dataset: Dataset, *args: Any, **kwargs: Any) -> BatchSampler | None:
        """Return the sampler of the base class; `--batch_sampler no_duplicates` compares texts without task and instruction."""
        texts = dataset.select_columns(in_order(dataset.column_names))
        return super().get_batch_sampler(texts, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the trained weights (adapters and pooling, or all), the configuration and the tokenizer."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapters is None:
            self.nvembed.save_pretrained(folder)
        else:
            weights = self.nvembed.state_dict()
            trained = {name: weights[name].detach().contiguous() for name in self._trained}
            save_file(trained, folder / TRAINED_WEIGHTS, metadata={"format": "pt"})
            save_config(self.nvembed.config, folder)
            adapters, config = self.adapters.peft_config["default"], self.nvembed.config
            # The base of the adapters: an NV-Embed model, or the decoder that got new pooling.
            adapters.base_model_name_or_path = config.name_or_path or config.text_config.name_or_path
            adapters.save_pretrained(str(folder))
        self.model.tokenizer.save_pretrained(folder)
        prompts = json.dumps({"prompts": self.model.prompts}, ensure_ascii=False, indent=2)
        (folder / PROMPTS).write_text(prompts + "\n", encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights in place; sentence-transformers would load the model a second time."""
        folder = Path(resume_from_checkpoint)
        expected = {name for name, parameter in self.nvembed.named_parameters() if parameter.requires_grad}
        files = folder.glob("model*.safetensors" if self.adapters is None else TRAINED_WEIGHTS)
        if not load_in_place(self.nvembed, files, expected):
            raise UserError(f"{folder} is not a checkpoint of this run: use the same model, lora_rank and pooling")


def _is_nvembed(model: ModelLike) -> TypeGuard[SentenceTransformer]:
    """Whether this is a sentence-transformers model around an NV-Embed model."""
    inner = trained_backbone(model) if isinstance(model, SentenceTransformer) else None
    return inner is not None and inner.config.model_type == NVEmbedConfig.model_type


def _with_prompts(rows: Dataset | IterableDataset, prompts: Mapping[str, str | None]) -> Dataset:
    """Return pairs as a mixture of one task, with the model's own prompts; a mixture is returned unchanged."""
    rows = as_dataset(rows)
    columns = {TASK: "retrieval", ANCHOR_PROMPT: prompts.get("query"), DOCUMENT_PROMPT: prompts.get("document")}
    pair_columns(rows)
    if set(columns) <= set(rows.column_names):
        return rows
    for name, value in columns.items():
        rows = rows.add_column(name, [value or ""] * len(rows))
    return rows
