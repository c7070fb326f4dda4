"""Export and `push_to_hub` for trainers: publishes a verified model that loads without this package, not a raw checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from revela_hub.errors import UserError
from revela_hub.paths import local_path
from revela_hub.trainers.base.sharding import is_sharded

if TYPE_CHECKING:
    from transformers import Trainer

    from revela_hub.hub_cards.assemble import Assembled, Assembly
    from revela_hub.hub_cards.method import Method
    from revela_hub.hub_cards.upload import Published

    Base = Trainer
else:
    Base = object


class Publishing(Base):
    """Mixin for a Trainer that exports and publishes what its method's record describes.

    The Hub is not contacted before `push_to_hub`; neither `save_model` nor checkpoints upload anything.
    """

    method: ClassVar["Method"]

    def exported_folders(self) -> Mapping[str, str]:
        """Return the folders that `write_models` writes, each with the part in it."""
        return self.method.folders

    def exportable(self) -> Any:
        """Return the trained model in the form that `method.loader` loads from a checkpoint; None to load it from there.

        The model in memory is copied, not changed, so training can continue after the export.
        """
        return None

    def assemble(self, checkpoint: Path, folder: Path, assembly: "Assembly") -> "Assembled":
        """Write the model to publish. The checkpoint has just been saved from the same weights."""
        from revela_hub.hub_cards.assemble import assemble_part

        return assemble_part(self.method, checkpoint, folder, assembly, self._exportable())

    def write_models(self, output: str | Path) -> list[Path]:
        """Save the model to the output folder and write the exported models; must be called by all processes.

        Returns:
            The folders that get a model card; empty except on the main process.
        """
        from revela_hub.hub_cards.assemble import export_parts

        output = local_path(output)
        self.save_model(str(output))
        if not self.args.should_save:
            return []
        return export_parts(self.method, output, output, self.exported_folders(), loaded=self._exportable())

    def _exportable(self) -> Any:
        assert self.model is not None
        return None if is_sharded(self.model) else self.exportable()

    def push_to_hub(  # type: ignore[override] # returns more details
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> "Published | None":
        """Assemble, verify and upload the model to `args.hub_model_id`.

        Args:
            commit_message: ignored; commit messages are generated.
            blocking: must be True.
            token: overrides `args.hub_token`, which overrides the token of `hf auth login` or HF_TOKEN.
            revision: branch; overrides `args.hub_revision`.
            private: overrides `args.hub_private_repo`.
            **kwargs: ignored; the card's metadata is read from the checkpoint's card.yaml.

        Returns:
            The published model; None except on the main process.

        Raises:
            UserError: `hub_model_id` is missing, a check fails or the upload fails.
        """
        from revela_hub.hub_cards.assemble import Assembly
        from revela_hub.hub_cards.repository import Destination
        from revela_hub.hub_cards.upload import publish

        args = self.args
        if not args.output_dir or not args.hub_model_id:
            raise UserError("push_to_hub needs --hub_model_id OWNER/NAME")
        destination = Destination(
            args.hub_model_id,
            private=bool(args.hub_private_repo if private is None else private),
            revision=revision or args.hub_revision,
            update=True,
            token=token or args.hub_token,
        )
        self.save_model(args.output_dir)
        if not self.is_world_process_zero():
            return None
        methods = {self.method.name: self.method}
        return publish(self.assemble, args.output_dir, destination, Assembly(), methods=methods)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Check the options without contacting the Hub: the repository is created after training.

        Raises:
            UserError: `hub_model_id` is missing or invalid, or the strategy would upload raw checkpoints.
        """
        from transformers.trainer_utils import HubStrategy

        from revela_hub.hub_cards.repository import Destination

        if not self.args.hub_model_id:
            raise UserError("push_to_hub needs --hub_model_id OWNER/NAME")
        Destination(self.args.hub_model_id, revision=self.args.hub_revision)
        if self.args.hub_strategy in ("checkpoint", "all_checkpoints"):
            raise UserError(
                f"--hub_strategy {self.args.hub_strategy} would upload raw checkpoints, which contain pickles and cannot be"
                " loaded by users: remove the option; the trained model is published at the end"
            )
        self.args.hub_strategy = HubStrategy.END  # upload nothing during training

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer` does, but without publishing it or writing the token to training_args.bin."""
        from revela_hub.hub_cards.export import make_readable

        token, self.args.hub_token = self.args.hub_token, None
        try:
            super().save_model(output_dir, _internal_call=True)
        finally:
            self.args.hub_token = token
        if self.args.should_save:
            make_readable(Path(output_dir or self.args.output_dir or "."))
