"""A run on two processes that share one model, and the configurations of `accelerate` for such runs."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from processes import launch
from test_revela_trainer import WORDS, groups, losses, trainer

from revela_hub.trainers.revela.checkpoint import load_checkpoint

__all__ = ["groups"]  # a fixture

_SHARDED = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import load_from_disk
import torch
from safetensors.torch import load_file
from test_revela_trainer import RevelaTrainer, losses, trainer
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.trainers.base.measuring import BestWeights
initialise = RevelaTrainer.create_accelerator_and_postprocess
def with_cpus(self):  # accelerate shards on GPUs only; FSDP2 itself does not mind CPUs
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    initialise(self)
RevelaTrainer.create_accelerator_and_postprocess = with_cpus
run = trainer(Path({out!r}), Path({llama!r}), load_from_disk({data!r}), gradient_accumulation_steps=2, lora_rank=0,
              train_sampling_strategy="sequential")
texts = {{f"d{{n}}": f"river {{word}} sea" for n, word in enumerate({words!r})}}
queries = {{f"q{{n}}": word for n, word in enumerate({words!r}[:8])}}
run.retrieval_task = RetrievalTask(texts, queries, {{f"q{{n}}": {{f"d{{n}}": 1}} for n in range(8)}}, "words")
best = BestWeights(run, Path({out!r}))
best.last = True
run.add_callback(best)
run.eval_dataset, run.args.eval_strategy, run.args.eval_steps = {{}}, "steps", 2
run.evaluate()
run.train()
run.evaluate()
assert sorted(best.scores) == [0, 2, 4] and run.state.global_step == 4
assert {{type(p.data).__name__ for p in run.model_wrapped.parameters()}} == {{"DTensor"}}
run.save_model({out!r})
outcome = best.finish()
assert {{type(p.data).__name__ for p in run.model_wrapped.parameters()}} == {{"DTensor"}}
torch.distributed.barrier()
stored = [load_file(best._file(step)) for step in (0, run.state.global_step)]
torch.distributed.barrier()
best.scores[99] = best.scores[0]
best.store(99)  # as exported
torch.distributed.barrier()
for name, value in load_file(best._file(99)).items():
    assert torch.equal(value, stored[1][name]), name
assert any(not torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
if run.is_world_process_zero():
    Path({out!r}, "losses.json").write_text(json.dumps(losses(run)))
"""


@pytest.mark.slow
def test_a_sharded_run_is_a_run_on_one_process(
    tmp_path: Path, repository: Path, llama_folder: Path, groups: Dataset
) -> None:
    """By FSDP2 with the settings of examples/accelerate/fsdp.yaml: the losses, and an ordinary checkpoint."""
    config = yaml.safe_load((repository / "examples" / "accelerate" / "fsdp.yaml").read_text())["fsdp_config"]
    environment = {name.upper(): str(value) for name, value in config.items()} | {"ACCELERATE_USE_FSDP": "true"}
    groups.save_to_disk(tmp_path / "data")
    out, script = tmp_path / "sharded", tmp_path / "run.py"
    names: dict[str, object] = {
        "tests": str(Path(__file__).parent),
        "llama": str(llama_folder),
        "data": str(tmp_path / "data"),
        "words": WORDS,
    }
    script.write_text(_SHARDED.format(out=str(out), **names))
    launch(str(script), processes=2, environment=environment)
    one = trainer(
        tmp_path / "one", llama_folder, groups, gradient_accumulation_steps=4, lora_rank=0,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    one.train()
    assert json.loads((out / "losses.json").read_text()) == pytest.approx(losses(one), rel=1e-4)
    assert (out / "modeling_revela.py").is_file()
    expected = one.revela.state_dict()
    for name, value in load_checkpoint(out).model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-3, msg=name)


def test_accelerate_reads_the_configuration(repository: Path) -> None:
    config = load_config_from_file(str(repository / "examples" / "accelerate" / "fsdp.yaml"))
    assert config.distributed_type.value == "FSDP"
    assert (config.num_processes, config.mixed_precision) == (8, "bf16")
