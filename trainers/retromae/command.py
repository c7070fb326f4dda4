"""Pre-train an encoder for retrieval on raw text, without labels, with RetroMAE (arXiv 2205.12035).

The encoder is trained so that a one-layer decoder can reconstruct a passage from its embedding. It starts from a
BERT-like encoder (a missing masked-LM head is initialised randomly) or from the output of an earlier run. Fine-tune
the result on pairs: on its own it is a weak retriever.

Writes to --output_dir: the model with its decoder; encoder/ for SentenceTransformer(...), with [CLS] pooling and its
model card; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train retromae --data path/to/texts --encoder google-bert/bert-base-uncased --output_dir outputs/my-texts
  revela-hub train retromae --config examples/retromae/pretrain.yaml --max_steps 500
  accelerate launch --num_processes 8 -m revela_hub train retromae --config examples/retromae/pretrain.yaml
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import Layers
from revela_hub.trainers.base.arguments import ProbeArguments, check_positions
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.base.run_probe import hold_out_text
from revela_hub.trainers.retromae import RETROMAE
from revela_hub.trainers.retromae.checkpoint import load_retromae_encoder
from revela_hub.trainers.retromae.data import RetroMAEDataArguments, RetroMAETrainingArguments, load_spans
from revela_hub.trainers.retromae.trainer import RetroMAETrainer


@dataclass(kw_only=True)
class Arguments(ProbeArguments, RetroMAEDataArguments, RetroMAETrainingArguments):  # type: ignore[misc] # its eval_strategy may be left open
    """Arguments of `revela-hub train retromae`: the model, then the data's, then those of every transformers Trainer."""

    encoder: str = required("Model to pre-train: Hub id or folder of an encoder.")
    output_dir: str = option("outputs/retromae", "Output folder.")
    decoder: Literal["enhanced", "basic", "none"] = option(
        "enhanced",
        "How the passage is reconstructed: enhanced (all tokens), basic (masked tokens only) or none (plain MLM).",
    )
    decoder_layers: Layers = option(1, "Number of layers of a basic decoder.")
    attn_implementation: str | None = option(
        None, "Attention implementation of the encoder, e.g. eager or flash_attention_2 (default: sdpa)."
    )
    trust_remote_code: bool = option(
        False, "Allow tokenizers to run their own code; models have to be supported by transformers."
    )

    def __post_init__(self) -> None:
        """Export the last step: how well a pre-trained encoder retrieves before fine-tuning does not select."""
        self.export = self.export or "last"
        super().__post_init__()


def run(arguments: Arguments) -> None:
    """Pre-train, export and print the paths of the results."""
    folder = train(arguments)
    if arguments.should_save:
        print(f"\nencoder: {folder / 'encoder'}\nwith its decoder, to pre-train further: {folder}")
        print("next: ", command_line("train", "pairs", "--retriever", folder / "encoder", "--pairs", "FILE"))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `RetroMAETrainer`, such as `callbacks`."""
    with open_run(RETROMAE, arguments) as run:
        if run.finished:
            return run.output
        held_out = hold_out_text(arguments)
        loaded = load_retromae_encoder(
            arguments.encoder,
            trust_remote_code=arguments.trust_remote_code,
            attn_implementation=arguments.attn_implementation,
            decoder=arguments.decoder,
            decoder_layers=arguments.decoder_layers,
        )
        check_positions(arguments.encoder, loaded.model.max_length, arguments.max_length)
        # The published model keeps the length that it was trained with.
        loaded.model.config.max_seq_length = arguments.max_length
        spans, report = run.read(*load_spans(arguments, loaded.tokenizer, held_out.folder))
        trainer = RetroMAETrainer(
            loaded.model,
            arguments,
            processing_class=loaded.tokenizer,
            encoder_mask_ratio=arguments.encoder_mask_ratio,
            decoder_mask_ratio=arguments.decoder_mask_ratio,
            train_dataset=spans,
            retrieval_task=held_out.task,
            **trainer_options,
        )
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
        return run.output
