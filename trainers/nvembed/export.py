r"""Export NV-Embed as a sentence-transformers model with remote code, either in memory for training or as a folder.

`NVEmbedModel` returns its states after the latent attention, so the other modules are stock: `Pooling` takes the mean (or the last
token) of these states without the tokens of the prompt, and `Normalize` scales the result to length 1.

`Pooling` excludes as many tokens as the prompt has on its own. A prompt such as "Instruct: ...\nQuery: " ends with a space, which is a
token on its own, but part of the first word when a text follows: one token of the text would be excluded, too. The tokenizer
therefore removes white space at the end of its input, with a stock normalizer in tokenizer.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembled, Assembly, save_reference
from revela_hub.hub_cards.export import RetrieverSettings, save_backbone, save_settings, save_tokenizer
from revela_hub.hub_cards.tokenizers import plain, text_length, with_eos
from revela_hub.internals import transformer_around
from revela_hub.modeling.modeling_nvembed import NVEmbedModel, exclude_instruction
from revela_hub.paths import local_path
from revela_hub.scratch import scratch_folder
from revela_hub.trainers.nvembed import NVEMBED
from revela_hub.trainers.nvembed.checkpoint import NVEmbedStart


def assemble_nvembed(loaded: NVEmbedStart, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write the embedder with its code, with adapters merged."""
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
    base = model.config.text_config.name_or_path
    return Assembled(folder, NVEMBED, base, reference, remote_code=True)


def nvembed_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy that appends EOS to every text, pads on the right and removes white space at the end of a text.

    The function can be applied twice.

    Raises:
        UserError: the tokenizer has no end-of-sequence token, or is not a fast tokenizer.
    """
    tokenizer = with_eos(tokenizer)
    backend = tokenizer.backend_tokenizer
    if tokenizer("a: ")["input_ids"] != tokenizer("a:")["input_ids"]:
        strip = normalizers.Strip(left=False, right=True)
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([strip, *before])
    # The plain class, because that of Llama and Mistral does not load the normalizer from tokenizer.json. It also has no chat
    # template, which sentence-transformers would apply to every text.
    return plain(tokenizer)


def nvembed_encoder(
    model: NVEmbedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 512,
    prompts: dict[str, str],
) -> SentenceTransformer:
    """Return a sentence-transformers model around a model, for training or use: `encoder[0].model is model`.

    The folder written by its `save` loads with `SentenceTransformer(folder, trust_remote_code=True)`. The maximum length and the
    correct instruction mask are set in the model's configuration.

    Args:
        model: model, which is not copied.
        tokenizer: tokenizer of the decoder; a copy that appends EOS is used.
        max_length: maximum tokens of prompt and text, EOS included.
        prompts: texts put before inputs, under the names `query` and `document` (by default empty) and those of tasks.

    Raises:
        UserError: a prompt leaves no room for text, or the tokenizer has no EOS.
    """
    settings = _settings(model, prompts, max_length)
    tokenizer = nvembed_tokenizer(tokenizer)
    length = _checked_length(model, tokenizer, settings)
    model.config.max_seq_length, model.config.official_instruction_mask = length, False
    with scratch_folder("export") as folder:
        save_tokenizer(tokenizer, folder, max_length=length)
        transformer = transformer_around(model, str(folder))
    mode: Any = "lasttoken" if settings.pooling == "last" else "mean"
    similarity: Any = settings.similarity_fn_name
    pooling = Pooling(model.config.hidden_size, pooling_mode=mode, include_prompt=False)
    return SentenceTransformer(
        modules=[transformer, pooling, Normalize()],
        prompts=dict(settings.prompts),
        similarity_fn_name=similarity,
        device=str(model.device),
        trust_remote_code=True,  # checkpoints, which a resumed run loads, contain our code
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
    """Write a folder that loads without this package, with its code.

    `SentenceTransformer(folder, trust_remote_code=True)` and the `encode` method of
    `AutoModel.from_pretrained(folder, trust_remote_code=True)` return the vectors of `NVEmbedModel`, which exclude the tokens of the
    prompt.

    Arguments and errors are those of `nvembed_encoder`; the model must have no adapters that are not merged.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise UserError("the model has LoRA adapters: merge them first (merge_and_unload)")
    settings, folder = _settings(model, prompts, max_length), local_path(folder)
    tokenizer = nvembed_tokenizer(tokenizer)
    length = _checked_length(model, tokenizer, settings)
    save_backbone(model, folder, dtype=dtype)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"max_seq_length": length, "official_instruction_mask": False}
    config["text_config"].pop("_name_or_path", None)  # the tokenizer is in the folder itself
    if "use_cache" in config["text_config"]:
        config["text_config"]["use_cache"] = False  # an embedder generates nothing
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_settings(settings, tokenizer, model.config, folder)
    return folder


def _settings(model: NVEmbedModel, prompts: dict[str, str], max_length: int) -> RetrieverSettings:
    pooling = "last" if model.config.pooling == "eos" else "mean"
    prompts = {"query": "", "document": ""} | prompts
    return RetrieverSettings(
        pooling,  # type: ignore[arg-type]
        prompts,
        max_length,
        include_prompt=False,
        similarity_fn_name="cosine",
    )


def _checked_length(model: NVEmbedModel, tokenizer: PreTrainedTokenizerBase, settings: RetrieverSettings) -> int:
    """Return the maximum length, lowered to the limits of tokenizer and model, and check that prompts leave room for text."""
    length = text_length(model.config.text_config, tokenizer, settings.max_length)
    for name, prompt in settings.prompts.items():
        tokens = len(tokenizer(prompt)["input_ids"])
        if prompt and tokens >= length:
            raise UserError(
                f"the prompt {name!r} has {tokens} tokens, EOS included, which leaves no room for text in {length}:"
                " shorten it or raise max_length"
            )
    return length
