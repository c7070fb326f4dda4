"""What the folder for readers is made of, whatever trained it: its parts, the vectors it has to give, the facts of its card."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from revela_hub.errors import UserError
from revela_hub.hub_cards.card import CARD_FACTS, OURS
from revela_hub.hub_cards.export import make_readable
from revela_hub.hub_cards.facts import Figure, ModelCardFacts
from revela_hub.hub_cards.figures import training_curve
from revela_hub.hub_cards.method import Method, Part
from revela_hub.hub_cards.verify.consistency import contradictions
from revela_hub.hub_cards.verify.contents import Contents, contents, read_json
from revela_hub.hub_cards.verify.kinds import content_faults
from revela_hub.hub_cards.verify.texts import probe_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In a folder that was made of a checkpoint: the vectors that it has to give. Hidden, so that no reader takes it for weights.
REFERENCE = f"{OURS}/reference.safetensors"
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
        timeout: seconds that the verification may take; None for what the size of the weights asks for.
    """

    part: Part = "retriever"
    adapter_only: bool = False
    max_length: int | None = None
    dtype: torch.dtype | None = None
    facts: ModelCardFacts | None = None
    trust_remote_code: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Assembled:
    """A folder ready to be verified.

    Attributes:
        folder: where it is.
        method: that trained it; None for a finished folder, whose own card says it.
        base: the model it was trained from, a Hub id or a folder.
        reference: safetensors file of the vectors it has to give.
        vectors: the file of the method's record that makes them, see `Method.vectors`.
        remote_code: whether the verification runs the folder's code.
        adapter_of: the base, where the folder holds an adapter alone.
        own_card: for a finished folder with a card of other hands, which stays unless the facts are others than these.
        stays: path -> why, for what the checkpoint holds and the folder does not.
        timeout: seconds that its verification may take; None for what the size of the weights asks for.
    """

    folder: Path
    method: Method | None = None
    base: str | None = None
    reference: Path | None = None
    vectors: Path | None = None
    remote_code: bool = False
    adapter_of: str | None = None
    own_card: ModelCardFacts | None = None
    stays: dict[str, str] = field(default_factory=dict)
    timeout: float | None = None


# (checkpoint, folder, assembly) -> what was written into that folder, which is not there yet.
Assemble = Callable[[Path, Path, Assembly], Assembled]


def assemble_part(method: Method, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Writes a part of a checkpoint; see `assemble_parts`."""
    return assemble_parts(method, checkpoint, {folder: assembly.part}, assembly)[0]


def assemble_parts(
    method: Method, checkpoint: Path, parts: Mapping[Path, Part], assembly: Assembly, loaded: object = None
) -> list[Assembled]:
    """Writes parts of a checkpoint by the method's own functions. A method without a retriever writes its first part for it.

    Args:
        method: that saved the checkpoint.
        checkpoint: its folder.
        parts: folder to write, which is not there yet -> the part.
        assembly: what to make of it; its `part` does not count.
        loaded: what `method.loader` returns, where it is in memory; by default it is loaded, once for all parts.

    Raises:
        UserError: the method has no such part, or its adapter cannot be published alone.
    """
    trained_with = f"{checkpoint} was trained with {method.title}"
    wanted = {}
    for folder, part in parts.items():
        wanted[folder] = method.parts[0] if part == "retriever" and part not in method.parts else part
        if wanted[folder] not in method.parts:
            raise UserError(f"{trained_with}: its parts are {', '.join(method.parts)}, not {part}")
    if assembly.adapter_only and not method.adapter_only:
        raise UserError(f"{trained_with}: its adapter cannot be published alone")
    if loaded is None:
        loaded = resolve_name(method.loader)(str(checkpoint))
    write = resolve_name(method.assembler)
    return [write(loaded, checkpoint, folder, replace(assembly, part=part)) for folder, part in wanted.items()]


def export_parts(
    method: Method, checkpoint: Path, output: Path, *, lm: bool = False, assembly: Assembly | None = None
) -> list[Path]:
    """Writes the folders of a method from a checkpoint, and returns those that get a card: all but the language model."""
    parts = {output / folder: part for folder, part in method.folders.items()}
    assemble_parts(method, checkpoint, ({output / "lm": "lm"} if lm else {}) | parts, assembly or Assembly())
    return list(parts)


def copy_finished(checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Copies what belongs to the model of a finished sentence-transformers folder.

    Raises:
        UserError: a part of it is asked for, or a link leaves it.
    """
    if assembly.part != "retriever" or assembly.adapter_only:
        raise UserError(f"{checkpoint} is a finished model, not a checkpoint: it can only be published as it is")
    found, reference = contents(checkpoint), checkpoint / REFERENCE
    unread = content_faults(checkpoint, sorted(found.goes))
    faults = (found.links, contradictions(checkpoint, found), _pickled_modules(found), unread)
    for fault in chain.from_iterable(faults):
        raise UserError(f"{checkpoint}: {fault}")
    found.copy_to(folder)
    by_hand = (checkpoint / "README.md").is_file() and not _is_our_card(checkpoint)
    return Assembled(
        folder,
        reference=reference if reference.is_file() else None,
        remote_code=assembly.trust_remote_code,
        own_card=ModelCardFacts() if by_hand else None,
        stays=found.stays,
    )


def _pickled_modules(found: Contents) -> Iterator[str]:
    """Modules that have nothing but pickled weights, which stay: readers could not load the model."""
    whole = {Path(name).parent for name in found.goes if name.endswith(".safetensors")}
    modules = {Path(name).parent for name in found.goes} - whole - {Path()}
    for name in found.pickles:
        if Path(name).parent in modules:
            yield f"{name} is a pickle, which can run code on the reader's machine: save the module as safetensors"


def _is_our_card(folder: Path) -> bool:
    """Whether the card is the one that `write_card` wrote, so that it may be written anew for another name."""
    kept, card = folder / OURS / "README.md", folder / "README.md"
    return kept.is_file() and kept.read_bytes() == card.read_bytes()


def save_reference(
    embed: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, str],
    folder: Path,
) -> Path:
    """Writes the checkpoint's own vectors of the probe texts, which the folder has to give, too.

    Args:
        embed: the trained model's own way from token ids and mask (n, length), and the prompt that they begin with, to
            vectors (n, d), as they are returned to readers.
        tokenizer: as it was trained with.
        prompts: of `query` and `document`, or of `text` for a model without.
        folder: what was written for readers.
    """
    settings = read_json(folder / "sentence_bert_config.json") or {}
    length = settings.get("max_seq_length", tokenizer.model_max_length)
    vectors: dict[str, torch.Tensor] = {}
    for kind in ("query", "document", "text"):
        if kind not in prompts:
            continue
        # An empty text has no token to read where the tokenizer adds none of its own.
        parts, texts = [], [text or ("a" if kind == "text" else "") for text in probe_texts(length)]
        for batch in (texts[:-1], texts[-1:]):  # the text that is cut would make all the others as long
            tokens = tokenizer(
                [prompts[kind] + text for text in batch],
                padding=True,
                truncation=True,
                max_length=length,
                return_tensors="pt",
            )
            with torch.no_grad():
                parts.append(embed(tokens["input_ids"], tokens["attention_mask"], prompts[kind]).float())
        vectors[kind] = torch.cat(parts)
    return write_reference(folder, vectors, length)


def write_reference(folder: Path, vectors: dict[str, torch.Tensor], max_length: int) -> Path:
    """Keeps what `probe_texts(max_length)` give, (n_texts, d) for each kind of input, beside the model."""
    settings = read_json(folder / "config_sentence_transformers.json") or {}
    facts = {"max_length": str(max_length), "similarity": settings.get("similarity_fn_name")}
    file = folder / REFERENCE
    file.parent.mkdir(exist_ok=True)
    # One entry: safetensors writes several in a random order.
    save_file(vectors, file, metadata={"settings": json.dumps({name: fact for name, fact in facts.items() if fact})})
    make_readable(file.parent)
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
            " publish the whole model (without --adapter_only), or train from a model on the Hub"
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
    make_readable(folder)
    return base


def forget_origins(folder: Path, *parts: str) -> None:
    """Takes out where the models were loaded from, which may be a folder of this machine; the card names the base."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in parts:
        config[part].pop("_name_or_path", None)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def card_facts(
    checkpoint: Path,
    assembled: Assembled,
    given: ModelCardFacts | None,
    work: Path,
    methods: Mapping[str, Method],
) -> ModelCardFacts:
    """The card's facts: those given, or those in the checkpoint, and what the checkpoint itself tells.

    Args:
        checkpoint: what was assembled.
        assembled: what came out.
        given: facts that go before the checkpoint's card.yaml.
        work: a folder for the picture of the run.
        methods: the known methods, by name.
    """
    facts, files = given, [checkpoint / CARD_FACTS]
    if assembled.own_card is None:
        files.append(checkpoint / OURS / CARD_FACTS)
    if facts is None:
        file = next((file for file in files if file.is_file()), None)
        facts = ModelCardFacts.from_file(file, methods) if file else ModelCardFacts()
    facts = replace(facts, method=facts.method or assembled.method)
    base = assembled.base
    if base and facts.base_model is None and HUB_ID.fullmatch(base) and not Path(base).exists():
        facts = replace(facts, base_model=base)
    state = read_json(checkpoint / "trainer_state.json")
    history = state.get("log_history") if isinstance(state, dict) else None
    if not facts.figures and history:
        picture = work / "training_curve.png"
        if training_curve(history, picture):
            facts = replace(facts, figures=(Figure(str(picture), "Training loss"),))
    return facts
