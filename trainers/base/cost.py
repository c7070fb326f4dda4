"""Time, hardware and (with codecarbon) energy of a run, for the model card."""

import time
from typing import Any, cast

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import CodeCarbonCallback
from transformers.trainer_callback import ExportableState

from revela_hub.data.sources.report import counted
from revela_hub.trainers.base.progress import clock


class WallTime(TrainerCallback, ExportableState):
    """Callback that counts the seconds of training and evaluation, over all parts of a resumed run."""

    def __init__(self) -> None:
        self.earlier = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.earlier + (time.monotonic() - self._began if self._began is not None else 0)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {"earlier": round(self.seconds, 1)}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start with the checkpoint's seconds. Checkpoints of earlier versions have none."""
        kept = cast(dict[str, Any], state.stateful_callbacks)
        self.earlier = kept.get(type(self).__name__, self.state())["attributes"]["earlier"]
        self._began = time.monotonic()
        kept[type(self).__name__] = self.state()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop counting."""
        self.earlier, self._began = self.seconds, None


def hardware(device: torch.device, processes: int = 1) -> str:
    """Describe the hardware: `2 x NVIDIA H100` or `CPU (2 threads, AVX2)`."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"CPU ({threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()})"
    else:
        name = device.type.upper()
    return f"{processes} x {name}" if processes > 1 else name


def describe_cost(trainer: Trainer, *, resumed: bool = False) -> str:
    """Return the steps, duration, hardware and energy of a run as sentences; codecarbon knows only the part since it was resumed."""
    processes = trainer.args.world_size * max(trainer.args.n_gpu, 1)
    took = next((each.seconds for each in trainer.callback_handler.callbacks if isinstance(each, WallTime)), 0.0)
    where = hardware(trainer.args.device, processes)
    text = f"Trained for {counted(trainer.state.global_step, 'step')} in {clock(took)} on {where}."
    if emissions := co2_emissions(trainer):
        text += (
            f" codecarbon estimates {emissions['energy_consumed'] * 1000:.3g} Wh of energy and"
            f" {emissions['emissions']:.3g} g of CO2"
        )
        text += " since the run was last resumed." if resumed else "."
    return text


def co2_emissions(trainer: Trainer) -> dict[str, Any]:
    """Return the Hub's `co2_eq_emissions` as codecarbon measured them (`--report_to codecarbon`): grams and kWh; empty without it.

    The place of the machine, which codecarbon also finds out, is left out.
    """
    trackers = [each.tracker for each in trainer.callback_handler.callbacks if isinstance(each, CodeCarbonCallback)]
    found = getattr(trackers[0], "final_emissions_data", None) if trackers else None
    if found is None:
        return {}
    used = found.gpu_model or found.cpu_model
    return {
        "emissions": float(f"{found.emissions * 1000:.4g}"),
        "energy_consumed": float(f"{found.energy_consumed:.4g}"),
        "source": "codecarbon",
        "training_type": "fine-tuning",
        **({"hardware_used": used} if used else {}),
    }
