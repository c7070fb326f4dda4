"""Output folders are not inside the data that a command reads."""

from collections.abc import Iterable
from pathlib import Path

from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError
from revela_hub.files import local_path


def check_apart(sources: Iterable[Source], output: Path) -> None:
    """Check that the output is not inside the data, where the next run would read it."""
    for source in sources:
        folder = local_path(source.path)
        if source.is_dataset or not folder.is_dir() or not output.resolve().is_relative_to(folder.resolve()):
            continue
        inside = output.resolve().relative_to(folder.resolve())
        if not any(source.excluding(folder / part, part) for part in (inside, *inside.parents)):
            raise UserError(
                f"{output} is inside the data folder {folder}: choose another one, or exclude it (--exclude)"
            )
