"""What `push_to_hub` means for our trainers: a verified model that a reader can load, and not a raw checkpoint."""

from typing import Any

from transformers import Trainer

from revela_hub.errors import UserError


class PublishingTrainer(Trainer):
    """A `Trainer` whose `push_to_hub` goes through `revela_hub.hub_cards.upload`."""

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        """Publishes the model under `args.hub_model_id`: assembled, verified, uploaded, read back; returns `Published`.

        Raises:
            UserError: without `hub_model_id`, or if a check or the upload fails.
        """
        from revela_hub.hub_cards import Destination, publish

        folder, repo_id = self.args.output_dir, self.args.hub_model_id
        if not folder or not repo_id:
            raise UserError("push_to_hub needs --hub_model_id OWNER/NAME")
        self.save_model(folder)
        if not self.is_world_process_zero():
            return None
        destination = Destination(repo_id, private=bool(self.args.hub_private_repo), update=True)
        return publish(folder, destination)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing is uploaded during a run: a raw checkpoint is not what a reader can load."""
