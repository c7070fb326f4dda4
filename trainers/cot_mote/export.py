"""What a CoT-MoTE checkpoint becomes for its readers: dense routes, sparse routes, or the whole by its own code."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from revela_hub.hub_cards.assemble import Assembled, Assembly, write_reference
from revela_hub.hub_cards.cot_mote import EXPERTS, export_model, export_routes
from revela_hub.hub_cards.tokenizers import padding_right
from revela_hub.hub_cards.verify.vectors import probe_texts
from revela_hub.modeling.modeling_cot_mote import CoTMoTEModel
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_checkpoint


def assemble_cot_mote(checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Writes one of the three forms of a checkpoint's encoder.

    Raises:
        UserError: the checkpoint is damaged.
    """
    loaded = load_cot_mote_checkpoint(checkpoint)
    model, tokenizer = loaded.encoder, loaded.tokenizer
    base = model.config.encoder._name_or_path
    length = assembly.max_length or model.config.max_seq_length
    if assembly.part == "model":
        export_model(model, tokenizer, folder, max_length=length, dtype=assembly.dtype)
    else:
        # One length for both kinds: a query is read as far as a passage is.
        export_routes(
            model,
            tokenizer,
            folder,
            sparse=assembly.part == "sparse",
            max_lengths=dict.fromkeys(EXPERTS, length),
            dtype=assembly.dtype,
        )
    reference = _save_reference(model, tokenizer, folder, assembly.part, min(length, model.max_length))
    return Assembled(folder, COT_MOTE, base, reference, remote_code=assembly.part == "model")


def _save_reference(
    model: CoTMoTEModel, tokenizer: PreTrainedTokenizerBase, folder: Path, part: str, length: int
) -> Path:
    """Writes the checkpoint's own vectors of the probe texts, which the folder has to give, too."""
    texts, tokenizer, vectors = probe_texts(length), padding_right(tokenizer), {}
    for task, expert in EXPERTS.items():
        parts = []
        for batch in (texts[:-1], texts[-1:]):  # the text that is cut would make all the others as long
            tokens = tokenizer(batch, padding=True, truncation=True, max_length=length, return_tensors="pt")
            with torch.no_grad():
                output = model(tokens["input_ids"], tokens["attention_mask"], expert=expert)
            both = {"retriever": (output.pooler_output,), "sparse": (output.sparse,)}
            parts.append(torch.cat(both.get(part, (output.pooler_output, output.sparse)), dim=-1).float())
        vectors[task] = torch.cat(parts)
    return write_reference(folder, vectors, length)
