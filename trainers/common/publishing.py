"""What `push_to_hub` means for our trainers: a verified model that a reader can load, and not a raw checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from revela_hub.errors import UserError

if TYPE_CHECKING:
    from transformers import Trainer

    from revela_hub.hub_cards.assemble import Assembled, Assembly
    from revela_hub.hub_cards.method import Method
    from revela_hub.hub_cards.upload import Published

    Base = Trainer
else:
    Base = object


class Publishing(Base):
    """Beside a Trainer: its `push_to_hub` publishes what the method's `assemble` makes of the checkpoint.

    The Hub is asked nothing before `push_to_hub`, and nothing is uploaded by `save_model` or during a run.
    """

    method: ClassVar["Method"]

    def assemble(self, checkpoint: Path, folder: Path, assembly: "Assembly") -> "Assembled":
        """Writes the model that readers load, from the checkpoint that was just saved."""
        from revela_hub.hub_cards.assemble import assemble_part

        return assemble_part(self.method, checkpoint, folder, assembly)

    def write_models(self, output: Path) -> list[Path]:
        """Saves the model into the output folder and writes the folders that readers load; called by all processes.

        Returns:
            The folders that get a card; none in processes other than the main one.
        """
        from revela_hub.hub_cards.assemble import export_parts

        self.save_model(str(output))
        return export_parts(self.method, output, output, lm="lm" in self.method.parts) if self.args.should_save else []

    def push_to_hub(  # type: ignore[override] # what it returns says more
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> "Published | None":
        """Publishes the model under `args.hub_model_id`: assembled, verified, uploaded, read back.

        Args:
            commit_message: not used: every upload is one commit of the same kind.
            blocking: only True: what was uploaded is read back before this returns.
            token: instead of `args.hub_token`, and that instead of the one of `hf auth login` or HF_TOKEN.
            revision: branch, instead of `args.hub_revision`.
            private: instead of `args.hub_private_repo`.
            **kwargs: not used: what the card says comes from the checkpoint's card.yaml.

        Returns:
            What was published; None in processes other than the main one.

        Raises:
            UserError: without `hub_model_id`, or if a check or the upload fails.
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
        """Looks at the options only: before there is a model, nothing is asked of the Hub and nothing is made there.

        Raises:
            UserError: no `hub_model_id`, one that the Hub would refuse, or a strategy that uploads raw checkpoints.
        """
        from revela_hub.hub_cards.repository import Destination

        if not self.args.hub_model_id:
            raise UserError("push_to_hub needs --hub_model_id OWNER/NAME")
        Destination(self.args.hub_model_id, revision=self.args.hub_revision)
        if self.args.hub_strategy in ("checkpoint", "all_checkpoints"):
            raise UserError(
                f"--hub_strategy {self.args.hub_strategy} would upload raw checkpoints, which hold pickles and which no"
                " reader can load: leave it out, the finished model is published at the end"
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in the Trainer, which would publish here, too, with `--push_to_hub`, and write the token into training_args.bin."""
        from revela_hub.hub_cards.export import make_readable

        token, self.args.hub_token = self.args.hub_token, None
        try:
            super().save_model(output_dir, _internal_call=True)
        finally:
            self.args.hub_token = token
        if self.args.should_save:
            make_readable(Path(output_dir or self.args.output_dir or "."))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing is uploaded during a run: a raw checkpoint is not what a reader can load."""
