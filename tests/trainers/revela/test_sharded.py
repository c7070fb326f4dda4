"""A run on two processes that share one model, and the configurations of `accelerate` for such runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from test_revela_trainer import groups, losses, trainer

from revela_hub.trainers import load_checkpoint

__all__ = ["groups"]  # a fixture

_SHARDED = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import load_from_disk
from test_revela_trainer import RevelaTrainer, losses, trainer
initialise = RevelaTrainer.create_accelerator_and_postprocess
def with_cpus(self):  # accelerate shards on GPUs only; FSDP2 itself does not mind CPUs
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    initialise(self)
RevelaTrainer.create_accelerator_and_postprocess = with_cpus
run = trainer(Path({out!r}), Path({llama!r}), load_from_disk({data!r}), gradient_accumulation_steps=2, lora_rank=0,
              train_sampling_strategy="sequential")
run.train()
assert {{type(p.data).__name__ for p in run.model_wrapped.parameters()}} == {{"DTensor"}}
run.save_model({out!r})
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
    names = {"tests": str(Path(__file__).parent), "llama": str(llama_folder), "data": str(tmp_path / "data")}
    script.write_text(_SHARDED.format(out=str(out), **names))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        [sys.executable, *launch], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
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


@pytest.mark.parametrize(("name", "kind"), [("fsdp", "FSDP"), ("zero3", "DEEPSPEED")])
def test_accelerate_reads_the_configurations(repository: Path, name: str, kind: str) -> None:
    config = load_config_from_file(str(repository / "examples" / "accelerate" / f"{name}.yaml"))
    assert config.distributed_type.value == kind
    assert (config.num_processes, config.mixed_precision) == (8, "bf16")
