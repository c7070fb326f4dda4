"""Loaders of checkpoints refuse what transformers and peft would fill up at random, and everything that is pickled."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import BertForMaskedLM, BertModel, PreTrainedTokenizerBase

from revela_hub.checkpoints import export_checkpoint
from revela_hub.errors import UserError, explain
from revela_hub.hub_cards.tokenizers import with_eos
from revela_hub.modeling import RetroMAEForPreTraining, RevelaForCausalLM
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments
from revela_hub.trainers.baselines.ra_it import RAITTrainer, RAITTrainingArguments


@pytest.fixture
def checkpoints(
    tmp_path: Path,
    llama_folder: Path,
    bpe_tokenizer: PreTrainedTokenizerBase,
    tiny_bert: BertModel,
    wordpiece_tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Path]:
    """One of each kind that can be exported."""
    folders = {name: tmp_path / name for name in ("revela", "adapters", "retromae")}
    revela = RevelaForCausalLM.from_backbones(str(llama_folder), str(llama_folder), group_size=2, max_seq_length=40)
    revela.save_pretrained(folders["revela"])
    adapted = get_peft_model(revela, LoraConfig(r=2, target_modules=r"retriever.*q_proj", init_lora_weights=False))
    adapted.save_pretrained(folders["adapters"])
    revela.config.save_pretrained(folders["adapters"])
    for name in ("revela", "adapters"):
        with_eos(bpe_tokenizer).save_pretrained(folders[name] / "retriever_tokenizer")
        bpe_tokenizer.save_pretrained(folders[name] / "lm_tokenizer")
    retromae = RetroMAEForPreTraining.from_encoder(BertForMaskedLM(tiny_bert.config), max_seq_length=41)
    retromae.save_pretrained(folders["retromae"])
    wordpiece_tokenizer.save_pretrained(folders["retromae"])
    return folders


@pytest.mark.parametrize("name", ["revela", "adapters", "retromae"])
def test_a_checkpoint_without_a_weight_is_not_exported(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = checkpoints[name]
    output = export_checkpoint(folder, tmp_path / "whole")
    (settings,) = output.glob("*/sentence_bert_config.json")
    length = {"revela": 40, "adapters": 40, "retromae": 41}[name]
    assert json.loads(settings.read_text())["max_seq_length"] == length, "the checkpoint's own"
    file = next(file for file in folder.glob("*.safetensors"))
    weights = load_file(file)
    key = next(key for key in weights if "q_proj" in key or "query" in key)
    changes: dict[str, Callable[[], object]] = {
        key: lambda: weights.pop(key),
        "shape|model|load": lambda: weights.update({key: torch.zeros(3, 5)}),
    }
    for message, change in changes.items():
        change()
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message.split(".")[-1]):
            export_checkpoint(folder, tmp_path / "broken")
    assert not list((tmp_path / "broken").rglob("*.safetensors"))


def test_an_adapter_of_another_model(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file = checkpoints["adapters"] / "adapter_model.safetensors"
    save_file({key.replace("layers.0", "layers.9"): value for key, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match="do not fit"):
        export_checkpoint(checkpoints["adapters"], tmp_path / "out")


@pytest.fixture
def custom_norm_folder(retriever_folder: Path, tmp_path: Path) -> Path:
    """`retriever_folder` with a module that is in the folder, as some models of the Hub have."""
    code = "from sentence_transformers.base.modules import Normalize\n\n\nclass CustomNorm(Normalize):\n    pass\n"
    folder = Path(shutil.copytree(retriever_folder, tmp_path / "custom-norm"))
    (folder / "custom_norm.py").write_text(code)
    modules = json.loads((folder / "modules.json").read_text())
    modules[-1]["type"] = "custom_norm.CustomNorm"
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_modules_with_code_of_their_own_are_rejected_before_training(custom_norm_folder: Path) -> None:
    with pytest.raises(UserError, match=r"custom-norm requires remote code \(CustomNorm\)"):
        load_retriever(str(custom_norm_folder), trust_remote_code=True)


def test_a_backbone_with_code_of_its_own_is_trained(retriever_folder: Path, tmp_path: Path) -> None:
    """Transformers saves the code with the weights, unlike sentence-transformers."""
    code = "from transformers import BertModel\n\n\nclass Mine(BertModel):\n    pass\n"
    (retriever_folder / "modeling_mine.py").write_text(code)
    config = json.loads((retriever_folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_mine.Mine"}
    (retriever_folder / "config.json").write_text(json.dumps(config))
    model = load_retriever(str(retriever_folder), trust_remote_code=True)
    assert type(model[0].auto_model).__module__.startswith("transformers_modules")
    rows = Dataset.from_dict(
        {"text": ["The river carries sediment from the mountains to the sea every day of the year."] * 4}
    )
    args = ContrieverTrainingArguments(str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=2, report_to=[])
    trainer = ContrieverTrainer(model, args, train_dataset=rows)
    trainer.train()
    (folder,) = trainer.write_models(str(tmp_path / "out"))
    loaded = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    assert type(loaded[0].auto_model).__name__ == "Mine" and (folder / "modeling_mine.py").is_file()


def test_the_retriever_that_ranks_passages_may_have_code_of_its_own(
    custom_norm_folder: Path, llama_folder: Path, tmp_path: Path
) -> None:
    questions = Dataset.from_dict({"question": ["Where is Paris?"] * 2, "answer": ["France"] * 2})
    given = {"train_dataset": questions, "passages": ["A fox.", "Paris."], "pseudo_labels": str(custom_norm_folder)}
    args = RAITTrainingArguments(str(tmp_path / "ra-it"), report_to=[], bf16=False, disable_tqdm=True)
    train = partial(RAITTrainer, str(llama_folder), args, num_passages=1, **given)
    with pytest.raises(UserError) as raised:
        train()
    assert "trust_remote_code" in explain(raised.value)[0]
    train(model_init_kwargs={"trust_remote_code": True})
