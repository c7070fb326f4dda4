"""What the folder for readers is made of, whatever trained it: its parts, the vectors it has to give, the facts of its card."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors.torch import load_file, save_file

from revela_hub.errors import UserError
from revela_hub.hub_cards.facts import Figure, ModelCardFacts
from revela_hub.hub_cards.figures import training_curve
from revela_hub.hub_cards.verify.model import probe_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = Literal["retriever", "sparse", "lm", "model"]

# In a folder that was made of a checkpoint: the vectors that it has to give. Hidden, so that no reader takes it for weights.
REFERENCE = ".revela_hub/reference.safetensors"
CARD_FACTS = "card.yaml"  # in a checkpoint: the facts of its card, in the form of `ModelCardFacts`
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class Assembly:
    """What to make of a checkpoint.

    Attributes:
        part: the retriever as a sentence-transformers model, its sparse form, the language model, or all of it with its
            code.
        adapter_only: the retriever's LoRA adapter instead of the whole retriever.
        max_length: tokens the retriever keeps of a text, EOS included; None for what the checkpoint says.
        dtype: type of the stored weights; None for the one they have.
        facts: of the card; None for those in the checkpoint's card.yaml.
        trust_remote_code: run the code that a finished model folder brings with it.
    """

    part: Part = "retriever"
    adapter_only: bool = False
    max_length: int | None = None
    dtype: torch.dtype | None = None
    facts: ModelCardFacts | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Assembled:
    """A folder ready to be verified.

    Attributes:
        folder: where it is.
        method: that trained it, a key of `PAPERS`; None for a finished folder, whose own card says it.
        base: the model it was trained from, a Hub id or a folder.
        reference: safetensors file of the vectors it has to give.
        remote_code: whether the verification runs the folder's code.
        adapter_of: the base, where the folder holds an adapter alone.
    """

    folder: Path
    method: str | None = None
    base: str | None = None
    reference: Path | None = None
    remote_code: bool = False
    adapter_of: str | None = None


# A method's own: (checkpoint, folder, assembly) -> what it wrote into that folder, which is not there yet.
Assemble = Callable[[Path, Path, Assembly], Assembled]


def copy_finished(checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Copies a finished sentence-transformers folder.

    Raises:
        UserError: a part of it is asked for.
    """
    if assembly.part != "retriever" or assembly.adapter_only:
        raise UserError(f"{checkpoint} is a finished model, not a checkpoint: it can only be published as it is")
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(".*", CARD_FACTS, "__pycache__"))
    reference = checkpoint / REFERENCE
    return Assembled(
        folder, reference=reference if reference.is_file() else None, remote_code=assembly.trust_remote_code
    )


def save_reference(
    embed: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, str],
    folder: Path,
) -> Path:
    """Writes the checkpoint's own vectors of the probe texts, which the folder has to give, too.

    Args:
        embed: the trained model's own way from token ids and mask (n, length), and the prompt that they begin with, to
            vectors (n, d).
        tokenizer: as it was trained with.
        prompts: of queries and documents.
        folder: what was written for readers.
    """
    length = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))["max_seq_length"]
    texts = probe_texts(length)
    vectors = {}
    for kind in ("query", "document"):
        prompt, parts = prompts[kind], []
        for batch in (texts[:-1], texts[-1:]):  # the text that is cut would make all the others as long
            tokens = tokenizer(
                [prompt + text for text in batch], padding=True, truncation=True, max_length=length, return_tensors="pt"
            )
            with torch.no_grad():
                parts.append(embed(tokens["input_ids"], tokens["attention_mask"], prompt).float())
        vectors[kind] = torch.cat(parts)
    file = folder / REFERENCE
    file.parent.mkdir(exist_ok=True)
    save_file(vectors, file)
    return file


def save_adapter(checkpoint: Path, folder: Path, *, part: str, base: str) -> str:
    """Writes one part's LoRA weights as a PEFT repository, and returns the model it belongs to.

    Args:
        checkpoint: a folder with the adapters of the whole model.
        folder: where to write.
        part: name of the part in the whole model, `retriever`.
        base: what that part was trained from.

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
    inner, outer = "base_model.model.", f"base_model.model.{part}."
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


def forget_origins(folder: Path, *parts: str) -> None:
    """Takes out where the models were loaded from, which may be a folder of this machine; the card names the base."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in parts:
        config[part].pop("_name_or_path", None)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def card_facts(checkpoint: Path, assembled: Assembled, given: ModelCardFacts | None, work: Path) -> ModelCardFacts:
    """The card's facts: those given, or those in the checkpoint, and what the checkpoint itself tells.

    Args:
        checkpoint: what was assembled.
        assembled: what came out.
        given: facts that go before the checkpoint's card.yaml.
        work: a folder for the picture of the run.
    """
    facts, file = given, checkpoint / CARD_FACTS
    if facts is None:
        facts = ModelCardFacts.from_file(file) if file.is_file() else ModelCardFacts()
    facts = replace(facts, method=facts.method or assembled.method)
    base = assembled.base
    if base and facts.base_model is None and HUB_ID.fullmatch(base) and not Path(base).exists():
        facts = replace(facts, base_model=base)
    state = checkpoint / "trainer_state.json"
    if not facts.figures and state.is_file() and find_spec("matplotlib"):
        picture = work / "training_curve.png"
        if training_curve(json.loads(state.read_text(encoding="utf-8"))["log_history"], picture):
            facts = replace(facts, figures=(Figure(str(picture), "Training loss"),))
    return facts
