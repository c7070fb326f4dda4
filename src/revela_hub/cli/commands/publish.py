"""Verify a model and upload it to the Hugging Face Hub.

The model is a checkpoint of `revela-hub train` (LoRA adapters are merged) or a sentence-transformers folder. Before
the upload, all checks of `revela-hub check` have to pass, and the exported model has to reproduce the checkpoint's
vectors. Only files that belong to the model are uploaded, in one commit, whose hashes are compared with the local
files. An interrupted upload can be resumed by running the same command again.

With --update, files of the previous model are deleted, also its weights in other formats. The model card uses the
metadata of the checkpoint and of card.yaml or --card. Log in with `hf auth login` or set HF_TOKEN.

With --space, the page of `revela-hub demo` is published as a Space of the same name. It searches the text that you give
with --space_corpus, which is uploaded with it.

Examples:
  revela-hub publish outputs/run my-name/my-retriever --dry_run
  revela-hub publish outputs/run my-name/my-retriever --private --card card.yaml
  revela-hub publish outputs/adapted my-name/my-retriever --space --space_corpus docs --dry_run
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.options import option, required, values_of
from revela_hub.ranges import PositiveInt, TextLength
from revela_hub.trainers.methods import METHODS

if TYPE_CHECKING:
    from revela_hub.hub_cards import Published

POSITIONALS = ("checkpoint", "repo_id")
PARTS = sorted({part for method in METHODS.values() for part in method.parts})


@dataclass
class Arguments:
    """Arguments of `revela-hub publish`."""

    checkpoint: str = required("Checkpoint folder that training saved, or a sentence-transformers folder.")
    repo_id: str = required("Repository to publish to.")
    private: bool = option(False, "Make a new repository private.")
    revision: str | None = option(None, "Branch to commit to; created if it does not exist.")
    pull_request: bool = option(False, "Open a pull request instead of committing.")
    update: bool = option(False, "Replace the model in an existing repository.")
    dry_run: bool = option(False, "Assemble and verify the model, but do not upload it.")
    output_dir: str | None = option(None, "Folder to keep the assembled files in (default: they are deleted).")
    part: str = option(
        "retriever", f"Part to publish, if its method has it: {', '.join(PARTS)} (model is everything, with its code)."
    )
    space: bool = option(False, "Also publish a demo of the model, a Space of the same name.")
    space_corpus: list[str] = option([], "Text that the Space searches and that is uploaded with it.")
    space_queries: str | None = option(None, "Example queries of the Space, one per line.")
    space_package: str | None = option(
        None,
        "Requirement that installs revela-hub in the Space (default: this version, from PyPI).",
        metavar="REQUIREMENT",
    )
    card: str | None = option(None, "YAML file with metadata for the model card.")
    max_length: TextLength | None = option(
        None, "Maximum number of tokens per text, including EOS (default: the checkpoint's)."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Type of the stored weights (default: unchanged)."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")
    timeout: PositiveInt | None = option(
        None, "Maximum number of seconds for verification (default: 300, plus 180 per GB of weights)."
    )


def run(arguments: Arguments) -> None:
    """Publish, and print the checks, the files and the URL."""
    import torch

    from revela_hub.checkpoints import publish
    from revela_hub.demo.space import open_space
    from revela_hub.hub_cards import Assembly, Destination, ModelCardMetadata

    destination = Destination(**values_of(Destination, arguments))
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    metadata = ModelCardMetadata.from_file(arguments.card, METHODS) if arguments.card else None
    assembly = Assembly(**values_of(Assembly, arguments) | {"dtype": dtype, "metadata": metadata})
    how: dict[str, Any] = {"dry_run": arguments.dry_run, "keep": arguments.output_dir, "log": print}
    if (space := _space(arguments)) and not arguments.dry_run:
        upload_space = open_space(space, arguments.repo_id, private=arguments.private, update=arguments.update)
        how["before_upload"] = lambda: print(f"demo: {upload_space()}")
    published = publish(arguments.checkpoint, destination, assembly, **how)
    _print_checks_and_files(published)
    if published.url is None:
        _print_plan(published, space, arguments.repo_id, arguments.output_dir)
        return
    print(f"\npublished: {published.url} (commit {str(published.commit)[:10]})")
    if space and arguments.private:
        print("The Space is private, too: in its settings, add a secret HF_TOKEN with read access to the model.")


def _space(arguments: Arguments) -> dict[str, str]:
    """Return the files of the Space; empty without --space."""
    from revela_hub.demo.space import space_files

    if not arguments.space:
        return {}
    if not arguments.space_corpus:
        raise UserError("--space needs a text to search: give --space_corpus PATH")
    if arguments.revision or arguments.pull_request:
        raise UserError("--space shows the model of the main branch: leave out --revision and --pull_request")
    return space_files(
        arguments.repo_id,
        arguments.space_corpus,
        arguments.space_queries,
        arguments.space_package,
        trust_remote_code=arguments.trust_remote_code,
    )


def _print_checks_and_files(published: "Published") -> None:
    from revela_hub.hub_cards import as_table

    print(f"{as_table(published.checks)}\n")
    for name, size in published.files.items():
        print(f"{size:>14,}  {name}")
    print(f"{sum(published.files.values()):>14,}  bytes in {counted(len(published.files), 'file')}")
    if published.skipped:
        print(f"\nskipped, because they are not model files: {', '.join(published.skipped)}")


def _print_plan(published: "Published", space: dict[str, str], repo_id: str, keep: str | None) -> None:
    """Print what an upload would change, and the files of the Space."""
    for name in published.deleted:
        print(f"would delete from {repo_id}: {name}")
    if space:
        print("\nfiles of the Space:")
        print("\n".join(f"{len(text.encode()):>14,}  {name}" for name, text in space.items()))
        print(f"\napp.py:\n\n{space['app.py'].rstrip()}")
    card = f"{keep}/model/README.md" if keep else "FOLDER/model/README.md, with --output_dir FOLDER"
    print(f"\ncard: {card}")
    print(f"dry run: nothing was uploaded to {repo_id}")
