"""Load and train a retriever without a second model: any sentence-transformers model, saved in its own format."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import is_sentence_transformer_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError, loading
from revela_hub.files import atomic
from revela_hub.hub_cards.assemble import keep_other_files
from revela_hub.hub_cards.export import make_readable
from revela_hub.hub_cards.tokenizers import ensure_empty_text_has_token, with_eos
from revela_hub.loading import encoder
from revela_hub.output import command_line
from revela_hub.retrieval.encoder import (
    limit_length,
    limit_to_positions,
    refuse_other_kind,
    similarity_of,
    without_chat_template,
)
from revela_hub.trainers.base.adapters import freeze_pooler, refuse_adapters, with_adapters
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.models import ModelLike, name_of, retriever_in, trained_backbone, trained_transformer
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.base.weights import refuse_fused, refuse_remote_code

TRAINING_WEIGHTS = "training_only.safetensors"
"""File in a checkpoint with the weights of a run that are not part of the retriever."""
RETRIEVER = "retriever"
PlainPooling: TypeAlias = Literal["last", "mean", "cls"]
_MODES: dict[str | None, str] = {None: "mean", "last": "lasttoken"}  # names of sentence-transformers


def load_retriever(
    retriever: ModelLike,
    *,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    pooling: PlainPooling | None = None,
    prompts: Mapping[str, str] | None = None,
    similarity: Literal["cosine", "dot"] | None = None,
) -> SentenceTransformer:
    """Load a sentence-transformers model, or any other model with a pooling, in float32.

    If the tokenizer of a model that is not a sentence-transformers folder adds no token to a text, it is made to append EOS,
    so that an empty text has a vector, and its chat template is not used. A sentence-transformers model is not changed.

    Args:
        retriever: Hub id or folder, or a loaded sentence-transformers model.
        max_length: maximum number of tokens of a text; by default the model's own.
        trust_remote_code: run code from the model's repository.
        pooling: of a model that is not a sentence-transformers folder: `"mean"` (default), `"cls"`, or `"last"`, the EOS that the
            tokenizer is made to append to every text.
        prompts: prompts `query` and `document`; by default the model's own.
        similarity: how vectors are compared; by default as the model says, or by cosine.
    """
    retriever = retriever_in(retriever)
    name = name_of(retriever)
    if isinstance(retriever, PreTrainedModel):
        raise UserError(f"a {type(retriever).__name__} is no SentenceTransformer: pass its folder or id instead")
    loaded = isinstance(retriever, SentenceTransformer)
    model: Any = retriever if loaded else _open(name, trust_remote_code, pooling)
    modes = [str(module.pooling_mode) for module in model if isinstance(module, Pooling)]
    if pooling is not None and modes[:1] != [_MODES.get(pooling, pooling)]:
        raise UserError(f"the retriever {name} keeps its own pooling, not {pooling}: leave pooling out")
    if prompts is not None:
        model.prompts = dict(model.prompts) | dict(prompts)
    model.similarity_fn_name = similarity or model.similarity_fn_name
    similarity_of(model, f"the retriever {name}")  # must be cosine or dot product
    refuse_adapters(name, model)
    backbones = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    saved = {part for backbone in backbones for part in backbone.modules()}  # transformers saves their code, too
    refuse_remote_code(name, set(model.modules()) - saved)
    limit_to_positions(model)
    if max_length is not None:
        limit_length(model, max_length, name)
    return model.float()  # type: ignore[no-any-return]


def _open(name: str, trust_remote_code: bool, pooling: PlainPooling | None) -> SentenceTransformer:
    refuse_other_kind(name)
    refuse_fused(name)
    code = {"trust_remote_code": trust_remote_code}
    weights: dict[str, Any] = {"dtype": torch.float32}
    with loading(f"cannot load the retriever {name!r}", name):
        if is_sentence_transformer_model(name):
            return encoder(SentenceTransformer, name, device="cpu", model_kwargs=weights, **code)
        own = {"processor_kwargs": dict(code), "config_kwargs": dict(code)}
        transformer = encoder(Transformer, name, model_kwargs=weights | code, **own)
        if isinstance(transformer.processor, PreTrainedTokenizerBase):
            transformer.processor = ensure_empty_text_has_token(transformer.processor)
        without_chat_template(transformer)
        if pooling == "last":
            transformer.processor = with_eos(transformer.processor)
        pooled = Pooling(transformer.get_embedding_dimension(), _MODES.get(pooling, pooling))
        return SentenceTransformer(modules=[transformer, pooled], device="cpu")


def adapted(
    retriever: SentenceTransformer, config: PeftConfig | None, args: RunArguments, *, query_only: bool = False
) -> PeftModel | None:
    """Freeze BERT's pooler, and add adapters to the transformer of a retriever in place (`with_adapters`).

    `query_only`: only the query route is trained.
    """
    freeze_pooler(retriever)
    backbone, rank = trained_backbone(retriever), getattr(args, "lora_rank", 0)
    if (config is not None or rank) and (backbone is None or (isinstance(retriever[0], Router) and not query_only)):
        kind = type(trained_transformer(retriever)).__name__ if backbone is None else "model with two routes"
        raise UserError(f"LoRA adapters need one transformer, not a {kind}: train all weights (lora_rank 0)")
    return None if backbone is None else with_adapters(backbone, config, args)


def inputs_of(model: SentenceTransformer, texts: list[str], task: str) -> dict[str, Any]:
    """Return the inputs of a model's forward pass, with the prompt and for the route of the task, `query` or `document`."""
    return model.preprocess(texts, prompt=model.prompts.get(task) or None, task=task)


def print_retriever(folder: Path, arguments: Any) -> None:
    """Print where the exported retriever is, and a command that searches with it."""
    if arguments.should_save:
        trust = ["--trust_remote_code"] if arguments.trust_remote_code else []
        search = command_line("search", folder / RETRIEVER, "your query", *trust, "--corpus", "PATH")
        sys.stdout.write(f"\nretriever: {folder / RETRIEVER}\ntry it:  {search}\n")


class WrappedRetriever(nn.Module):
    """A retriever in training: the base of modules that compute a loss with it."""

    def __init__(self, retriever: nn.Module) -> None:
        super().__init__()
        self.retriever: Any = retriever
        encoder = retriever if isinstance(retriever, SentenceTransformer) else None
        self.cosine = encoder is not None and similarity_of(encoder, "the retriever") == "cosine"

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute the retriever's activations in the backward pass (`--gradient_checkpointing`)."""
        self.retriever.gradient_checkpointing_enable(*args, **kwargs)

    def embed(self, features: dict[str, Any], retriever: nn.Module | None = None) -> Tensor:
        """Return (N, D) vectors of `inputs_of`, in float32 or wider, of unit length if they are compared by cosine."""
        vectors: Tensor = (retriever or self.retriever)(features)["sentence_embedding"]
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return nn.functional.normalize(vectors, dim=-1) if self.cosine else vectors

    def extra_weights(self) -> dict[str, Tensor]:
        """Return the weights that checkpoints need in addition to the retriever."""
        return {}


class RetrieverTrainer(MethodTrainer):
    """Trainer of a retriever, or of a `WrappedRetriever`.

    A checkpoint is a sentence-transformers folder, unless adapters are trained, and a file with other weights of the run: adapters,
    a queue, a momentum encoder.
    """

    model: nn.Module
    saves_with_models = False
    adapters: PeftModel | None = None
    """Adapters of the retriever, if they are trained."""

    @property
    def retriever(self) -> Any:
        """The sentence-transformers model in training."""
        return self.accelerator.unwrap_model(self.model).retriever

    def _export(self, output: Path) -> list[Path]:
        """Write `retriever/`, as a whole."""
        if not self.args.should_save:
            return []
        with atomic(output / RETRIEVER) as folder:
            self.write_retriever(folder)
            keep_other_files(output / RETRIEVER, folder)
        return [output / RETRIEVER]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a checkpoint; a call by a user saves the retriever, also with adapters, which are merged, and its card."""
        super().save_model(output_dir, _internal_call=True)
        if self.args.should_save and not _internal_call:
            folder = Path(output_dir or self.args.output_dir or ".")
            if self.adapters is not None:
                self.write_retriever(folder)
            self.with_cards([folder])

    def write_retriever(self, folder: Path) -> None:
        """Write the exported folder."""
        self.retriever.save_pretrained(str(folder), create_model_card=False)
        make_readable(folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save a sentence-transformers folder, unless adapters are trained, and the weights that are not part of it."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapters is None:
            self.write_retriever(folder)
        if extra := self._training_weights():
            copies = {name: value.detach().cpu().contiguous().clone() for name, value in extra.items()}
            save_file(copies, folder / TRAINING_WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights that `_save` wrote."""
        folder = Path(resume_from_checkpoint)
        if self.adapters is None:
            self.retriever.load_state_dict(self.saved_retriever(folder).state_dict())
        if extra := self._training_weights():
            weights = load_file(folder / TRAINING_WEIGHTS)
            for name, value in extra.items():
                value.data.copy_(weights[name])

    def _load_best_model(self) -> None:
        """Load the best checkpoint (`--load_best_model_at_end`); the Trainer would look for weights with the names of its model."""
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def saved_retriever(self, folder: Path) -> nn.Module:
        """Load what `write_retriever` wrote."""
        return encoder(SentenceTransformer, str(folder), device="cpu")

    def _training_weights(self) -> dict[str, Tensor]:
        """Return the weights of the run that the sentence-transformers folder does not have."""
        model = self.accelerator.unwrap_model(self.model)
        extra = model.extra_weights() if isinstance(model, WrappedRetriever) else {}
        if self.adapters is not None:
            extra |= {name: weight for name, weight in self.retriever.named_parameters() if weight.requires_grad}
        return extra


class WrappedRetrieverTrainer(RetrieverTrainer):
    """Trainer of a module around a retriever, whose `forward` returns a dict with the scalars `loss` and `metric`."""

    metric: ClassVar[str]
    """Name of the metric to log, which `forward` computes without gradient."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, and log the metric."""
        outputs = model(**inputs)
        if model.training:
            self.add_metric(self.metric, outputs[self.metric])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]
