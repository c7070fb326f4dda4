"""Load the model that an ImpRAG run starts from or that it saved, export it, and encode with it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftConfig
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError, loading
from revela_hub.files import local_path
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, write_reference
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.hub_cards.peft_adapters import load_adapters
from revela_hub.hub_cards.verify import probe_texts, text_limit
from revela_hub.loading import in_fast_precision, model_json
from revela_hub.modeling import ImpRAGConfig, ImpRAGForCausalLM
from revela_hub.modeling.backbones import evaluating
from revela_hub.trainers.base.adapters import merge
from revela_hub.trainers.base.models import ModelLike, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import check_fields, config_fields, is_encoder, load_whole
from revela_hub.trainers.imprag import IMPRAG, verification
from revela_hub.trainers.imprag.data import encode_rows, eos_of, tokenize_passages

Model = TypeVar("Model", bound=PreTrainedModel)
OPTIONS = {
    "b": "retrieval_layer",
    "t": "last_reading_layer",
    "k": "num_passages",
    "l_max": "max_passage_length",
    "passage_encoding": "passage_encoding",
}
"""Names of the fields of `ImpRAGConfig` as options and arguments."""


@dataclass
class ImpRAGCheckpoint:
    """A model and its tokenizer."""

    model: ImpRAGForCausalLM
    tokenizer: PreTrainedTokenizerBase


def is_imprag(name: str | Path) -> bool:
    """Return whether a folder or a model on the Hub is an ImpRAG model."""
    with suppress(OSError, ValueError):  # does not exist, or is not the name of a model
        return bool((model_json(name, "config.json") or {}).get("model_type") == ImpRAGConfig.model_type)
    return False


def load_imprag(
    backbone: ModelLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> ImpRAGCheckpoint:
    """Load a model to train: a decoder, or an ImpRAG model to train further.

    Settings are the fields of `ImpRAGConfig`, by their own names or those of `OPTIONS`, and of a decoder `attn_implementation` and `dtype`.
    With None, the model's own setting or the default is used.
    """
    check_fields(settings, *config_fields(ImpRAGConfig), "attn_implementation", "dtype", *OPTIONS.values())
    fields = {option: field for field, option in OPTIONS.items()}
    given = {fields.get(key, key): value for key, value in settings.items() if value is not None}
    start, name = unwrapped(backbone), name_of(backbone)
    with loading(f"cannot make an ImpRAG model of {name!r}", name):
        if isinstance(start, str) and is_imprag(name):
            loaded = load_imprag_checkpoint(name)
            for key, value in given.items():
                if key in ("b", "t") and getattr(loaded.model.config, key) != value:
                    own = getattr(loaded.model.config, key)
                    raise UserError(f"{name} was trained with {OPTIONS[key]} {own}, which cannot be changed to {value}")
                setattr(loaded.model.config, key, value)
            return loaded
        if isinstance(start, str) and is_encoder(start, trust_remote_code=trust_remote_code):
            raise UserError(f"the backbone {name!r} is an encoder: give a decoder, which predicts the next token")
        model: Any = ImpRAGForCausalLM.from_backbone(start, trust_remote_code=trust_remote_code, **given)
        return ImpRAGCheckpoint(model, tokenizer_of(backbone, tokenizer, trust_remote_code=trust_remote_code))


def load_imprag_checkpoint(folder: str | Path, dtype: torch.dtype | str = torch.float32) -> ImpRAGCheckpoint:
    """Load a folder that `ImpRAGTrainer` saved, or a published model, in eval mode, with adapters merged.

    The classes of this package are used; code in the folder is not run.

    Args:
        folder: folder or Hub id.
        dtype: of the weights; "auto" for the dtype in config.json. Adapters and their base model are always in float32.
    """
    folder = local_path(folder)
    if not is_imprag(folder):
        raise UserError(f"{folder} is not an ImpRAG model (its config.json has no model_type imprag)")
    with loading(f"cannot load {folder}", folder):
        adapters = (folder / "adapter_model.safetensors").is_file()
        model = _with_adapters(folder) if adapters else load_whole(ImpRAGForCausalLM, folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)
    return ImpRAGCheckpoint(model.eval(), tokenizer)


def _with_adapters(folder: Path) -> ImpRAGForCausalLM:
    config = ImpRAGConfig.from_pretrained(folder)
    base = str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path)
    fields = {name: getattr(config, name) for name in OPTIONS}
    merged: ImpRAGForCausalLM = merge(load_adapters(load_imprag(base, **fields).model, folder))
    merged.requires_grad_(True)  # the adapters froze the decoder
    merged.config.name_or_path = str(folder)  # adapters that are trained next are recorded on top of these
    return merged


def assemble_imprag(loaded: ImpRAGCheckpoint, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write the whole model, which is retriever and reader in one, with adapters merged."""
    backbone = loaded.model.config.backbone
    base = None if backbone is None else backbone.name_or_path
    save_backbone(loaded.model, folder, dtype=assembly.dtype)
    forget_origins(folder, "backbone")
    save_tokenizer(loaded.tokenizer, folder)
    # Vectors of the probe texts, and states that read them, for the verification of the folder.
    model, tokenizer = loaded.model, loaded.tokenizer
    tokenizer.model_max_length = length = text_limit(model, tokenizer)
    texts = [text or "a" for text in probe_texts(length)]  # as in the verification: an empty text has no vector
    vectors = {
        kind: torch.cat([verification.vectors(model, tokenizer, kind, [text]) for text in texts])
        for kind in ("query", "document")
    }
    return Assembled(folder, IMPRAG, base, write_reference(folder, vectors, length), remote_code=True)


class ImpRAGEncoder:
    """Encoder of texts: prompts are queries, passages are documents, and the similarity is the dot product."""

    similarity_fn_name = "dot"

    def __init__(self, model: ImpRAGForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.device = model.device
        self.cut = 0  # number of passages so far that were longer than l_max

    def tokenize(self, texts: Sequence[str], task: str) -> list[Any]:
        """Return the tokens of prompts (task `query`), or of passages, cut at the model's l_max (`document`)."""
        if task == "query":
            return [ids or [eos_of(self.tokenizer)] for ids in self.tokenizer(list(texts))["input_ids"]]
        passages, cut = tokenize_passages(self.tokenizer, texts, self.model.config.l_max)
        self.cut += cut
        return passages

    def encode_query(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Return the (N, E) vectors of N prompts."""
        with evaluating(self.model):
            rows = self.tokenize(inputs, "query")
            return encode_rows(self.model.embed_queries, rows, self.model.device, batch_size)

    def encode_document(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Return the (N, E) vectors of N passages."""
        with evaluating(self.model):
            rows = self.tokenize(inputs, "document")
            return encode_rows(self.model.embed_passages, rows, self.model.device, batch_size)

    def warnings(self) -> list[str]:
        """Return warnings about the texts encoded so far."""
        limit = self.model.config.l_max
        note = f"{self.cut:,} passages are longer than the model's {limit} tokens and are cut: lower max_words"
        return [note] if self.cut else []


def load_imprag_encoder(name: str, device: str | None = None) -> ImpRAGEncoder:
    """Load the encoder of a model, given as folder or Hub id."""
    loaded = load_imprag_checkpoint(name, dtype="auto")
    return ImpRAGEncoder(on_device(loaded.model, device), loaded.tokenizer)


def on_device(model: Model, device: str | None) -> Model:
    """Move a model to a device, by default the fastest one, with a dtype that is fast there."""
    if device is None and torch.accelerator.is_available():
        device = str(torch.accelerator.current_accelerator())
    model.to(torch.device(device or "cpu"))  # type: ignore[arg-type]  # its decorator hides the argument types
    return in_fast_precision(model)
