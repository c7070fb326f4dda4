"""NV-Embed training: instructions per row, trained and saved weights, and equal results when a run is split or interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from killed_runs import whole_and_resumed
from processes import launch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from revela_hub.checkpoints import export_checkpoint
from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.errors import UserError
from revela_hub.trainers.nvembed.checkpoint import load_nvembed, nvembed_encoder
from revela_hub.trainers.nvembed.data import NVEmbedCollator, NVEmbedTrainingArguments
from revela_hub.trainers.nvembed.trainer import TRAINED_WEIGHTS, NVEmbedTrainer

WORDS = "river sea mountain fox dog text layer chunk paris tokyo area width height retriever".split()
TEXTS = ["anchor", "positive", "negative_1", "negative_2"]
PROMPTS = {"qa": query_prompt("Find what answers"), "sts": query_prompt("Find text of the same meaning, word for word")}


@pytest.fixture
def mixture() -> Dataset:
    """28 rows of two tasks: every third is symmetric, with the instruction on both sides."""
    generator = torch.Generator().manual_seed(1)

    def text() -> str:
        picks = torch.randint(len(WORDS), (1 + int(torch.randint(9, (1,), generator=generator)),), generator=generator)
        return " ".join(WORDS[i] for i in picks)

    rows = []
    for number in range(28):
        task = "sts" if number % 3 == 0 else "qa"
        texts = {name: text() for name in TEXTS}
        prompts = {"anchor_prompt": PROMPTS[task], "document_prompt": PROMPTS[task] if task == "sts" else ""}
        rows.append({"task": task, **texts, **prompts, "kind": "other" if task == "sts" else "retrieval"})
    return Dataset.from_list(rows)


def encoder(llama: Path, *, max_length: int = 64, **config: Any) -> SentenceTransformer:
    torch.manual_seed(0)
    start = load_nvembed(str(llama), **({"num_latents": 8, "num_heads": 2} | config))
    return nvembed_encoder(
        start.model, start.tokenizer, max_length=max_length, prompts={"query": PROMPTS["qa"], "document": ""}
    )


def trainer(
    folder: Path, llama: Path, mixture: Dataset, *, config: dict[str, Any] | None = None, **options: Any
) -> NVEmbedTrainer:
    mine = ("callbacks", "retrieval_task")
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "temperature": 0.1,
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "lora_rank": 4,
        "lora_dropout": 0.0,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = NVEmbedTrainingArguments(**(defaults | {k: v for k, v in options.items() if k not in mine}))
    model = encoder(llama, **(config or {}))
    return NVEmbedTrainer(
        model, arguments, train_dataset=mixture, **{name: options[name] for name in mine if name in options}
    )


def weights(run: NVEmbedTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.nvembed.named_parameters()}


def losses(run: NVEmbedTrainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("pooling", "bos"), [("latent", False), ("latent", True), ("eos", True), ("self_attention", False)]
)
def test_a_row_is_embedded_in_training_as_it_is_encoded_with_its_prompt(
    tmp_path: Path, llama_folder: Path, mixture: Dataset, pooling: str, bos: bool
) -> None:
    if bos:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(llama_folder)
        tokenizer.bos_token = "<|pad|>"  # any token that texts do not begin with
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|pad|> $A", pair="<|pad|> $A <|pad|> $B", special_tokens=[("<|pad|>", tokenizer.bos_token_id)]
        )
        tokenizer.save_pretrained(llama_folder)
    rows = [*mixture.select(range(6))]
    rows[0] |= {"anchor": "", "positive": "river sea " * 40}  # nothing but EOS, and a text that is cut
    run = trainer(tmp_path, llama_folder, mixture, lora_rank=0, config={"pooling": pooling})
    run.model.eval()
    batch = run.data_collator(rows)
    (features,), labels = run.collect_features(batch)
    place = labels[..., 0]
    with torch.no_grad():
        trained = run.loss._embed(features, 0, len(features["input_ids"]))[place]
    assert type(run.model[1]) is Pooling
    for at, row in enumerate(rows):
        for column, name in enumerate(TEXTS):
            prompt = row["anchor_prompt" if name == "anchor" else "document_prompt"]
            expected = run.model.encode([row[name]], prompt=prompt, convert_to_tensor=True)[0]
            torch.testing.assert_close(trained[at, column], expected, rtol=0, atol=1e-5)


def test_a_text_is_in_a_batch_once_for_each_prompt(llama_folder: Path, mixture: Dataset) -> None:
    row = mixture[1] | {"anchor": "river", "positive": "sea", "negative_1": "fox", "negative_2": "sea"}
    rows = [row, row | {"positive": "river", "negative_1": "river", "document_prompt": PROMPTS["sts"]}]
    batch = NVEmbedCollator(encoder(llama_folder))(rows)
    place, number = batch["label"].unbind(-1)
    assert len(batch["text_input_ids"]) == 5  # river (asked), sea, fox; river and sea with the instruction
    assert place[0, 1] == place[0, 3] != place[1, 3]
    assert place[1, 1] == place[1, 2] != place[0, 0] == place[1, 0]
    assert number[0, 0] == number[1, 1] and number[0, 1] == number[1, 3] and number[0, 0] != number[0, 1]


def test_no_duplicates_looks_at_the_texts_alone(tmp_path: Path, llama_folder: Path, mixture: Dataset) -> None:
    """Task and instruction are the same in every row."""
    doubled = [row | {"anchor": f"{row['anchor']} twice"} for row in mixture]
    both = Dataset.from_list([*mixture, *doubled])
    run = trainer(tmp_path, llama_folder, both, batch_sampler="no_duplicates", per_device_train_batch_size=4)
    batches = list(run.get_train_dataloader().batch_sampler)
    assert len(batches) == 14 and {len(batch) for batch in batches} == {4}
    for batch in batches:
        texts = [{both[i][name] for name in TEXTS} for i in batch]
        assert len(set.union(*texts)) == sum(map(len, texts))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_trained_weights(tmp_path: Path, llama_folder: Path, mixture: Dataset, lora_rank: int) -> None:
    run = trainer(tmp_path, llama_folder, mixture, lora_rank=lora_rank, max_steps=12)
    before = weights(run)
    run.train()
    assert losses(run)[-1] < losses(run)[0] - 0.3
    changed = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
    pooling = {name for name in before if name.startswith("latent_attention_model.")}
    adapters = {name for name in before if ".lora_" in name}
    assert pooling
    if lora_rank:
        assert changed == pooling | adapters
        assert {name.split(".")[-4] for name in adapters} == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
    else:
        assert not adapters
        assert {name for name in before if "layers.0." in name} | pooling <= changed


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, llama_folder: Path, mixture: Dataset
) -> None:
    """In the second epoch, with dropout in the adapters."""
    saving = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    options = {"lora_dropout": 0.2, "mini_batch_size": 10, **saving}
    whole, resumed = whole_and_resumed(
        tmp_path, 5, lambda out, **more: trainer(out, llama_folder, mixture, **options, **more)
    )
    assert (tmp_path / "killed" / "checkpoint-5" / TRAINED_WEIGHTS).is_file()
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    expected, got = weights(whole), weights(resumed)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_training_continues_from_a_checkpoint_of_adapters(tmp_path: Path, llama_folder: Path, mixture: Dataset) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tmp_path / "one", llama_folder, mixture, **saving).train()
    base = tmp_path / "one" / "checkpoint-1"
    start = load_nvembed(str(base))
    assert all(weight.requires_grad for weight in start.model.parameters())
    model = nvembed_encoder(start.model, start.tokenizer, max_length=64, prompts=start.prompts)
    settings = {"lora_rank": 4, "bf16": False, "report_to": "none", "learning_rate": 1e-2, "disable_tqdm": True}
    arguments = NVEmbedTrainingArguments(output_dir=str(tmp_path / "two"), **settings, **saving)
    second = NVEmbedTrainer(model, arguments, train_dataset=mixture)
    second.train()
    checkpoint = tmp_path / "two" / "checkpoint-1"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    trained, loaded = second.exportable().model.state_dict(), load_nvembed(str(checkpoint)).model.state_dict()
    for name, value in trained.items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-5, atol=1e-6)
    export_checkpoint(checkpoint, tmp_path / "exported")
    files = [*(tmp_path / "exported").rglob("*.json"), *(tmp_path / "exported").rglob("README.md")]
    assert not any(str(tmp_path) in file.read_text(encoding="utf-8") for file in files)


def test_a_checkpoint_of_another_run_is_rejected(tmp_path: Path, llama_folder: Path, mixture: Dataset) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tmp_path, llama_folder, mixture, **saving).train()
    for other in ({"lora_rank": 0}, {"lora_rank": 4, "config": {"pooling": "self_attention"}}):
        with pytest.raises(UserError, match="is not a checkpoint of this run"):
            trainer(tmp_path / "other", llama_folder, mixture, **other).train(
                resume_from_checkpoint=str(tmp_path / "checkpoint-1")
            )


def test_an_instruction_needs_room_for_a_token_of_the_text(llama_folder: Path, mixture: Dataset) -> None:
    model = encoder(llama_folder)
    length = len(model.tokenizer(PROMPTS["sts"])["input_ids"]) - 1
    for room, fits in ((1, False), (2, True)):
        collator = NVEmbedCollator(model)
        collator.max_length = length + room
        if fits:
            collator([mixture[0]])
        else:
            with pytest.raises(UserError, match="leaves no room for a text"):
                collator([mixture[0]])


def pairs(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict(
        {"anchor": [f"fox {i}" for i in range(4)], "positive": [f"dog {i}" for i in range(4)], **columns}
    )


def python_trainer(folder: Path, model: Path, rows: Dataset, **options: Any) -> NVEmbedTrainer:
    """As from Python, with pairs."""
    own = {name: options.pop(name) for name in ("query_instruction",) if name in options}
    settings = {"output_dir": str(folder), "bf16": False, "report_to": "none", "lora_rank": 2, "disable_tqdm": True}
    return NVEmbedTrainer(
        str(model),
        NVEmbedTrainingArguments(**settings, **options),
        train_dataset=rows,
        max_length=64,
        **own,
    )


def test_pairs_without_negatives_need_in_batch_negatives(tmp_path: Path, llama_folder: Path) -> None:
    with pytest.raises(UserError, match="the rows have no negatives"):
        python_trainer(tmp_path, llama_folder, pairs(), in_batch_negatives=False)
    python_trainer(tmp_path, llama_folder, pairs(negative=["sea"] * 4), in_batch_negatives=False)


def test_a_loaded_decoder_of_sentence_transformers(tmp_path: Path, llama_folder: Path) -> None:
    args, adapting = (
        NVEmbedTrainingArguments(str(tmp_path), bf16=False, report_to="none", lora_rank=rank) for rank in (0, 2)
    )
    transformer = Transformer(str(llama_folder))
    model = SentenceTransformer(modules=[transformer, Pooling(32, "lasttoken")], device="cpu")
    run = NVEmbedTrainer(model, args, train_dataset=pairs())
    assert run.nvembed.embedding_model is transformer.auto_model
    assert NVEmbedTrainer(run.model, args, train_dataset=pairs()).model is run.model
    NVEmbedTrainer(run.model, adapting, train_dataset=pairs())
    for given in (args, adapting):  # without adapters, it would not train all weights
        with pytest.raises(UserError, match="it has adapters already"):
            NVEmbedTrainer(run.model, given, train_dataset=pairs())


def test_a_model_keeps_its_query_instruction(tmp_path: Path, llama_folder: Path) -> None:
    first = python_trainer(tmp_path, llama_folder, pairs())
    assert first.model.prompts["query"] == query_prompt("Given a question, retrieve passages that answer the question")
    own = python_trainer(tmp_path, llama_folder, pairs(), query_instruction="Find the sea")
    [folder] = own.write_models(str(tmp_path))
    again = python_trainer(tmp_path, folder, pairs())
    assert again.model.prompts["query"] == query_prompt("Find the sea") == again.train_dataset[0]["anchor_prompt"]
    other = python_trainer(tmp_path, folder, pairs(), query_instruction="Find the fox")
    assert other.model.prompts["query"] == query_prompt("Find the fox")


_PROCESSES = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from types import SimpleNamespace
from datasets import load_from_disk
from test_nvembed_trainer import losses, trainer, weights
results = {{}}
for in_batch, memory in ((True, 1000), (True, 5), (False, 5)):
    run = trainer(
        Path({out!r}), Path({llama!r}), load_from_disk({data!r}), per_device_train_batch_size={size}, lora_rank=0,
        in_batch_negatives=in_batch, mini_batch_size=memory, max_steps=3, optim="sgd",
    )
    run.train()
    last = weights(run)["latent_attention_model.latents"].flatten()[:8].tolist()
    results[f"{{in_batch}} {{memory}}"] = losses(run) + last
if run.is_world_process_zero():
    Path({out!r}, "results.json").write_text(json.dumps(results))
"""


@pytest.mark.slow
def test_two_processes_give_what_one_gives_with_the_same_global_batch(
    tmp_path: Path, llama_folder: Path, mixture: Dataset
) -> None:
    """In-batch negatives across processes, each of which embeds its own rows; also with cached gradients."""
    mixture.save_to_disk(tmp_path / "data")
    results = {}
    for processes in (1, 2):
        out = tmp_path / f"run{processes}"
        out.mkdir()
        script = tmp_path / f"run{processes}.py"
        script.write_text(
            _PROCESSES.format(
                tests=str(Path(__file__).parent),
                out=str(out),
                llama=str(llama_folder),
                data=str(tmp_path / "data"),
                size=8 // processes,
            )
        )
        launch(str(script), processes=processes)
        results[processes] = json.loads((out / "results.json").read_text())
    assert results[1].keys() == results[2].keys()
    for name, expected in results[1].items():
        torch.testing.assert_close(
            torch.tensor(results[2][name]),
            torch.tensor(expected),
            rtol=1e-3,
            atol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_an_encoder_is_rejected(bert_folder: Path) -> None:
    with pytest.raises(UserError, match="is an encoder"):
        load_nvembed(str(bert_folder))
