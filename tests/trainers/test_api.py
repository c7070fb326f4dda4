"""Trainers in trl's form: a model by its name, a data set of raw text, and nothing else."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForMaskedLM,
    BertModel,
    set_seed,
)

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.trainers import (
    CoTMoTEFinetuner,
    CoTMoTETrainer,
    CoTMoTETrainingArguments,
    NVEmbedTrainer,
    NVEmbedTrainingArguments,
    PairsTrainer,
    RetroMAETrainer,
    RetroMAETrainingArguments,
    RevelaTrainer,
    RevelaTrainingArguments,
    load_backbones,
)
from revela_hub.trainers.base.run_card import run_card
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments
from revela_hub.trainers.baselines.ra_dit import RADITTrainer, RADITTrainingArguments
from revela_hub.trainers.baselines.ra_it import RAITTrainer, RAITTrainingArguments
from revela_hub.trainers.baselines.replug import ReplugTrainer, ReplugTrainingArguments
from revela_hub.trainers.cot_mote.checkpoint import load_cot_mote_start
from revela_hub.trainers.imprag.retrieval import rank_passages
from revela_hub.trainers.pair_tuning.trainer import PairsTrainingArguments

Start = Callable[[], dict[str, Any]]


@pytest.fixture
def raw(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"text": [f"{text} {other}" for text in texts for other in texts if other != text]})


@pytest.fixture
def masked_folder(tmp_path: Path, bert_folder: Path, tiny_bert: BertModel) -> Path:
    """`bert_folder` with a masked-LM head."""
    folder = tmp_path / "masked-bert"
    BertForMaskedLM(tiny_bert.config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(folder)
    return folder


def run(trainer: MethodTrainer) -> dict[str, torch.Tensor]:
    """The weights of the trained model after the run."""
    model: Any = trainer.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    after = {name: value.detach().clone() for name, value in model.state_dict().items()}
    assert any(not torch.equal(value, after[name]) for name, value in before.items()), "nothing was trained"
    return after


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "warmup_steps": 0,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
    }


def test_revela_by_names_is_revela_by_objects(
    raw: Dataset, retriever_folder: Path, llama_folder: Path, settings: dict[str, Any]
) -> None:
    args = RevelaTrainingArguments(**settings, lora_rank=4)
    init = {"group_size": 4}
    names = RevelaTrainer(
        model=str(retriever_folder),
        lm=llama_folder,
        args=args,
        train_dataset=raw,
        model_init_kwargs=init,
        max_length=64,
    )
    assert names.revela.config.pooling == "mean" and names.revela.config.prompts["query"] == "Query: "
    by_names = run(names)
    objects = {
        "model": SentenceTransformer(str(retriever_folder), device="cpu"),
        "lm": AutoModelForCausalLM.from_pretrained(llama_folder),
    }
    equal(by_names, run(RevelaTrainer(**objects, args=args, train_dataset=raw, model_init_kwargs=init, max_length=64)))
    whole = load_backbones(str(retriever_folder), str(llama_folder), group_size=4)
    equal(by_names, run(RevelaTrainer(whole.model, args, train_dataset=raw, max_length=64)))
    assert names.retriever.encode_document(["fox"]).shape == (1, 32)


def test_revela_takes_adapters_of_peft_and_prepared_groups(
    tmp_path: Path, raw: Dataset, llama_folder: Path, settings: dict[str, Any]
) -> None:
    groups = Dataset.from_list(
        [{"group": g, "document": ["a", "b", "c"], "text": raw["text"][3 * g : 3 * g + 3]} for g in range(4)]
    )
    trainer = RevelaTrainer(
        AutoModel.from_pretrained(llama_folder),
        RevelaTrainingArguments(**settings),
        lm=str(llama_folder),
        train_dataset=groups,
        peft_config=LoraConfig(r=2),
        max_length=64,
    )
    assert trainer.revela.config.group_size == 3
    weights = run(trainer)
    adapters = {name for name in weights if "lora_A" in name}
    assert any("retriever" in name for name in adapters) and any("lm" in name.split(".") for name in adapters)
    assert all(weights[name].shape[0] == 2 for name in adapters)
    folders = trainer.write_models(str(tmp_path / "models"))
    assert not (tmp_path / "models" / "README.md").exists()  # PEFT's empty card
    vectors = SentenceTransformer(str(folders[0]), device="cpu").encode_query(["fox"])
    torch.testing.assert_close(
        torch.nn.functional.normalize(torch.tensor(trainer.retriever.encode_query(["fox"]))),
        torch.tensor(vectors),
        rtol=1e-4,
        atol=1e-5,
    )


def test_cot_mote_pre_trains_and_is_fine_tuned(
    tmp_path: Path, raw: Dataset, masked_folder: Path, settings: dict[str, Any]
) -> None:
    args = CoTMoTETrainingArguments(**settings)
    names = CoTMoTETrainer(model=str(masked_folder), args=args, train_dataset=raw)
    by_names = run(names)
    set_seed(args.seed)
    loaded = load_cot_mote_start(str(masked_folder), pre_training=True)
    equal(by_names, run(CoTMoTETrainer(loaded.model, args, processing_class=loaded.tokenizer, train_dataset=raw)))
    assert names.retriever.encode_query(["fox"]).shape[0] == 1
    names.save_model(str(tmp_path / "saved"))
    pairs = Dataset.from_dict({"anchor": ["fox", "sea"] * 4, "positive": ["the lazy dog", "the capital"] * 4})
    tuning = {"args": CoTMoTETrainingArguments(**settings, stage="finetune"), "train_dataset": pairs}
    tuned = run(CoTMoTEFinetuner(str(tmp_path / "saved"), **tuning))
    start = load_cot_mote_start(str(tmp_path / "saved"), pre_training=False)
    trainer = CoTMoTEFinetuner(start.encoder, processing_class=start.tokenizer, max_length=128, **tuning)
    equal(tuned, run(trainer))
    assert trainer.retriever.encode_query(["fox"]).shape[0] == 1
    equal(tuned, run(CoTMoTEFinetuner(names.model, max_length=128, **tuning)))


def test_readers_and_their_retrievers(
    tmp_path: Path, llama_folder: Path, retriever_folder: Path, texts: list[str], settings: dict[str, Any]
) -> None:
    """RA-IT and RA-DIT take models and a ranking retriever by name, and questions as they are."""
    questions = Dataset.from_dict(
        {"question": ["Where is Paris?", "Where is Tokyo?"] * 4, "answer": ["France", "Japan"] * 4}
    )
    both: dict[str, Any] = {"train_dataset": questions, "max_length": 64}
    args = RAITTrainingArguments(**settings)
    names = RAITTrainer(model=str(llama_folder), args=args, passages=texts, num_passages=2, **both)
    by_names = run(names)
    names.save_model(str(tmp_path / "reader"))
    assert names.method.paper.title in (tmp_path / "reader" / "model" / "README.md").read_text()
    ranking = rank_passages("bm25", [f"Where is {place}?" for place in ("Paris", "Tokyo")] * 4, texts, 2)
    model, data = AutoModelForCausalLM.from_pretrained(llama_folder), Dataset.from_dict({"text": texts})
    given: dict[str, Any] = {"passages": data, "pseudo_labels": ranking, "num_passages": 2}
    equal(by_names, run(RAITTrainer(model, args, **given, **both)))
    reader = str(names.write_models(str(tmp_path / "reader"))[0])

    args = RADITTrainingArguments(**settings, num_candidates=3)
    tuned = RADITTrainer(model=str(retriever_folder), reader=reader, args=args, passages=texts, **both)
    by_names = run(tuned)
    given = {"log_likelihoods": tuned.log_likelihoods, "pseudo_labels": tuned.candidates, "passages": data}
    loaded = SentenceTransformer(str(retriever_folder), device="cpu")
    equal(by_names, run(RADITTrainer(loaded, args, **given, **both)))
    (folder,) = tuned.write_models(str(tmp_path / "tuned"))
    assert SentenceTransformer(str(folder), device="cpu").encode("fox").shape == (32,)
    run(RADITTrainer(str(llama_folder), args, retrieval_layer=0, **given, **both))


def test_a_missing_column_is_an_error_with_the_columns_there_are(
    raw: Dataset, masked_folder: Path, llama_folder: Path, settings: dict[str, Any]
) -> None:
    bodies = raw.rename_column("text", "body")
    masked = {"model": str(masked_folder), "args": RetroMAETrainingArguments(**settings)}
    with pytest.raises(UserError, match="has the columns body; it needs text"):
        RetroMAETrainer(**masked, train_dataset=bodies)
    with pytest.raises(UserError, match="train, test"):
        RetroMAETrainer(**masked, train_dataset=DatasetDict(train=raw, test=raw))
    with pytest.raises(UserError, match="no rows"):
        RetroMAETrainer(**masked, train_dataset=raw.select([]))
    with pytest.raises(UserError, match="has the columns body; it needs anchor, positive"):
        NVEmbedTrainer(str(llama_folder), NVEmbedTrainingArguments(**settings), train_dataset=bodies)


@pytest.mark.slow
def test_evaluation_data_are_prepared_like_training_data(
    raw: Dataset, masked_folder: Path, retriever_folder: Path, llama_folder: Path, settings: dict[str, Any]
) -> None:
    columns = {"anchor": ["fox", "sea"] * 4, "positive": ["the lazy dog", "the capital"] * 4, "id": [*range(8)]}
    pairs = Dataset.from_dict(columns)
    raw = raw.select(range(12))
    questions = Dataset.from_dict({"question": ["Where is Paris?", "Who?"] * 4, "answer": ["France", "I"] * 4})
    tiny, lm = str(retriever_folder), str(llama_folder)
    makers: list[tuple[Callable[..., MethodTrainer], Dataset]] = [
        (partial(PairsTrainer, tiny, PairsTrainingArguments(**settings)), pairs),
        (partial(ContrieverTrainer, tiny, ContrieverTrainingArguments(**settings)), raw),
        (partial(CoTMoTEFinetuner, str(masked_folder), CoTMoTETrainingArguments(**settings, stage="finetune")), pairs),
        (partial(RetroMAETrainer, str(masked_folder), RetroMAETrainingArguments(**settings)), raw),
        (partial(RevelaTrainer, tiny, RevelaTrainingArguments(**settings), lm=lm, max_length=64), raw),
    ]
    for make, rows in makers:
        trainer = make(train_dataset=rows, eval_dataset=rows)
        loss = trainer.evaluate()["eval_loss"]
        two = make(train_dataset=rows, eval_dataset={"a": rows, "b": rows}).evaluate()
        assert loss > 0 and two["eval_a_loss"] == pytest.approx(loss) == two["eval_b_loss"]
    ranking = np.array([[0, 1]] * 8)
    both: dict[str, Any] = {"train_dataset": questions, "passages": ["a fox", "the sea"] * 8}
    given = {"log_likelihoods": torch.rand(8, 2), "pseudo_labels": ranking}
    tuned = RADITTrainer(tiny, RADITTrainingArguments(**settings), **given, **both)
    assert tuned.evaluate(tuned.train_dataset)["eval_loss"] >= 0


def test_retrieval_is_evaluated_once_under_the_prefix(
    raw: Dataset, masked_folder: Path, settings: dict[str, Any]
) -> None:
    task = RetrievalTask({"d0": "the fox", "d1": "the sea"}, {"q": "fox"}, {"q": {"d0": 1}}, "tiny")
    rows = raw.select(range(4))
    given: dict[str, Any] = {"train_dataset": rows, "eval_dataset": {"a": rows, "b": rows}, "retrieval_task": task}
    trainer = RetroMAETrainer(str(masked_folder), RetroMAETrainingArguments(**settings), **given)
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert {"test_a_loss", "test_b_loss", "test_ndcg_at_10"} <= metrics.keys()
    assert not any(name.startswith("eval") for name in metrics)
    assert sum("test_ndcg_at_10" in entry for entry in trainer.state.log_history) == 1

    class Mine(RetroMAETrainer):
        pass

    mine = Mine(str(masked_folder), RetroMAETrainingArguments(**settings), train_dataset=rows, retrieval_task=task)
    mine.evaluate()
    mine.train()
    mine.evaluate()
    card = run_card(mine)
    assert [result.model for result in card.results] == [None, "base model"]  # the Trainer starts a new log
    assert "`Mine`" in card.description and not run_card(trainer).description


def test_a_single_pair_is_rejected(
    masked_folder: Path, retriever_folder: Path, llama_folder: Path, settings: dict[str, Any]
) -> None:
    pair = Dataset.from_dict({"anchor": ["river"], "positive": ["sea"]})
    tuning = CoTMoTETrainingArguments(**settings, stage="finetune")
    makers: list[Callable[..., Any]] = [
        partial(PairsTrainer, str(retriever_folder), PairsTrainingArguments(**settings)),
        partial(NVEmbedTrainer, str(llama_folder), NVEmbedTrainingArguments(**settings), max_length=64),
        partial(CoTMoTEFinetuner, str(masked_folder), tuning),
    ]
    for make in makers:
        with pytest.raises(UserError, match="one pair"):
            make(train_dataset=pair)


def test_the_folder_of_a_model_to_train_is_not_overwritten(
    raw: Dataset, retriever_folder: Path, llama_folder: Path, masked_folder: Path, settings: dict[str, Any]
) -> None:
    retriever, lm, masked = map(str, (retriever_folder, llama_folder, masked_folder))
    for trainer, arguments, models, folder in (
        (ContrieverTrainer, ContrieverTrainingArguments, {"model": retriever}, retriever),
        (RevelaTrainer, RevelaTrainingArguments, {"model": retriever, "lm": lm}, retriever),
        (RevelaTrainer, RevelaTrainingArguments, {"model": retriever, "lm": lm}, lm),
        (RetroMAETrainer, RetroMAETrainingArguments, {"model": masked}, f"{masked}/../{masked_folder.name}"),
    ):
        args: Any = arguments(**settings | {"output_dir": folder})
        with pytest.raises(
            UserError, match=f"^output_dir {folder} is the folder of the model to train: choose another"
        ):
            trainer(**models, args=args, train_dataset=raw, max_length=40)


def test_retrievers_are_trained_with_adapters_of_peft(
    tmp_path: Path, raw: Dataset, retriever_folder: Path, llama_folder: Path, texts: list[str], settings: dict[str, Any]
) -> None:
    """Only adapters change, a checkpoint has them, and the exported model has them merged."""
    tiny, lm = str(retriever_folder), str(llama_folder)
    questions = Dataset.from_dict({"question": ["Where is Paris?"] * 4, "answer": ["France"] * 4})
    likely = {"passages": texts, "log_likelihoods": torch.rand(4, 3), "train_dataset": questions}
    likely["args"] = RADITTrainingArguments(**settings, num_candidates=3)
    contriever = ContrieverTrainingArguments(**settings, per_device_train_batch_size=4, queue_size=8)
    replug: dict[str, Any] = {"args": ReplugTrainingArguments(**settings), "lm": lm, "group_size": 4, "max_length": 64}
    makers: list[Callable[..., Any]] = [
        partial(ContrieverTrainer, tiny, contriever, train_dataset=raw),
        partial(ReplugTrainer, tiny, train_dataset=raw, **replug),
        partial(RADITTrainer, tiny, **likely),
        partial(RADITTrainer, lm, retrieval_layer=1, **likely),
        partial(
            RAITTrainer, lm, RAITTrainingArguments(**settings), train_dataset=questions, passages=texts, num_passages=2
        ),
    ]
    for number, make in enumerate(makers):
        trainer = make(peft_config=LoraConfig(r=2))
        model = trainer.model
        before = {
            name: weight.detach().clone() for name, weight in model.named_parameters() if not weight.requires_grad
        }
        trained = run(trainer)
        adapters = [name for name, weight in model.named_parameters() if weight.requires_grad]
        assert adapters and all("lora_" in name for name in adapters)
        followed = {name for name in before if name.startswith("key_encoder.") and "lora_" in name}
        assert all(torch.equal(trained[name], weight) for name, weight in before.items() if name not in followed)
        (folder,) = trainer.write_models(str(tmp_path / f"{number}"))
        files = list(folder.rglob("*.safetensors"))
        assert files and not any("lora" in name for file in files for name in load_file(file))
        if make.func is RAITTrainer:
            continue
        expected = trainer.retriever.encode_query(["fox"])
        trainer.save_model(str(tmp_path / f"checkpoint-{number}"))
        for saved in (folder, tmp_path / f"checkpoint-{number}") if make.args[0] is tiny else ():
            vectors = SentenceTransformer(str(saved), device="cpu").encode_query(["fox"])
            np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)
        assert trainer.method.paper.arxiv in (tmp_path / f"checkpoint-{number}" / "README.md").read_text()
        again = make(peft_config=LoraConfig(r=2))
        again._load_from_checkpoint(str(tmp_path / f"checkpoint-{number}"))
        np.testing.assert_allclose(again.retriever.encode_query(["fox"]), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="it has adapters already"):
        RAITTrainer(
            model.get_base_model(),
            RAITTrainingArguments(**settings),
            peft_config=LoraConfig(r=2),
            **makers[-1].keywords,
        )


def test_an_unknown_argument_of_a_model_is_an_error(
    raw: Dataset, masked_folder: Path, settings: dict[str, Any]
) -> None:
    args = RetroMAETrainingArguments(**settings)
    with pytest.raises(TypeError, match="pulling"):  # transformers would store it in the configuration and ignore it
        RetroMAETrainer(str(masked_folder), args, train_dataset=raw, model_init_kwargs={"pulling": "mean"})
