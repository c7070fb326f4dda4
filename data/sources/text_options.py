"""The options that all commands that read text share."""

from dataclasses import dataclass
from typing import Any, Literal

from revela_hub.options import option
from revela_hub.ranges import PositiveInt


@dataclass(kw_only=True)
class TextOptions:
    """Options for reading text."""

    option_group = "text"

    kind: Literal["auto", "text", "code"] = option(
        "auto", "How to read files: text, code (Python functions), or by file extension (auto)."
    )
    text_column: str = option("text", "Column or JSON field that holds the text.")
    exclude: list[str] = option([], "Names of files and folders to skip, e.g. '*.min.js' or tests.")
    max_documents: PositiveInt | None = option(None, "Maximum number of documents to read from each source.")

    def text_options(self) -> dict[str, Any]:
        """Return these options as defaults for `parse_sources` and `read_documents`."""
        return {
            "kind": None if self.kind == "auto" else self.kind,
            "text_column": self.text_column,
            "exclude": tuple(self.exclude),
            "max_documents": self.max_documents,
        }
