"""Tune a decoder to answer from passages in its prompt: RA-IT (arXiv 2310.01352, section 2.2), a baseline.

It uses the data of `revela-hub train imprag`. The best passages of the retriever --pseudo_labels are put before each
prompt, one "Passage: ..." line each, and the loss is computed on the answers only.

Writes to --output_dir: model/ for AutoModelForCausalLM, with its model card; checkpoint-*/ (resume with
--resume_from_checkpoint last).

Examples:
  revela-hub train ra-it --data train.jsonl --corpus docs --backbone Qwen/Qwen3-0.6B-Base --output_dir outputs/ra-it
  revela-hub train ra-dit --data train.jsonl --corpus docs --reader outputs/ra-it/model --retriever my-retriever
  revela-hub evaluate outputs/ra-it/model --task qa --data dev.jsonl --index my-index --retriever my-retriever
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from revela_hub.files import atomic
from revela_hub.hub_cards.assemble import keep_other_files
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.hub_cards.hub_index import open_store
from revela_hub.loading import pretrained
from revela_hub.options import option, required
from revela_hub.output import command_line
from revela_hub.ranges import NonNegativeInt, PositiveInt
from revela_hub.retrieval.encoder import model_identity, text_positions
from revela_hub.retrieval.hits import Hits, Ranker
from revela_hub.retrieval.index import PassageStore
from revela_hub.retrieval.passages import Hit
from revela_hub.retrieval.ranking import RankerSettings, build_ranker
from revela_hub.retrieval.texts import TextSource
from revela_hub.trainers.base.adapters import merge, merged_copy, with_adapters
from revela_hub.trainers.base.arguments import WARMUP, AdapterArguments, RunArguments
from revela_hub.trainers.base.distributed import is_sharded
from revela_hub.trainers.base.models import ModelLike, default_arguments
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.baselines import RA_IT
from revela_hub.trainers.baselines.language_models import check_room, load_lm, log_likelihoods
from revela_hub.trainers.imprag.answering import Answerer, left_padded
from revela_hub.trainers.imprag.checkpoint import on_device
from revela_hub.trainers.imprag.data import (
    ImpRAGDataArguments,
    as_prompts,
    as_texts,
    map_once,
    pair_tokens,
    tokenize_passages,
    tokenize_prompts,
    train_on_prompts,
)
from revela_hub.trainers.imprag.retrieval import load_retriever, prompt_ranking

READER_FOLDER = "model"


@dataclass
class RAITTrainingArguments(AdapterArguments, RunArguments):
    """`TrainingArguments` of RA-IT."""

    learning_rate: float = option(1e-5, "Peak learning rate.")
    warmup_steps: float = option(100, WARMUP)
    num_train_epochs: float = option(10, "Number of epochs.")
    per_device_train_batch_size: int = option(8, "Number of prompts per device and forward pass.")
    lora_rank: NonNegativeInt = option(0, "Rank of the LoRA adapters; 0 trains all weights.")


@dataclass(kw_only=True)
class Arguments(ImpRAGDataArguments, RAITTrainingArguments):
    """Arguments of `revela-hub train ra-it`: the model, then the data's, then those of every transformers Trainer."""

    backbone: str = required("Decoder to tune: Hub id or folder.")
    output_dir: str = option("outputs/ra-it", "Output folder.")
    num_passages: PositiveInt = option(10, "Number of passages per prompt.")
    max_passage_length: PositiveInt = option(160, "Maximum number of tokens per passage.")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Train, export and print the next command."""
    folder = train(arguments)
    if arguments.should_save:
        words = ["train", "ra-dit", "--reader", folder / READER_FOLDER, "--retriever", "RETRIEVER", "--data", "FILE"]
        following = command_line(*words, "--corpus", "PATH")
        sys.stdout.write(f"\nmodel: {folder / READER_FOLDER}\nnext:  {following}\n")


def train(arguments: Arguments, **trainer_options: Any) -> Path:
    """Train and export. The options are further arguments of `RAITTrainer`, such as `callbacks`."""
    lengths = {"num_passages": arguments.num_passages, "max_passage_length": arguments.max_passage_length}
    return train_on_prompts(RA_IT, arguments, RAITTrainer, arguments.backbone, **lengths, **trainer_options)


class RAITTrainer(MethodTrainer):
    """Trainer of a decoder on prompts that start with their passages; the loss is on the answers.

        questions = Dataset.from_dict({"question": ["Who wrote Emma?", ...], "answer": ["Jane Austen", ...]})
        trainer = RAITTrainer("Qwen/Qwen3-0.6B-Base", train_dataset=questions, passages=passages)
        trainer.train()
        trainer.write_models("outputs")  # for AutoModelForCausalLM.from_pretrained("outputs/model")

    Args:
        model: Hub id or folder of a decoder, or a loaded one, which gets adapters in place if `args` asks for them.
        args: training arguments; by default, the output folder is named after the model.
        processing_class: tokenizer with an EOS token, by default the decoder's own.
        train_dataset: questions with answers, in the columns that `revela_hub.data.prompts` describes, or prompts as
            `read_prompts` returns them.
        passages, pseudo_labels, query_text, ranking: as for `ImpRAGTrainer`.
        num_passages: passages per prompt.
        max_passage_length: tokens of a passage.
        max_length: tokens of prompt and answer without passages; longer rows are dropped, with a log message.
        peft_config: configuration of the adapters, instead of the LoRA settings in `args`.
        model_init_kwargs: for loading the decoder and the retriever: `trust_remote_code`.
        **kwargs: passed to `Trainer`: `callbacks`, ...

    Raises:
        UserError: all rows are too long, or a row with its passages does not fit into the decoder.
    """

    method = RA_IT
    can_be_sharded = True

    args: RAITTrainingArguments

    def __init__(
        self,
        model: ModelLike,
        args: RAITTrainingArguments | None = None,
        *,
        train_dataset: Dataset | IterableDataset,
        passages: Sequence[str] | Dataset | TextSource,
        processing_class: PreTrainedTokenizerBase | None = None,
        pseudo_labels: NDArray[np.int32] | str = "bm25",
        query_text: Literal["prompt", "input"] = "prompt",
        ranking: str | None = None,
        num_passages: int = 10,
        max_passage_length: int = 160,
        max_length: int = 256,
        peft_config: PeftConfig | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(RAITTrainingArguments, model, self.method)
        loading = model_init_kwargs or {}
        decoder, tokenizer = load_lm(model, tokenizer=processing_class, **loading)
        prompts, texts = as_prompts(train_dataset), as_texts(passages)
        kept = tokenize_prompts(prompts, tokenizer, max_length, args.log)["source_row"]
        how = {"show_progress_bar": not args.disable_tqdm, "query_text": query_text, "file": ranking} | loading
        ranked = prompt_ranking(pseudo_labels, prompts, texts, num_passages, args, **how)[np.array(kept)]
        short = passages_read(texts, ranked[:, :num_passages], tokenizer, max_passage_length)
        data = tokenized_pairs(pasted_prompts(prompts.select(kept), short, ranked[:, :num_passages]), tokenizer)
        # For the answerer, which has to paste the same passages.
        decoder.config.num_passages, decoder.config.max_passage_length = num_passages, max_passage_length
        check_room(decoder, max(map(len, data["input_ids"])))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # padding is masked
        trained = with_adapters(decoder, peft_config, args) or decoder
        shared: dict[str, Any] = {"processing_class": tokenizer, "data_collator": DataCollatorForSeq2Seq(tokenizer)}
        super().__init__(model=trained, args=args, train_dataset=data, **shared, **kwargs)

    def exportable(self) -> Any:
        """Return the decoder with adapters merged."""
        model: Any = self.accelerator.unwrap_model(self.model)
        return merged_copy(model.get_base_model(), model) if isinstance(model, PeftModel) else model

    def _export(self, output: Path) -> list[Path]:
        """Write `model/`, a plain decoder with adapters merged."""
        if not self.args.should_save:
            return []
        model: Any = self.model
        loaded = _load_saved(output) if is_sharded(model) else self.exportable()
        for name in ("num_passages", "max_passage_length"):  # which the base of saved adapters does not have
            setattr(loaded.config, name, getattr(model.config, name))
        with atomic(output / READER_FOLDER) as folder:
            save_backbone(loaded, folder)
            save_tokenizer(self.processing_class, folder)  # type: ignore[arg-type]
            keep_other_files(output / READER_FOLDER, folder)
        return [output / READER_FOLDER]


def _load_saved(folder: Path) -> PreTrainedModel:
    """Load a decoder that the Trainer saved, with its adapters merged."""
    if not (folder / "adapter_config.json").is_file():
        return pretrained(AutoModelForCausalLM, folder)  # type: ignore[no-any-return]
    adapted: Any = AutoPeftModelForCausalLM.from_pretrained(str(folder))
    return merge(adapted)  # type: ignore[no-any-return]


def paste(prompt: str, passages: Sequence[str]) -> str:
    r"""Return the prompt with its passages in front.

    >>> paste("Q: Who? A:", ["Jane did.", "Ann did not."])
    'Passage: Jane did.\nPassage: Ann did not.\nQ: Who? A:'
    """
    return "".join(f"Passage: {' '.join(passage.split())}\n" for passage in passages) + prompt


def shortened(passages: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[str]:
    """Return the passages truncated to `max_length` tokens, the text that ImpRAG with that `l_max` reads."""
    rows, _ = tokenize_passages(tokenizer, passages, max_length)
    return tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)


def passages_read(
    passages: TextSource, ranking: NDArray[np.int32], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[int, str]:
    """Return the passages of a ranking by number, `shortened`."""
    numbers = np.unique(ranking[ranking >= 0]).tolist()
    return dict(zip(numbers, shortened(passages.read(numbers), tokenizer, max_length), strict=True))


def pasted_prompts(
    prompts: Dataset, passages: Mapping[int, str] | Sequence[str], ranking_Nk: NDArray[np.int32]
) -> Dataset:
    """Return the columns `prompt` (the k passages, then the prompt) and `completion` of rows of `read_prompts`.

    The ranking holds indices of passages, best first, -1 for none.
    """

    def pasted(row: dict[str, Any], number: int) -> dict[str, str]:
        read = [passages[at] for at in ranking_Nk[number].tolist() if at >= 0] if row["retrieve"] else []
        return {"prompt": paste(row["prompt"], read), "completion": f" {row['answers'][0]}"}

    return map_once(prompts, pasted, with_indices=True, remove_columns=prompts.column_names, desc="Pasting passages")


def tokenized_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the columns `input_ids` and `labels` of prompts and completions with EOS; labels of prompts are -100."""

    def tokenized(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        both = list(zip(*pair_tokens(tokenizer, rows["prompt"], rows["completion"]), strict=True))
        return {"input_ids": [p + a for p, a in both], "labels": [[-100] * len(p) + a for p, a in both]}

    return map_once(pairs, tokenized, batched=True, remove_columns=pairs.column_names, desc="Tokenizing prompts")


def pasted_log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    answers: Sequence[str],
    batch_size: int = 16,
    *,
    show_progress_bar: bool = False,
) -> Tensor:
    """Return log p(answer, EOS | prompt) of each pair, summed over the answer's tokens, in nats: (N,) float32."""
    pairs = list(zip(*pair_tokens(tokenizer, prompts, [f" {answer}" for answer in answers]), strict=True))
    return log_likelihoods(model, pairs, batch_size, show_progress_bar=show_progress_bar)


class PastedAnswerer(Answerer):
    """Answer prompts with their passages in front, one per line."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        collection: PassageStore | None,
        ranker: Ranker,
        num_passages: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.collection, self.ranker = model, tokenizer, collection, ranker  # type: ignore[assignment]
        self.num_passages: int = num_passages or int(getattr(model.config, "num_passages", 10))
        self.max_passage_length: int = getattr(model.config, "max_passage_length", 160)
        self.positions = text_positions(model.config)
        self.reserved = self.num_passages * (self.max_passage_length + 8)  # `Passage: ` and the end of the line

    def _search(self, queries: Sequence[str], batch_size: int) -> Hits:
        return self.ranker.search(queries, self.num_passages)

    def _inputs(
        self, prompts: Sequence[str], rows: list[list[int]], read: Sequence[Sequence[Hit]]
    ) -> dict[str, Tensor]:
        if any(read):
            texts = ([passage.text for passage in found] for found in read)
            short = (shortened(found, self.tokenizer, self.max_passage_length) for found in texts)
            rows = self.tokenizer([paste(*pair) for pair in zip(prompts, short, strict=True)])["input_ids"]
        ids, mask = left_padded(rows)
        return {"input_ids": ids, "attention_mask": mask}


def open_reader(
    name: str, index: str, *, retriever: str, num_passages: int | None = None, device: str | None = None
) -> PastedAnswerer:
    """Open a reader, and an index with its retriever."""
    encoder: Any = load_retriever(retriever)
    identity = None if encoder is None else model_identity(retriever)
    store = open_store(index, encoder, identity, retriever)
    settings = RankerSettings(mode="dense" if encoder else "bm25", identity=identity or "")
    index_of = store.index if encoder else None
    ranker = build_ranker(store.passages, settings, store.derived, dense=encoder, index=index_of)
    model, tokenizer = load_lm(name)
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    return PastedAnswerer(on_device(model.eval(), device), tokenizer, store, ranker, num_passages)
