r"""Train a hybrid retriever with query and passage experts, CoT-MoTE (arXiv 2304.10195).

--stage pretrain needs raw text only. Queries and passages share self-attention but have separate feed-forward
experts. The dense and the sparse vector of a span are trained so that a one-layer decoder can generate a related
span: a neighbouring one, an overlapping one or a pseudo-query.

--stage finetune needs queries with passages and hard negatives, and trains the sum of the dense and the sparse score.
As in the paper, fine-tune with BM25 negatives first, then again from the pre-trained weights with negatives mined by
that model.

Writes to --output_dir: the model; dense/ for SentenceTransformer(...), sparse/ for SparseEncoder(...) and model/ for
AutoModel, with their model cards; checkpoint-*/ (resume with --resume_from_checkpoint last).

Examples:
  revela-hub train cot-mote --data path/to/texts --encoder google-bert/bert-base-uncased --output_dir outputs/pretrained
  revela-hub mine bm25 --pairs pairs.jsonl --corpus corpus.jsonl --num_negatives 15 --output bm25.jsonl
  revela-hub train cot-mote --stage finetune --encoder outputs/pretrained --pairs bm25.jsonl --output_dir outputs/first
  revela-hub mine outputs/first/dense --mode hybrid --parts dense sparse --fusion sum --sparse_model outputs/first/sparse \
      --pairs pairs.jsonl --corpus corpus.jsonl --num_negatives 15 --output mined.jsonl
  revela-hub train cot-mote --stage finetune --encoder outputs/pretrained --pairs mined.jsonl --output_dir outputs/second
  accelerate launch -m revela_hub train cot-mote --config examples/cot-mote/pretrain.yaml
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import Layers, PositiveInt
from revela_hub.trainers.base.arguments import check_positions
from revela_hub.trainers.base.run import open_run
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.cot_mote.checkpoint import CoTMoTECheckpoint, load_cot_mote_start
from revela_hub.trainers.cot_mote.data import (
    CoTMoTEDataArguments,
    CoTMoTETrainingArguments,
    load_contexts,
    load_pairs,
)
from revela_hub.trainers.cot_mote.trainer import CoTMoTEFinetuner, CoTMoTETrainer

BOTTLENECKS = {"dense": ["dense"], "sparse": ["sparse"], "both": ["dense", "sparse"]}


@dataclass(kw_only=True)
class Arguments(CoTMoTEDataArguments, CoTMoTETrainingArguments):
    """Arguments of `revela-hub train cot-mote`: the model, then the data's, then those of every transformers Trainer."""

    encoder: str = required("Model to start from: Hub id or folder of an encoder, or the output of an earlier run.")
    output_dir: str = option("outputs/cot-mote", "Output folder.")
    variant: Literal["experts", "separate", "siamese"] | None = option(
        None, "Form of a new model: shared attention with two experts, two encoders, or one (default: experts)."
    )
    query_encoder: str | None = option(None, "Encoder that initialises the query side, for --variant separate.")
    decoder: Literal["ar", "ae", "none"] | None = option(
        None,
        "pretrain: decoder objective: ar (next tokens), ae (masked tokens, as in CoT-MAE) or none (default: ar).",
    )
    decoder_layers: Layers | None = option(None, "pretrain: Number of decoder layers (default: 1).")
    attention_window: PositiveInt | None = option(
        None, "pretrain: Number of tokens that an ar decoder attends to, besides the vector (default: all)."
    )
    bottlenecks: Literal["dense", "sparse", "both"] | None = option(
        None, "pretrain: Vectors that the span is decoded from (default: both, in turn)."
    )
    attn_implementation: str | None = option(
        None, "Attention implementation of the encoder, e.g. eager or flash_attention_2 (default: sdpa)."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Train, export and print the paths of the results."""
    folder = train(arguments)
    if arguments.should_save:
        print(f'\nSentenceTransformer("{folder / "dense"}"), SparseEncoder("{folder / "sparse"}")')
        if arguments.stage == "pretrain":
            words = ["train", "cot-mote", "--stage", "finetune", "--encoder", folder, "--pairs", "FILE"]
            print("next: ", command_line(*words))


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of the trainer, such as `callbacks`."""
    with open_run(COT_MOTE, arguments) as run:
        if run.finished:
            return run.output
        start = _load(arguments)
        given: dict[str, Any] = {"args": arguments, "processing_class": start.tokenizer, **trainer_options}
        trainer: CoTMoTETrainer | CoTMoTEFinetuner
        if arguments.stage == "pretrain":
            rows, summary = run.read(
                "reading the text", lambda: load_contexts(arguments, start.tokenizer, arguments.seed)
            )
            given |= {name: getattr(arguments, name) for name in ("encoder_mask_ratio", "decoder_mask_ratio")}
            trainer = CoTMoTETrainer(start.model, train_dataset=rows, **given)
        else:
            rows, summary = run.read("reading the pairs", lambda: load_pairs(arguments))
            given |= {name: getattr(arguments, name) for name in ("query_max_length", "max_length")}
            trainer = CoTMoTEFinetuner(start.encoder, train_dataset=rows, **given)
        run.train(trainer)
        run.export(trainer, summary=summary, sources=[*arguments.data, arguments.pairs or ""])
        return run.output


def _load(arguments: Arguments) -> CoTMoTECheckpoint:
    pre_training = arguments.stage == "pretrain"
    config: dict[str, Any] = {"variant": arguments.variant}
    own = ("decoder", "decoder_layers", "attention_window")
    if pre_training:
        config |= {name: getattr(arguments, name) for name in own}
        config["bottlenecks"] = None if arguments.bottlenecks is None else BOTTLENECKS[arguments.bottlenecks]
    start = load_cot_mote_start(
        arguments.encoder,
        pre_training=pre_training,
        query_encoder=arguments.query_encoder,
        trust_remote_code=arguments.trust_remote_code,
        attn_implementation=arguments.attn_implementation,
        **config,
    )
    longest = max(arguments.max_length, 0 if pre_training else arguments.query_max_length)
    check_positions(arguments.encoder, start.model.max_length, longest)
    # The published model keeps the length that it was trained with.
    start.model.config.max_seq_length = arguments.max_length
    return start
