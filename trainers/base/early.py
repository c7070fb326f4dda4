"""Check options before any model is loaded, by trying optimizers and schedules on a single weight.

transformers itself reports mistakes in them only after loading.
"""

import re
from copy import copy
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.debug_utils import DebugOption
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from revela_hub.errors import UserError, first_line, require

MEASURING_PACKAGES = ("bm25s", "Stemmer", "pytrec_eval", "matplotlib")
"""Modules required for evaluation."""
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that depend on the evaluation metric."""
CONFLICTING_OPTIONS = {
    "enable_jit_checkpoint": "every run saves a checkpoint when it gets SIGTERM",
    "logging_nan_inf_filter": "it would hide a loss that is NaN or infinite, at which a run stops",
    "remove_unused_columns": "the collators read all columns",
}
"""Switches of transformers that would disable what the trainers do."""
METRIC = "ndcg_at_10"
"""Metric that selects the best checkpoint."""


def check_early(arguments: TrainingArguments) -> None:
    """Raise a `UserError` if a package is not installed, and a `ValueError` that names the option with an invalid value."""
    _check_reports(arguments)
    if arguments.use_liger_kernel:
        require("liger_kernel")
    if arguments.torch_compile:
        settings: Any = {"backend": arguments.torch_compile_backend, "mode": arguments.torch_compile_mode}
        _try("torch_compile", lambda: torch.compile(nn.Identity(), **settings))
    if DebugOption.UNDERFLOW_OVERFLOW in arguments.debug:
        raise ValueError(
            "--debug underflow_overflow is not supported, because its hooks cannot read masks: remove the option"
        )
    for name in CONFLICTING_OPTIONS:
        if getattr(arguments, name, False):
            raise ValueError(f"--{name} true is not supported: {CONFLICTING_OPTIONS[name]}; remove the option")
    for pattern, rate in (getattr(arguments, "learning_rate_mapping", None) or {}).items():
        _try("learning_rate_mapping", partial(re.compile, pattern))
        if not isinstance(rate, (int, float)):
            raise ValueError(f"--learning_rate_mapping: expected a number for {pattern!r}, not {rate!r}")
    if arguments.load_best_model_at_end and arguments.eval_strategy == "no":
        raise ValueError("load_best_model_at_end needs an evaluation during training: set eval_corpus")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    if arguments.optim != "adamw_torch_fused" or arguments.optim_args:
        _check_optimizer(arguments)
    _try("lr_scheduler_type", lambda: _schedule(arguments, optimizer))


def _try(option: str, work: object) -> None:
    try:
        work()  # type: ignore[operator]
    except ImportError as error:
        raise UserError(f"--{option}: {first_line(error)}") from error
    except Exception as error:  # any exception of the library is about this option
        raise ValueError(f"--{option}: {first_line(error)}") from error


def _schedule(arguments: TrainingArguments, optimizer: torch.optim.Optimizer, steps: int = 10) -> None:
    """Run the schedule past one step of warm-up, after which it reads some of its settings."""
    given = cast("dict[str, Any]", arguments.lr_scheduler_kwargs or {})
    schedule = get_scheduler(arguments.lr_scheduler_type, optimizer, 1, steps, dict(given))
    for _ in range(0 if arguments.lr_scheduler_type in METRIC_SCHEDULES else steps):
        optimizer.step()
        schedule.step()


def _check_reports(arguments: TrainingArguments) -> None:
    available = get_available_reporting_integrations()
    for name in arguments.report_to or ():
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"--report_to {name} is unknown: choose none, {', '.join(INTEGRATION_TO_CALLBACK)}")
        if name not in available and name not in ("flyte", "kubeflow"):  # not packages to install
            package = name.replace("_", "-")
            raise UserError(
                f"--report_to {name} needs the package {package}, which is not installed: pip install {package}"
            )


def _check_optimizer(arguments: TrainingArguments) -> None:
    name = getattr(arguments.optim, "value", arguments.optim)
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
        if arguments.optim_args:
            plain = copy(arguments)
            plain.optim_args = None
            if options == Trainer.get_optimizer_cls_and_kwargs(plain)[1]:
                raise UserError(f"--optim_args has no effect on --optim {name}: remove the option")
            kind([nn.Parameter(torch.zeros(1))], **options)
    except UserError:
        raise
    except Exception as error:
        if not re.search("model", str(error), re.IGNORECASE):  # some optimizers need the model's layers
            option = "--optim_args" if arguments.optim_args else f"--optim {name}"
            raise UserError(f"{option}: {first_line(error)}") from error
