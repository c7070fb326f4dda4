"""Saved models load by the code in their folder, in a process that cannot import this package, and compute the same."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_cot_mote_model
import test_imprag_model
import test_retromae_model
import test_revela_model
import torch
from processes import reader
from small_models import masked_lm

from revela_hub.modeling import CoTMoTEForPreTraining

CODE = """
import sys; sys.modules["revela_hub"] = None
import torch, transformers
for case in torch.load(sys.argv[1]):
    model = getattr(transformers, case["auto"]).from_pretrained(case["folder"], trust_remote_code=True).eval()
    assert type(model).__name__ == case["kind"] and type(model).__module__.startswith("transformers_modules")
    with torch.no_grad():
        output = model(**case["batch"])
    for name, value in case["expected"].items():
        torch.testing.assert_close(output[name], value)
    if "generated" in case:
        assert torch.equal(model.generate(**case["batch"], max_new_tokens=5, do_sample=False), case["generated"])
        assert model.backbone.lm_head.weight is model.get_input_embeddings().weight
"""


@pytest.mark.slow
@torch.no_grad()
def test_saved_models_load_by_their_own_code_in_a_fresh_process(tmp_path: Path) -> None:
    cot_mote = CoTMoTEForPreTraining.from_backbone(masked_lm()).eval()
    test_cot_mote_model.shake(cot_mote)
    imprag = test_imprag_model.build("Qwen3", {"tie_word_embeddings": True})
    revela = test_revela_model.build(v_normalization=True)
    retromae = test_retromae_model.build()
    read = test_imprag_model.prompts() | test_imprag_model.passages()
    texts = test_cot_mote_model.texts() | {"expert": ["query", "passage", "passage"]}
    spans = test_cot_mote_model.pre_training() | {"expert": texts["expert"]}
    models: list[tuple[Any, dict[str, Any], list[str], list[str]]] = [
        (revela, test_revela_model.inputs(), ["loss", "logits"], ["AutoModelForCausalLM", "AutoModel"]),
        (retromae, test_retromae_model.inputs(), ["loss"], ["AutoModelForPreTraining", "AutoModel"]),
        (cot_mote, spans, ["loss"], ["AutoModelForPreTraining"]),
        (cot_mote.encoder, texts, ["pooler_output", "sparse"], ["AutoModel"]),
        (imprag, read, ["logits"], ["AutoModelForCausalLM"]),
    ]
    cases: list[dict[str, Any]] = []
    for number, (model, batch, names, autos) in enumerate(models):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        output = model(**batch)
        case = {"folder": str(folder), "batch": batch, "kind": type(model).__name__}
        case["expected"] = {name: output[name] for name in names}
        cases += [case | {"auto": auto} for auto in autos]
    hidden = imprag.get_decoder()(read["input_ids"], read["attention_mask"]).last_hidden_state
    alone = {"batch": {name: read[name] for name in ("input_ids", "attention_mask")}}
    cases.append(
        cases[-1] | alone | {"auto": "AutoModel", "kind": "ImpRAGModel", "expected": {"last_hidden_state": hidden}}
    )
    cases[-2]["generated"] = imprag.generate(**read, max_new_tokens=5, do_sample=False)
    torch.save(cases, tmp_path / "cases.pt")
    done = subprocess.run(reader(CODE, str(tmp_path / "cases.pt")), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(file.name for file in (tmp_path / "3").glob("*.py")) == [
        "backbones.py", "configuration_base.py", "configuration_cot_mote.py", "expert_encoders.py",
        "linear_cross_entropy.py", "masked_lm.py", "modeling_cot_mote.py",
    ]  # fmt: skip
