r"""NV-Embed as a sentence-transformers model: stock modules around remote code, live for training or as a folder.

`NVEmbedModel` returns its states after the latent attention, so `Pooling` and `Normalize` are sentence-transformers' own:
the mean (or the last token) of those states without the prompt's tokens.

Pooling leaves out as many tokens as the prompt has alone. A prompt such as "Instruct: ...\nQuery: " ends with a space,
which alone is a token but before a text is part of its first word: one token of the text would be left out, too. So the
tokenizer drops white space at the end of what it is given, by a stock normalizer in its tokenizer.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import normalizers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembled, Assembly, save_reference
from revela_hub.hub_cards.export import RetrieverSettings, save_backbone, save_settings, save_tokenizer
from revela_hub.hub_cards.tokenizers import text_length, with_eos
from revela_hub.modeling.modeling_nvembed import NVEmbedModel, exclude_instruction
from revela_hub.trainers.nvembed import NVEMBED
from revela_hub.trainers.nvembed.checkpoint import NVEmbedStart


def assemble_nvembed(loaded: NVEmbedStart, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Writes the embedder, adapters merged, with the code of this package."""
    model, tokenizer, prompts = loaded.model, loaded.tokenizer, loaded.prompts
    length = assembly.max_length or model.config.max_seq_length or 512
    export_nvembed(model, tokenizer, folder, max_length=length, prompts=prompts, dtype=assembly.dtype)
    tokenizer = nvembed_tokenizer(tokenizer)

    def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor, prompt: str) -> torch.Tensor:
        left_out = len(tokenizer(prompt)["input_ids"]) - 1 if prompt else 0  # without EOS
        pool_mask = exclude_instruction(attention_mask, left_out)
        vectors: torch.Tensor = model(input_ids, attention_mask, pool_mask).pooler_output
        return vectors

    model.eval()
    reference = save_reference(embed, tokenizer, {"query": "", "document": ""} | prompts, folder)
    base = model.config.text_config._name_or_path
    return Assembled(folder, NVEMBED, base, reference, remote_code=True)


def nvembed_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy that ends every text with EOS, pads on the right and drops white space at the end of a text.

    Applied twice it changes nothing more.

    Raises:
        UserError: the tokenizer has no end-of-sequence token, or is not a fast tokenizer.
    """
    tokenizer = with_eos(tokenizer)
    backend = tokenizer.backend_tokenizer
    if tokenizer("a: ")["input_ids"] != tokenizer("a:")["input_ids"]:
        strip = normalizers.Strip(left=False, right=True)
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([strip, *before])
    # The plain class, because Llama's, which Mistral has too, does not read the normalizer back from tokenizer.json. It
    # has no chat template either, which sentence-transformers would put around every text.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        padding_side="right",
        truncation_side="right",
        **tokenizer.special_tokens_map,
    )


def nvembed_encoder(
    model: NVEmbedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 512,
    prompts: dict[str, str],
) -> SentenceTransformer:
    """A sentence-transformers model around the given one, to be trained or used: `encoder[0].model is model`.

    What its `save` writes loads with `SentenceTransformer(folder, trust_remote_code=True)`. The model's configuration gets
    the maximum length, and the correct instruction mask.

    Args:
        model: the model, which is not copied.
        tokenizer: the decoder's; it is copied, and made to end texts with EOS.
        max_length: tokens kept of prompt and text, EOS included.
        prompts: text put before every input, under the names `query` and `document` (by default none) and of tasks.

    Raises:
        UserError: a prompt leaves no room for text, or the tokenizer has no EOS.
    """
    settings = _settings(model, prompts, max_length)
    tokenizer = nvembed_tokenizer(tokenizer)
    length = _checked_length(model, tokenizer, settings)
    model.config.max_seq_length, model.config.official_instruction_mask = length, False
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder), max_length=length)
        transformer = _LiveTransformer(folder, model)
    # Nothing of it is left to be special, and sentence-transformers saves a module under the name of its class.
    transformer.__class__ = Transformer
    mode: Any = "lasttoken" if settings.pooling == "last" else "mean"
    pooling = Pooling(model.config.hidden_size, pooling_mode=mode, include_prompt=False)
    return SentenceTransformer(
        modules=[transformer, pooling, Normalize()],
        prompts=dict(settings.prompts),
        similarity_fn_name="cosine",
        device=str(model.device),
        trust_remote_code=True,  # its checkpoints, which the trainer reads again when it resumes, hold our own code
    )


def export_nvembed(
    model: NVEmbedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    max_length: int = 512,
    prompts: dict[str, str],
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a folder that loads without this package, code included.

    `SentenceTransformer(folder, trust_remote_code=True)` gives the vectors of `NVEmbedModel` with the prompt's tokens left
    out; `AutoModel.from_pretrained(folder, trust_remote_code=True)` is the model itself, whose `encode` gives them, too.

    Args:
        model: the model, adapters merged.
        tokenizer: the decoder's; it is copied, and made to end texts with EOS.
        folder: where to write; made if it is not there.
        max_length: tokens kept of prompt and text, EOS included; lowered to what tokenizer and positions allow.
        prompts: text put before every input, under the names `query` and `document` (by default none) and of tasks.
        dtype: type of the stored weights; by default the one they have.

    Raises:
        UserError: a prompt leaves no room for text, the model still carries adapters, or the tokenizer has
            no EOS.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise UserError("the model still carries its LoRA adapters: merge them first (merge_and_unload)")
    settings, folder = _settings(model, prompts, max_length), Path(folder)
    tokenizer = nvembed_tokenizer(tokenizer)
    length = _checked_length(model, tokenizer, settings)
    save_backbone(model, folder, dtype=dtype)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"max_seq_length": length, "official_instruction_mask": False}
    config["text_config"].pop("_name_or_path", None)  # the tokenizer is in the folder itself
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_settings(settings, tokenizer, model.config, folder)
    return folder


class _LiveTransformer(Transformer):
    """sentence-transformers' module around a model that is there already: its constructor takes only names and folders."""

    def __init__(self, tokenizer_folder: str, model: NVEmbedModel) -> None:
        # torch forbids modules as attributes before its own constructor has run.
        self.__dict__["_live"] = model
        super().__init__(tokenizer_folder)
        del self.__dict__["_live"]

    def _load_config(self, *args: Any, **kwargs: Any) -> tuple[PreTrainedConfig, bool]:
        return self.__dict__["_live"].config, False

    def _load_model(self, *args: Any, **kwargs: Any) -> PreTrainedModel:
        model: PreTrainedModel = self.__dict__["_live"]
        return model


def _settings(model: NVEmbedModel, prompts: dict[str, str], max_length: int) -> RetrieverSettings:
    pooling = "last" if model.config.pooling == "eos" else "mean"
    prompts = {"query": "", "document": ""} | prompts
    return RetrieverSettings(pooling, prompts, max_length, include_prompt=False)  # type: ignore[arg-type]


def _checked_length(model: NVEmbedModel, tokenizer: PreTrainedTokenizerBase, settings: RetrieverSettings) -> int:
    """The maximum length, lowered to what tokenizer and positions allow, after a look at the prompts."""
    length = text_length(model.config.text_config, tokenizer, settings.max_length)
    for name, prompt in settings.prompts.items():
        tokens = len(tokenizer(prompt)["input_ids"])
        if prompt and tokens >= length:
            raise UserError(
                f"the prompt {name!r} has {tokens} tokens, EOS included, which leaves no room for text in {length}:"
                " shorten it or raise max_length"
            )
    return length
