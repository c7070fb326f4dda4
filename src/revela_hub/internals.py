"""Private names of libraries, all in this file.

Written for transformers 5.17 to 5.24, sentence-transformers 6, trl 1.16, datasets 5.2 and huggingface_hub 1 and 2.
`tests/test_private_names.py` fails if another file uses one, except in `modeling/`, whose files also run without this package.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.modules import Transformer
    from torch import Tensor, nn
    from transformers import PreTrainedModel, Trainer

    Base = Trainer
else:
    Base = object

# `MethodTrainer` reports changed settings. transformers' own warning is wrong for fractions such as eval_steps=0.25.
logging.getLogger("transformers.trainer_utils").addFilter(
    lambda record: "arguments do not match the ones in the `trainer_state.json`" not in record.getMessage()
)


class TrainerHooks(Base):
    """Public methods for the private ones of `transformers.Trainer` that have to be changed; it comes first in the list of base classes."""

    _folder_of_checkpoints: Path | None = None

    def write_weights(self, folder: Path, state_dict: "dict[str, Tensor] | None" = None) -> None:
        """Write the files of the model into a folder, which exists. Methods with other files override this.

        Args:
            folder: checkpoint or output folder.
            state_dict: weights gathered from shards; by default the model's own.
        """
        from torch.distributed.fsdp import FSDPModule

        model: Any = self.model
        kind = type(model)
        if isinstance(model, FSDPModule):  # the code to save is that of the model's class, not of FSDP's subclass
            model.__class__ = kind.__mro__[2]  # behind FSDP's own and `FSDPModule`
        try:
            super()._save(str(folder), state_dict)
        finally:
            model.__class__ = kind

    def read_weights(self, folder: Path, model: "nn.Module | None" = None) -> None:
        """Load the files of a checkpoint into the model in training (with FSDP, into its wrapper `model`)."""
        from transformers import Trainer

        # Not `super()`: sentence-transformers' trainer does not read the file of FSDP.
        Trainer._load_from_checkpoint(self, str(folder), model)

    def write_checkpoint(self, output: Path, write: Callable[[Path], None]) -> None:
        """Write a checkpoint; `write(folder)` writes `checkpoint-<step>` into a folder."""
        write(output)

    def save_checkpoint(self) -> None:
        """Write a checkpoint now."""
        self._save_checkpoint(self.model_wrapped, None)

    # The Trainer saves, loads and deletes checkpoints through these, and has no public hook between writing one and deleting others.

    def _save(self, output_dir: str | None = None, state_dict: "dict[str, Tensor] | None" = None) -> None:
        import torch
        from transformers.trainer import TRAINING_ARGS_NAME

        if not self.args.should_save:  # with FSDP and ZeRO-3, called on all processes
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self.write_weights(folder, state_dict)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: "nn.Module | None" = None) -> None:
        self.read_weights(Path(resume_from_checkpoint), model)

    def _save_checkpoint(self, model: "nn.Module", trial: Any) -> None:
        save = super()._save_checkpoint

        def write(folder: Path) -> None:
            self._folder_of_checkpoints = folder
            try:
                save(model, trial)
            finally:
                self._folder_of_checkpoints = None

        self.write_checkpoint(Path(super()._get_output_dir(trial)), write)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._folder_of_checkpoints or super()._get_output_dir(trial))

    # The Trainer trains one step more if a run resumes after its last step, where it was killed before its export. On a stream,
    # it would try again for ever.

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def left_out(self, weight: str) -> bool:
        """Return whether checkpoints do not contain this weight."""
        return False

    # The Trainer warns of these, and of tied weights, which a checkpoint has under their first names.

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied and not self.left_out(name)]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))


def layer_classes(model: "nn.Module") -> list[str]:
    """Return the names of the classes of layers that need not be split between devices and share no weight with another module."""
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [
        (n, type(m).__name__) for n, m in model.named_modules(remove_duplicate=False) if type(m).__name__ in named
    ]
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    shared = [name for names in places.values() if len(names) > 1 for name in names]
    sharing = {kind for layer, kind in layers if any(name.startswith(f"{layer}.") for name in shared)}
    return sorted({kind for _, kind in layers} - sharing)


def transformer_around(model: "PreTrainedModel", tokenizer_folder: str) -> "Transformer":
    """Return sentence-transformers' module around an existing model; its constructor only takes names and folders."""
    from sentence_transformers.sentence_transformer.modules import Transformer

    class Live(Transformer):
        def _load_config(self, *args: Any, **kwargs: Any) -> Any:
            return model.config, False

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return model

    transformer: Transformer = Live(tokenizer_folder)
    # sentence-transformers saves a module under the name of its class, which has to be the stock one.
    transformer.__class__ = Transformer
    return transformer


def fingerprint(dataset: "Dataset") -> str:
    """Return the hash by which `datasets` identifies rows in its cache."""
    return str(dataset._fingerprint)


def limit_waiting_for_the_hub(seconds: float) -> None:
    """Let requests to the Hub fail after this time without data; by default, only those of downloads have a limit."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def limit(request: Any) -> None:  # not `client.timeout`: most functions pass None for each request
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            name: given.get(name) or seconds for name in ("connect", "read", "write", "pool")
        }

    def client() -> Any:
        made: Any = default_client_factory()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], limit]}
        return made

    set_client_factory(client)
