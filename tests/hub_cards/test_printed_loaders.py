"""The code that `export` prints, and cards and the page "Load with transformers" show, runs in a process without this package."""

import copy
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import reader
from transformers import BertForMaskedLM

from revela_hub.checkpoints import METHODS
from revela_hub.cli import main as cli
from revela_hub.hub_cards import ModelCardMetadata, write_card
from revela_hub.hub_cards.tokenizers import with_eos
from revela_hub.modeling import (
    CoTMoTEForPreTraining,
    ImpRAGForCausalLM,
    NVEmbedModel,
    RetroMAEForPreTraining,
    RevelaForCausalLM,
)
from revela_hub.trainers.nvembed.checkpoint import export_nvembed

READER = """
import json, sys, traceback
sys.modules["revela_hub"] = None
from sentence_transformers import SentenceTransformer, SparseEncoder
from transformers import AutoModel, AutoModelForCausalLM
failed = []
for code in json.load(open(sys.argv[1])):
    try:
        exec(code, dict(globals()))
    except Exception:
        failed.append(code + "\\n" + traceback.format_exc())
print(*failed, sep="\\n")
sys.exit(len(failed))
"""


def revela(folder: Path, given: SimpleNamespace) -> None:
    model = RevelaForCausalLM.from_backbones(type(given.llama.model)(given.llama.config), given.llama, group_size=2)
    model.save_pretrained(folder)
    with_eos(given.bpe).save_pretrained(folder / "retriever_tokenizer")
    given.bpe.save_pretrained(folder / "lm_tokenizer")


def retromae(folder: Path, given: SimpleNamespace) -> None:
    RetroMAEForPreTraining.from_encoder(BertForMaskedLM(given.bert.config)).save_pretrained(folder)
    given.wordpiece.save_pretrained(folder)


def nvembed(folder: Path, given: SimpleNamespace) -> None:
    model = NVEmbedModel.from_backbone(given.llama, num_latents=4, num_heads=2)
    export_nvembed(model, given.bpe, folder / "embedder", max_length=64, prompts={})


def cot_mote(folder: Path, given: SimpleNamespace) -> None:
    CoTMoTEForPreTraining.from_backbone(BertForMaskedLM(given.bert.config), max_seq_length=32).save_pretrained(folder)
    given.wordpiece.save_pretrained(folder)


def imprag(folder: Path, given: SimpleNamespace) -> None:
    ImpRAGForCausalLM.from_backbone(given.llama, b=0, t=1, k=2, l_max=32).save_pretrained(folder)
    given.bpe.save_pretrained(folder)


# The names of the page, and the folders that the test writes.
PAGE = Path(__file__).resolve().parents[2] / "docs/load-with-transformers.md"
NAMES = {
    "retriever": "revela's models/retriever",
    "lm": "revela's models/lm",
    "joint-model": "revela",
    "pretrained": "retromae",
    "dense": "cot_mote's models/dense",
    "sparse": "cot_mote's models/sparse",
    "experts": "cot_mote's models/model",
    "embedder": "nvembed's models/embedder",
    "imprag": "imprag's models/model",
}
MAKERS: tuple[Callable[[Path, SimpleNamespace], None], ...] = (revela, retromae, nvembed, cot_mote, imprag)


def test_printed_code_runs_in_a_clean_process(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    fixtures = {"llama": "tiny_llama", "bert": "tiny_bert", "bpe": "bpe_tokenizer", "wordpiece": "wordpiece_tokenizer"}
    given = SimpleNamespace(**{name: request.getfixturevalue(fixture) for name, fixture in fixtures.items()})
    codes, loaders = [], []
    for make in MAKERS:
        checkpoint, output = tmp_path / make.__name__, tmp_path / f"{make.__name__}'s models"
        make(checkpoint, copy.deepcopy(given))  # NV-Embed removes the causal mask from the given model
        capsys.readouterr()
        more = ["--lm"] if make is revela else []
        assert cli.main(["export", str(checkpoint), "--output_dir", str(output), *more]) == 0
        printed = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
        loaders += printed
        codes += printed
        for folder in sorted(path for path in output.iterdir() if path.is_dir()):
            card = write_card(folder, ModelCardMetadata(method=METHODS[make.__name__]), repo_id=str(folder)).read_text()
            codes += re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(loaders) == 8
    assert len(codes) == 2 * len(loaders)
    shown = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    codes += [re.sub(r"my-name/my-([\w-]+)", lambda name: str(tmp_path / NAMES[name[1]]), code) for code in shown]
    (tmp_path / "codes.json").write_text(json.dumps(codes))
    command = reader(READER, str(tmp_path / "codes.json"))
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
