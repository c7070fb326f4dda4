"""From a trained checkpoint to the folder that is published, with the vectors that the folder has to give."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from revela_hub.errors import UserError
from revela_hub.hub_cards.card import write_card
from revela_hub.hub_cards.export import (
    RetrieverSettings,
    model_type,
    save_backbone,
    save_settings,
    save_tokenizer,
    with_pooler,
)
from revela_hub.hub_cards.facts import Figure, ModelCardFacts
from revela_hub.hub_cards.figures import training_curve
from revela_hub.hub_cards.verify.model import probe_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from revela_hub.trainers import RevelaBackbones

Part = Literal["retriever", "lm", "model"]

CARD_FACTS = "card.yaml"  # in a checkpoint: the facts of its card, in the form of `ModelCardFacts`
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class Assembly:
    """What to publish, and how to put it together.

    Attributes:
        part: the retriever as a sentence-transformers model, the language model, or both as one `RevelaForCausalLM`
            with its code.
        adapter_only: the retriever's LoRA adapter instead of the whole retriever.
        max_length: tokens the retriever keeps of a text, EOS included.
        dtype: type of the stored weights; None for the one they have.
        facts: of the card; None for those in the checkpoint's card.yaml.
        trust_remote_code: run the code that a finished model folder brings with it.
    """

    part: Part = "retriever"
    adapter_only: bool = False
    max_length: int = 2048
    dtype: torch.dtype | None = None
    facts: ModelCardFacts | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Assembled:
    """A folder ready to be verified: where it is, the vectors it has to give, and whether its code is to be run."""

    folder: Path
    reference: Path | None
    remote_code: bool
    adapter_of: str | None = None


def assemble(checkpoint: str | Path, work: Path, repo_id: str, assembly: Assembly) -> Assembled:
    """Puts the folder together under `work`, card included.

    Args:
        checkpoint: folder that a trainer saved, or a finished sentence-transformers folder, which is copied.
        work: an empty folder.
        repo_id: the id under which it will be on the Hub.
        assembly: what to put together.

    Raises:
        UserError: the checkpoint is none, or does not have what was asked for.
    """
    checkpoint, folder = Path(checkpoint), work / "model"
    if (checkpoint / "modules.json").is_file():
        if assembly.part != "retriever" or assembly.adapter_only:
            raise UserError(f"{checkpoint} is a finished model, not a checkpoint: it can only be published as it is")
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(".*", CARD_FACTS, "__pycache__"))
        assembled = Assembled(folder, None, assembly.trust_remote_code)
        facts = _facts(checkpoint, assembly, None, work)
        if facts != ModelCardFacts() or not (folder / "README.md").is_file():
            write_card(folder, facts, repo_id=repo_id)
        return assembled
    assemble_method = _assemble_retromae if model_type(checkpoint) == "retromae" else _assemble_revela
    assembled, method, base = assemble_method(checkpoint, work, assembly)
    write_card(folder, _facts(checkpoint, assembly, base, work, method), repo_id=repo_id)
    return assembled


class _Trained(NamedTuple):
    """A folder, the method that trained it, and the model it was trained from."""

    assembled: Assembled
    method: str
    base: str


def _assemble_revela(checkpoint: Path, work: Path, assembly: Assembly) -> _Trained:
    from revela_hub.trainers import load_checkpoint

    loaded, folder = load_checkpoint(checkpoint), work / "model"
    trained: Any = loaded.model.config.lm if assembly.part == "lm" else loaded.model.config.retriever
    base = trained._name_or_path
    if assembly.part == "retriever":
        assembled = _retriever(checkpoint, loaded, base, work, assembly)
    elif assembly.part == "lm":
        save_backbone(loaded.model.lm, folder, dtype=assembly.dtype)
        save_tokenizer(loaded.lm_tokenizer, folder)
        assembled = Assembled(folder, None, remote_code=False)
    else:
        save_backbone(loaded.model, folder, dtype=assembly.dtype)
        _forget_origins(folder / "config.json", ("retriever", "lm"))
        save_tokenizer(loaded.retriever_tokenizer, folder / "retriever_tokenizer")
        save_tokenizer(loaded.lm_tokenizer, folder / "lm_tokenizer")
        assembled = Assembled(folder, None, remote_code=True)
    return _Trained(assembled, "revela", base)


def _assemble_retromae(checkpoint: Path, work: Path, assembly: Assembly) -> _Trained:
    """The encoder with its first token as the vector, or all of it with the decoder, to pre-train further."""
    from revela_hub.trainers import load_retromae_checkpoint

    if assembly.part == "lm" or assembly.adapter_only:
        wrong = "an adapter" if assembly.adapter_only else "a separate language model"
        raise UserError(f"{checkpoint} is of RetroMAE, which has not {wrong}: publish the retriever or the model")
    loaded, folder = load_retromae_checkpoint(checkpoint), work / "model"
    base = loaded.model.config.encoder._name_or_path
    if assembly.part == "model":
        save_backbone(loaded.model, folder, dtype=assembly.dtype)
        _forget_origins(folder / "config.json", ("encoder",))
        save_tokenizer(loaded.tokenizer, folder)
        return _Trained(Assembled(folder, None, remote_code=True), "retromae", base)
    encoder = with_pooler(loaded.model.encoder)
    settings = RetrieverSettings("cls", {"query": "", "document": ""})
    settings = replace(settings, max_length=assembly.max_length)
    tokenizer = settings.tokenizer(loaded.tokenizer)
    save_backbone(encoder, folder, dtype=assembly.dtype)
    save_settings(settings, tokenizer, encoder.config, folder)

    def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return torch.nn.functional.normalize(hidden[:, 0], dim=-1)

    reference = _save_reference(embed, tokenizer, settings.prompts, work)
    return _Trained(Assembled(folder, reference, remote_code=False), "retromae", base)


def _retriever(checkpoint: Path, loaded: RevelaBackbones, base: str, work: Path, assembly: Assembly) -> Assembled:
    model, folder, adapter_of = loaded.model, work / "model", None
    settings = RetrieverSettings(model.config.pooling, model.config.prompts, assembly.max_length)
    tokenizer = settings.tokenizer(loaded.retriever_tokenizer)
    if assembly.adapter_only:
        adapter_of = _save_adapter(checkpoint, folder, base)
    else:
        save_backbone(model.retriever, folder, dtype=assembly.dtype)
    needed = {"peft": ">=0.18"} if assembly.adapter_only else {}
    save_settings(settings, tokenizer, model.retriever.config, folder, needed)
    return Assembled(folder, _save_reference(model.embed, tokenizer, settings.prompts, work), False, adapter_of)


def _forget_origins(file: Path, parts: tuple[str, ...]) -> None:
    """Takes out where the models were loaded from, which may be a folder of this machine; the card names the base."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in parts:
        config[part].pop("_name_or_path", None)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _save_reference(
    embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, str],
    work: Path,
) -> Path:
    """Writes the checkpoint's own vectors of the probe texts, which the folder has to give, too."""
    length = json.loads((work / "model" / "sentence_bert_config.json").read_text(encoding="utf-8"))["max_seq_length"]
    texts = probe_texts(length)
    vectors = {}
    for kind, prompt in prompts.items():
        parts = []
        for batch in (texts[:-1], texts[-1:]):  # the text that is cut would make all the others as long
            tokens = tokenizer(
                [prompt + text for text in batch], padding=True, truncation=True, max_length=length, return_tensors="pt"
            )
            with torch.no_grad():
                parts.append(embed(tokens["input_ids"], tokens["attention_mask"]).float())
        vectors[kind] = torch.cat(parts)
    save_file(vectors, work / "reference.safetensors")
    return work / "reference.safetensors"


def _save_adapter(checkpoint: Path, folder: Path, base: str) -> str:
    """Writes the retriever's part of the LoRA weights as a PEFT repository, and returns the model it belongs to.

    Raises:
        UserError: the checkpoint has no adapters, or they belong to a model that is not on the Hub.
    """
    from peft import LoraConfig

    weights = checkpoint / "adapter_model.safetensors"
    if not weights.is_file():
        raise UserError(f"{checkpoint} has no adapter_model.safetensors: it was trained in full, publish it whole")
    if not HUB_ID.fullmatch(base) or Path(base).exists():
        raise UserError(
            f"the adapter belongs to {base or 'a model without a name'}, which is not a Hub id, so nobody else could load it:"
            " publish the whole model (without --adapter-only), or train from a model on the Hub"
        )
    inner, outer = "base_model.model.", "base_model.model.retriever."
    tensors = {
        inner + key.removeprefix(outer): value for key, value in load_file(weights).items() if key.startswith(outer)
    }
    config = LoraConfig.from_pretrained(str(checkpoint))
    config.target_modules = sorted({key.removeprefix(inner).partition(".lora_")[0] for key in tensors})
    config.base_model_name_or_path, config.revision, config.auto_mapping = base, None, None
    config.task_type = "FEATURE_EXTRACTION"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return base


def _facts(
    checkpoint: Path, assembly: Assembly, base: str | None, work: Path, method: str | None = None
) -> ModelCardFacts:
    """The card's facts: those given, or those in the checkpoint, and what the checkpoint itself tells."""
    facts = assembly.facts
    if facts is None:
        file = checkpoint / CARD_FACTS
        facts = ModelCardFacts.from_file(file) if file.is_file() else ModelCardFacts()
    if base is not None:
        facts = replace(facts, method=facts.method or method)
        if facts.base_model is None and HUB_ID.fullmatch(base) and not Path(base).exists():
            facts = replace(facts, base_model=base)
    state = checkpoint / "trainer_state.json"
    if not facts.figures and state.is_file() and find_spec("matplotlib"):
        picture = work / "training_curve.png"
        if training_curve(json.loads(state.read_text(encoding="utf-8"))["log_history"], picture):
            facts = replace(facts, figures=(Figure(str(picture), "Training loss"),))
    return facts
