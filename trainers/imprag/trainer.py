"""Trainer of ImpRAG (arXiv 2506.02279), whose loss is the generation loss plus lambda times the retrieval loss.

Warm-up: the rankings of an existing retriever are the labels (multi-label NCE), and the model reads its best passages. It may begin
with steps that train retrieval alone (not in the paper), which a small decoder needs to leave the plateau of the loss.
Self-distillation: the likelihood of the answer given each candidate passage is the target of the retrieval distribution (KL).
Candidates and passages to read come from an index of the collection, which is rebuilt regularly.

The passages of a prompt depend only on the seed, the epoch and the number of the prompt, so a resumed run and a run on two
processes give the same results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import TrainOutput

from revela_hub.errors import UserError
from revela_hub.evaluation.question_answering import holds_answer
from revela_hub.hub_cards.export import save_config
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.modeling.backbones import evaluating
from revela_hub.retrieval.encoder import text_positions
from revela_hub.retrieval.texts import TextSource
from revela_hub.trainers.base.adapters import merged_copy, with_adapters
from revela_hub.trainers.base.distributed import is_distributed
from revela_hub.trainers.base.models import ModelLike, default_arguments, tokenizer_of
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.imprag import IMPRAG
from revela_hub.trainers.imprag.checkpoint import ImpRAGCheckpoint, ImpRAGEncoder, load_imprag
from revela_hub.trainers.imprag.data import (
    ImpRAGCollator,
    ImpRAGTrainingArguments,
    as_prompts,
    as_texts,
    encode_rows,
    padded,
    passage_hashes,
    tokenize_passages,
    tokenize_prompts,
)
from revela_hub.trainers.imprag.retrieval import kl_divergence, multi_label_nce, nearest_passages, prompt_ranking

CANDIDATES = "candidates.safetensors"


@dataclass
class _Drawn:
    """Numbers of the passages of a batch; -1 is no passage."""

    read_Bk: NDArray[np.int32]
    candidates_BC: NDArray[np.int32]
    known_BR: NDArray[np.int32]  # the best ranks, which are not negatives of the row


class ImpRAGTrainer(MethodTrainer):
    """Trainer of `ImpRAGForCausalLM`.

        questions = Dataset.from_dict({"question": ["Who wrote Emma?", ...], "answer": ["Jane Austen", ...]})
        trainer = ImpRAGTrainer("Qwen/Qwen3-0.6B-Base", train_dataset=questions, passages=passages)
        trainer.train()
        trainer.write_models("outputs")  # for open_answerer("outputs/model", ...)

    Args:
        model: Hub id or folder of a decoder or of an ImpRAG model, or a loaded one, which gets adapters in place, if any.
        args: training arguments; by default with an output folder named after the model.
        processing_class: tokenizer of the backbone, by default its own; needs an EOS token.
        train_dataset: questions with answers, in the columns that `revela_hub.data.prompts` describes, or prompts from
            `read_prompts`.
        passages: the collection: M texts, a data set with a column `text`, or texts on disk (`TextFile`), for many passages.
        pseudo_labels: ranking of the passages for the warm-up: `bm25`, the id or folder of a retriever, or an array (rows,
            last_negative_rank) of passage numbers, best first, for the rows of `train_dataset`.
        query_text: column of the retriever's queries: `prompt`, or `input` without the template.
        ranking: file of the ranking, by default in the output folder.
        peft_config: configuration of the adapters, instead of the LoRA settings in `args`; without `target_modules` it applies
            to every linear layer.
        max_length: maximum tokens of prompt and answer.
        model_init_kwargs: arguments of `load_imprag`: `retrieval_layer`, `last_reading_layer`, `num_passages`,
            `max_passage_length`, `trust_remote_code`, ... The last one also applies to the retriever that `pseudo_labels` names.
        **kwargs: arguments of `Trainer`: `callbacks`, ...

    Raises:
        UserError: the model cannot be loaded, a row has no question or answer, or no prompt fits into the model.
    """

    method = IMPRAG

    def __init__(
        self,
        model: ModelLike | ImpRAGForCausalLM,
        args: ImpRAGTrainingArguments | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        train_dataset: Dataset | IterableDataset,
        passages: Sequence[str] | Dataset | TextSource,
        pseudo_labels: NDArray[np.int32] | str = "bm25",
        query_text: Literal["prompt", "input"] = "prompt",
        ranking: str | None = None,
        peft_config: PeftConfig | None = None,
        max_length: int = 256,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(ImpRAGTrainingArguments, model, self.method)
        prompts, self.passages = as_prompts(train_dataset), as_texts(passages)
        if not isinstance(model, ImpRAGForCausalLM):
            loaded = load_imprag(model, tokenizer=processing_class, **(model_init_kwargs or {}))
            model, processing_class = loaded.model, loaded.tokenizer
        tokenizer = tokenizer_of(model, processing_class)
        positions, used = text_positions(model.config.backbone), model.config.k * model.config.l_max + max_length
        if positions is not None and used > positions:
            raise UserError(
                f"num_passages * max_passage_length + max_length = {used} positions do not fit into the backbone's {positions}:"
                " lower num_passages, max_passage_length or max_length"
            )
        self.args: ImpRAGTrainingArguments
        self.imprag, self.own_tokenizer = model, tokenizer
        data = tokenize_prompts(prompts, tokenizer, max_length, args.log)
        length, first = model.config.l_max, range(min(1000, len(self.passages)))
        _, cut = tokenize_passages(tokenizer, self.passages.read(first), length)
        if cut:
            args.log(
                f"{cut:,} of {len(first):,} passages are longer than {length} tokens and are truncated: lower max_words or"
                " raise max_passage_length"
            )
        self.pseudo_labels: NDArray[np.int32] | None = None
        if args.retrieval_warmup_epochs or args.retrieval_only_steps:
            trust = bool((model_init_kwargs or {}).get("trust_remote_code"))
            how: dict[str, Any] = {"show_progress_bar": not args.disable_tqdm, "trust_remote_code": trust}
            how |= {"query_text": query_text, "file": ranking, "batch_size": args.encode_batch_size}
            ranked = prompt_ranking(pseudo_labels, prompts, self.passages, args.last_negative_rank, args, **how)
            self.pseudo_labels = ranked[np.array(data["source_row"])]  # of the rows that were kept
        if args.retrieval_only_steps and args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True  # the layers above the retrieval layer have no gradient then
        self.ranking: NDArray[np.int32] | None = None  # the best passages of each row, from the index
        self.built_at = -1
        super().__init__(
            model=with_adapters(model, peft_config, args) or model,
            args=args,
            train_dataset=data,
            data_collator=ImpRAGCollator(),
            processing_class=tokenizer,
            **kwargs,
        )
        self.loss_is_scaled_for_ga = True

    @property
    def retriever(self) -> ImpRAGEncoder:
        """Return the encoder of the current model."""
        return ImpRAGEncoder(self.imprag, self.own_tokenizer)

    def exportable(self) -> ImpRAGCheckpoint:
        """Return the model with adapters merged, as `load_imprag_checkpoint` does."""
        return ImpRAGCheckpoint(merged_copy(self.imprag, self.accelerator.unwrap_model(self.model)), self.own_tokenizer)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train; see `MethodTrainer.train`. A second run builds its own index."""
        self.ranking, self.built_at = None, -1
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a batch; first rebuild the index if this is due: after the warm-up, and then regularly."""
        every = self.args.index_steps or max(1, round(self.state.max_steps / max(1, self.state.num_train_epochs)))
        if not self.warming_up and (self.ranking is None or self.state.global_step - self.built_at >= every):
            self.rebuild_index()
        return super().training_step(*args, **kwargs)

    @property
    def warming_up(self) -> bool:
        """Whether the labels are the rankings of another retriever."""
        return self.only_retrieving or (self.state.epoch or 0.0) < self.args.retrieval_warmup_epochs

    @property
    def only_retrieving(self) -> bool:
        """Whether nothing is read or generated yet."""
        return self.state.global_step < self.args.retrieval_only_steps

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return J = generation loss + lambda * retrieval loss, or the latter alone, and keep them for the next log."""
        rows_B, retrieve_B = inputs.pop("row").cpu().numpy(), inputs.pop("retrieve")
        retrieving = retrieve_B.cpu().numpy()
        drawn = self._draw(rows_B, retrieving)
        candidates_N = drawn.candidates_BC.reshape(-1)
        # Without any candidate, padding is encoded, because the model needs a row.
        there_N = np.flatnonzero(candidates_N >= min(0, candidates_N.max()))
        passages = {"candidate": candidates_N[there_N]}
        if self.only_retrieving:
            inputs = {name: value for name, value in inputs.items() if name.startswith("query_")}
        else:
            passages["passage"] = drawn.read_Bk
        for name, numbers in passages.items():
            ids, mask = (part.to(retrieve_B.device) for part in self._tokens(numbers))
            inputs |= {f"{name}_input_ids": ids, f"{name}_attention_mask": mask}
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch, return_logits=return_outputs)
        found, place_N = outputs.passage_vectors, torch.from_numpy(there_N).to(retrieve_B.device)
        outputs.passage_vectors = found.new_zeros(len(candidates_N), found.shape[1]).index_copy(0, place_N, found)
        retrieval = self._retrieval_loss(outputs, inputs, drawn, retrieve_B)
        generation = retrieval.new_zeros(()) if self.only_retrieving else outputs.loss
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            generation = generation * self.accelerator.num_processes  # num_items_in_batch counts all processes
        self._keep_statistics(generation, retrieval, rows_B[retrieving], drawn.read_Bk[retrieving])
        loss = generation + self.args.retrieval_weight * retrieval / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _tokens(self, numbers: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Return tokens and mask of passages (..., L), where numbers have the shape (...)."""
        texts = self.passages.read(numbers[numbers >= 0].tolist())
        rows = iter(tokenize_passages(self.own_tokenizer, texts, self.imprag.config.l_max)[0])
        # The last row makes at least one column.
        ids, mask = padded([*(next(rows) if number >= 0 else [] for number in numbers.flat), [0]])
        return ids[:-1].reshape(*numbers.shape, -1), mask[:-1].reshape(*numbers.shape, -1)

    def _retrieval_loss(self, outputs: Any, inputs: dict[str, Tensor], drawn: _Drawn, retrieve_B: Tensor) -> Tensor:
        """Return the mean over all prompts that retrieve, scaled because the Trainer averages over processes."""
        temperature = self.args.temperature or sqrt(outputs.query_vectors.shape[-1])
        if self.warming_up:
            loss_B = self._warm_up(outputs, drawn, temperature)
        else:
            loss_B = self._self_distillation(outputs, inputs, drawn, retrieve_B, temperature)
        count = self.accelerator.reduce(retrieve_B.sum().float()).clamp(min=1)
        loss: Tensor = (loss_B * retrieve_B).sum() / count * self.accelerator.num_processes
        return loss

    def _warm_up(self, outputs: Any, drawn: _Drawn, temperature: float) -> Tensor:
        """Return (B,) multi-label NCE over the candidates of all prompts of all processes."""
        vectors_NE = outputs.passage_vectors
        if is_distributed():
            vectors_NE = all_gather_with_grad(vectors_NE)
        device = vectors_NE.device
        # Passages that are the same text have the same hash; -1 is no passage.
        own, known_BR = (
            torch.from_numpy(passage_hashes(self.passages, numbers)).to(device)
            for numbers in (drawn.candidates_BC, drawn.known_BR)
        )
        hashes_N = self.accelerator.gather(own.reshape(-1))
        scores_BN = self.imprag.score(outputs.query_vectors, vectors_NE) / temperature
        rows, width = own.shape
        first = self.accelerator.process_index * rows * width
        place_B = first + torch.arange(rows, device=device)[:, None] * width
        own_BN = torch.zeros(scores_BN.shape, dtype=torch.bool, device=device)
        own_BN.scatter_(1, place_B + torch.arange(self.args.num_positives, device=device), True)
        there_N = hashes_N >= 0
        known_BN = (hashes_N[None, :, None] == known_BR[:, None, :]).any(-1)
        return multi_label_nce(scores_BN, own_BN & there_N, ~known_BN & there_N)

    def _self_distillation(
        self, outputs: Any, inputs: dict[str, Tensor], drawn: _Drawn, retrieve_B: Tensor, temperature: float
    ) -> Tensor:
        """Return (B,) KL divergence between the answer's likelihoods given the candidates and their scores."""
        rows, width = drawn.candidates_BC.shape
        vectors_BCE = outputs.passage_vectors.view(rows, width, -1)
        scores_BC = self.imprag.score(outputs.query_vectors, vectors_BCE) / temperature
        likelihood_BC = scores_BC.detach().clone()  # prompts that do not retrieve have no loss
        retrieving = retrieve_B.nonzero()[:, 0]
        if len(retrieving):
            with evaluating(self.imprag), self.accelerator.autocast():
                likelihood_RC = self.imprag.answer_log_likelihoods(
                    inputs["input_ids"][retrieving],
                    inputs["attention_mask"][retrieving],
                    inputs["labels"][retrieving],
                    inputs["candidate_input_ids"].view(len(retrieving), width, -1),
                    inputs["candidate_attention_mask"].view(len(retrieving), width, -1),
                    block_size=self.args.likelihood_batch_size,
                )
            likelihood_BC[retrieving] = likelihood_RC.to(scores_BC.dtype)
        return kl_divergence(likelihood_BC.detach() / self.args.likelihood_temperature, scores_BC)  # equations 4 to 6

    def _draw(self, rows_B: NDArray[np.int64], retrieve_B: NDArray[np.bool_]) -> _Drawn:
        """Return the passages that each row reads and compares, which depend only on seed, epoch and row."""
        args, k = self.args, self.imprag.config.k
        if self.warming_up:
            assert self.pseudo_labels is not None
            ranking = self.pseudo_labels[rows_B]
            hard = ranking[:, args.first_negative_rank - 1 : args.last_negative_rank]
            epoch = int((self.state.epoch or 0.0) + 1e-6)
            drawn = [
                np.random.default_rng([args.seed, epoch, row]).permutation(hard.shape[1])[: args.num_negatives]
                for row in rows_B.tolist()
            ]
            negatives = np.take_along_axis(hard, np.stack(drawn), axis=1)
            candidates = np.concatenate([ranking[:, : args.num_positives], negatives], axis=1)
        else:
            assert self.ranking is not None
            ranking = self.ranking[rows_B]
            candidates = ranking[:, : args.num_candidates]
        read = np.where(retrieve_B[:, None], ranking[:, :k], -1)
        return _Drawn(read.astype(np.int32), candidates, ranking[:, : args.first_negative_rank - 1])

    def rebuild_index(self) -> None:
        """Rank the collection with the current weights for every prompt that retrieves; each process encodes some passages."""
        data: Any = self.train_dataset
        rows, where = np.flatnonzero(data["retrieve"]), (self.args.device, self.args.encode_batch_size)
        depth = min(max(self.args.num_candidates, self.imprag.config.k), len(self.passages))

        def encode(texts: list[str]) -> Tensor:
            tokens, _ = tokenize_passages(self.own_tokenizer, texts, self.imprag.config.l_max)
            return torch.from_numpy(encode_rows(self.imprag.embed_passages, tokens, *where)).to(self.args.device)

        self.ranking = np.full((len(data), depth), -1, np.int32)
        with evaluating(self.imprag), self.accelerator.autocast():
            queries_QE = encode_rows(self.imprag.embed_queries, data.select(rows)["prompt_ids"][:], *where)
            found = nearest_passages(torch.from_numpy(queries_QE).to(self.args.device), self.passages, encode, depth)
        self.ranking[rows] = found
        self.built_at = self.state.global_step

    def _keep_statistics(
        self, generation: Tensor, retrieval: Tensor, rows_R: NDArray[np.int64], read_Rk: NDArray[np.int32]
    ) -> None:
        """Keep both losses, and the fraction of prompts whose passages contain an answer, for the next log."""
        if not self.only_retrieving:
            self.add_metric("generation_loss", generation * self.current_gradient_accumulation_steps)
        self.add_metric("retrieval_loss", retrieval)
        data: Any = self.train_dataset
        texts = (self.passages.read([number for number in row if number >= 0]) for row in read_Rk.tolist())
        held = sum(map(holds_answer, texts, data[rows_R]["answers"]))
        counts = torch.tensor([held, len(rows_R)], device=self.args.device, dtype=torch.float)
        held_in, retrieved = self.accelerator.reduce(counts)
        if retrieved:
            self.add_metric("answer_recall", held_in / retrieved)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the weights or adapters, the configuration, and the rankings of the index."""
        if isinstance(model := self.model, PeftModel):
            config = self.imprag.config
            assert config.backbone is not None
            # The base of the adapters: an ImpRAG model, or the decoder it was made of.
            model.peft_config["default"].base_model_name_or_path = config.name_or_path or config.backbone.name_or_path
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        save_config(self.imprag.config, folder)
        if self.ranking is not None:
            kept = {"ranking": torch.from_numpy(self.ranking), "built_at": torch.tensor(self.built_at)}
            save_file(kept, folder / CANDIDATES)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load their states and the rankings, also with DeepSpeed, for which the Trainer does not call `_load_from_checkpoint`."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (file := Path(checkpoint) / CANDIDATES).is_file():
            saved = load_file(file)
            self.ranking, self.built_at = saved["ranking"].numpy(), int(saved["built_at"])
            if len(self.ranking) != len(self.train_dataset):  # type: ignore[arg-type]
                raise UserError(f"{file.parent} belongs to a run on other data: give the same data, or start again")
