"""Trainer of a retriever and a language model with in-batch attention (Revela, arXiv 2506.16552).

One option is not in the paper, and off in its recipes: starting the retriever later than the language model, which helps small models.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from revela_hub.data.text.groups import GroupSettings, build_groups
from revela_hub.errors import UserError
from revela_hub.hub_cards.export import save_config
from revela_hub.hub_cards.tokenizers import text_length, with_eos
from revela_hub.modeling import RevelaForCausalLM
from revela_hub.retrieval.encoder import text_positions
from revela_hub.trainers.base.adapters import freeze_pooler, lora_config, merged_copy, with_adapters
from revela_hub.trainers.base.arguments import check_positions
from revela_hub.trainers.base.distributed import is_sharded
from revela_hub.trainers.base.encoder_in_training import encoder_in_training
from revela_hub.trainers.base.models import ModelLike, default_arguments, tokenizer_of
from revela_hub.trainers.base.rows import prepare_datasets, prepared_rows, training_rows
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.revela import REVELA
from revela_hub.trainers.revela.arguments import RevelaTrainingArguments
from revela_hub.trainers.revela.checkpoint import RevelaBackbones, load_backbones, with_padding
from revela_hub.trainers.revela.collator import RevelaCollator

GROUP_COLUMNS = ("group", "document")
BIAS_LEARNING_RATE = 1e-2
"""Peak learning rate of the logit biases of joint reading, which are of the order of 1."""


class RevelaTrainer(MethodTrainer):
    """Trainer of `RevelaForCausalLM`.

        trainer = RevelaTrainer("HuggingFaceTB/SmolLM2-135M", lm="HuggingFaceTB/SmolLM2-135M", train_dataset=texts)
        trainer.train()
        vectors = trainer.retriever.encode_document(["a passage"])
        trainer.write_models("outputs")  # for SentenceTransformer("outputs/retriever")

    Args:
        model: retriever as Hub id, folder or loaded model, or both models as a `RevelaForCausalLM`. Loaded models get adapters
            in place, unless all weights are trained.
        args: training arguments; by default the paper's, with an output folder named after the retriever.
        lm: language model, a decoder: Hub id, folder or loaded model.
        retriever_tokenizer: tokenizer of the retriever, by default its own. With last-token pooling, a copy that appends EOS
            to every text is used.
        lm_tokenizer: tokenizer of the language model, by default its own.
        peft_config: configuration of the adapters, instead of the LoRA settings in `args`; without `target_modules` it applies
            to every linear layer.
        max_length: maximum tokens of a chunk.
        model_init_kwargs: arguments of `load_backbones`: `temperature`, `pooling`, `trust_remote_code`, ...
        **kwargs: arguments of `MethodTrainer` (`retrieval_task`) and `Trainer`: `train_dataset` (raw text in a column `text`,
            or rows of `build_groups`), `callbacks`, ...

    Raises:
        UserError: a model cannot be loaded or has fewer positions than `max_length`, a tokenizer is not suitable, or the data
            set has the wrong columns.
    """

    method = REVELA
    can_be_sharded = True

    def __init__(
        self,
        model: ModelLike | RevelaForCausalLM,
        args: RevelaTrainingArguments | None = None,
        *,
        lm: ModelLike | None = None,
        retriever_tokenizer: PreTrainedTokenizerBase | None = None,
        lm_tokenizer: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        max_length: int = 160,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(RevelaTrainingArguments, model, self.method)
        self.args: RevelaTrainingArguments
        rows = training_rows(kwargs.get("train_dataset"), args)
        if not isinstance(model, RevelaForCausalLM):
            if lm is None:
                raise UserError("the language model is missing: pass lm=")
            loaded = load_backbones(
                model,
                lm,
                retriever_tokenizer=retriever_tokenizer,
                lm_tokenizer=lm_tokenizer,
                **(_group_size(rows) | (model_init_kwargs or {})),
            )
            model, retriever_tokenizer, lm_tokenizer = loaded.model, loaded.retriever_tokenizer, loaded.lm_tokenizer
        retriever_tokenizer = tokenizer_of(model.retriever, retriever_tokenizer)
        lm_tokenizer = with_padding(tokenizer_of(model.lm, lm_tokenizer))
        self.revela = model
        if model.config.pooling == "last":  # as in the exported retriever
            retriever_tokenizer = with_eos(retriever_tokenizer)
        self.retriever_tokenizer, self.lm_tokenizer = retriever_tokenizer, lm_tokenizer
        freeze_pooler(model.retriever)
        for part, backbone in (("retriever", model.retriever), ("language model", model.lm)):
            check_positions(f"the {part}", text_positions(backbone.config), max_length)
        self.collator = RevelaCollator(
            retriever_tokenizer,
            lm_tokenizer,
            max_length=max_length,
            passage_prompt=model.config.prompts["document"],
            query_prompt=model.config.prompts.get("query", ""),
            similarity_sides=model.config.similarity_sides,
            similarity_span=model.config.similarity_span,
            seed=args.seed,
        )
        self.lm_trained = args.lm_training != "frozen"
        if not self.lm_trained:
            model.lm.requires_grad_(False)
            if model.config.reading == "added":
                args.log(
                    "warning: a frozen language model cannot adapt to added reading, so its loss stays high: use joint reading"
                )
        build = partial(build_groups, settings=GroupSettings(group_size=model.config.group_size))
        kwargs["train_dataset"] = rows
        prepare_datasets(kwargs, lambda rows: prepared_rows(rows, GROUP_COLUMNS, args, build))
        adapters = _with_biases(peft_config or lora_config(args, model), model)
        trained = with_adapters(model, adapters, args) or model
        super().__init__(model=trained, args=args, data_collator=self.collator, **kwargs)
        if self.lm_trained:
            self.folders = {"lm": "lm", **self.method.folders}

    def describe_run(self) -> str:
        """Return a line on the run, with the form of reading and whether the language model is trained."""
        trained = "trained" if self.lm_trained else "frozen"
        return f"{super().describe_run()}; {self.revela.config.reading} reading, LM {trained}"

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the next-token loss of stream h, and keep statistics of the similarities for the next log."""
        document_N = inputs.pop("document")
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            metrics = similarity_statistics(outputs.similarity, document_N)
            biases = [p for n, p in self.revela.named_parameters() if "reading_bias" in n and p.requires_grad]
            if biases and not is_sharded(self.revela):
                metrics["reading_bias"] = biases[0].mean()
            for name, value in metrics.items():
                self.add_metric(name, value)
        return (loss, outputs) if return_outputs else loss

    @property
    def retriever(self) -> SentenceTransformer:
        """Return the current retriever, with the maximum length of the exported one."""
        model, tokenizer = self.revela, self.retriever_tokenizer
        config = model.config
        longest = text_length(model.retriever.config, tokenizer, config.max_seq_length)
        similarity = config.similarity_fn_name
        return encoder_in_training(model, model.published, tokenizer, config.prompts, longest, similarity)

    def exportable(self) -> RevelaBackbones:
        """Return both models with adapters merged, as `load_checkpoint` does."""
        model = merged_copy(self.revela, self.accelerator.unwrap_model(self.model), torch.float32)
        return RevelaBackbones(model, self.retriever_tokenizer, self.lm_tokenizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer, with separate parameter groups for the retriever and the biases of joint reading."""
        if self.optimizer is not None:  # passed to the constructor, or left by an interrupted `train`
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        trained = self.model if model is None else model
        assert trained is not None  # the Trainer sets it in its constructor
        for part, rate in (("retriever", self.args.retriever_learning_rate), ("reading_bias", BIAS_LEARNING_RATE)):
            of_part = {id(p) for n, p in trained.named_parameters() if part in n.split(".")}
            for group in list(optimizer.param_groups):
                own = [p for p in group["params"] if id(p) in of_part]
                group["params"] = [p for p in group["params"] if id(p) not in of_part]
                settings = {k: v for k, v in group.items() if k != "params"}
                if own or part == "retriever":
                    lr = group["lr"] if rate is None else rate
                    optimizer.add_param_group(settings | {"params": own, "lr": lr, "is_retriever": part == "retriever"})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the Trainer's schedule; the retriever's learning rate is 0 until its start step and then warms up."""
        start, warmup = self.args.retriever_start_step, self.args.get_warmup_steps(num_training_steps)
        if start >= num_training_steps:
            raise UserError(
                f"retriever_start_step {start}: the retriever would not be trained in {num_training_steps} steps"
            )
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if start:
            groups = scheduler.optimizer.param_groups
            own = [index for index, group in enumerate(groups) if group.get("is_retriever")]
            if not own or not isinstance(scheduler, LambdaLR):
                raise UserError(
                    "retriever_start_step needs the Trainer's optimizer, and a schedule that depends on the step"
                )
            for index in own:
                factor = partial(_delayed, scheduler.lr_lambdas[index], start, warmup)
                scheduler.lr_lambdas[index] = factor
                groups[index]["lr"] = groups[index]["initial_lr"] * factor(0)
        return scheduler

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save weights or adapters, the configuration and both tokenizers; not a frozen language model that can be loaded again."""
        frozen = not self.lm_trained and not isinstance(self.model, PeftModel)
        if frozen and self.revela.lm.config.name_or_path:
            weights = self.revela.state_dict() if state_dict is None else state_dict
            state_dict = {name: weight for name, weight in weights.items() if not name.startswith("lm.")}
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir or ".")
            save_config(self.revela.config, folder)
            self.retriever_tokenizer.save_pretrained(folder / "retriever_tokenizer")
            self.lm_tokenizer.save_pretrained(folder / "lm_tokenizer")


def _with_biases(adapters: PeftConfig | None, model: RevelaForCausalLM) -> PeftConfig | None:
    """Train and save the biases of joint reading, too; PEFT freezes all weights except the adapters."""
    if adapters is None or model.reading_bias is None:
        return adapters
    saved: Any = getattr(adapters, "modules_to_save", None) or ()
    with_biases: Any = adapters
    return replace(with_biases, modules_to_save=[*saved, "reading_bias"])  # type: ignore[no-any-return]


def _group_size(rows: Any) -> dict[str, int]:
    """Return the group size of prepared groups, for the model's configuration."""
    if not isinstance(rows, Dataset | IterableDataset) or not set(GROUP_COLUMNS) <= set(rows.column_names):
        return {}
    first = next(iter(rows), None)
    return {"group_size": len(first["document"])} if first else {}


def similarity_statistics(similarity_GBB: Tensor, document_N: Tensor) -> dict[str, Tensor]:
    """Return statistics to monitor the retriever, as means over chunks that have another chunk to attend to.

    Args:
        similarity_GBB: (groups, B, B), rows sum to one over j != i.
        document_N: document of each chunk, -1 for absent chunks.

    Returns:
        `similarity_entropy`: in nats; log(B - 1) is uniform, 0 is one-hot.
        `same_document_share`: fraction of the similarity on chunks of the same document.
    """
    similarity = similarity_GBB.detach().float()
    document_GB = document_N.view(similarity.shape[:2])
    reading_GB = (similarity.sum(-1) > 0) & (document_GB >= 0)
    count = reading_GB.sum().clamp(min=1)
    entropy_GB = torch.special.entr(similarity).sum(-1)
    same_GB = (similarity * (document_GB[:, :, None] == document_GB[:, None, :])).sum(-1)
    return {
        "similarity_entropy": (entropy_GB * reading_GB).sum() / count,
        "same_document_share": (same_GB * reading_GB).sum() / count,
    }


def _delayed(factor: Callable[[int], float], start: int, warmup: int, step: int) -> float:
    """Return the retriever's learning-rate factor: 0 before its start, then a linear warm-up times the schedule."""
    since = step - start
    if since < 0:
        return 0.0
    return factor(step) * min(1.0, (since + 1) / max(1, warmup))
