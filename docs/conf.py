"""Configuration of the documentation site; `make docs` builds it from the installed package."""

import importlib
import importlib.metadata
import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import revela_hub

project = "revela-hub"
author = "The revela-hub contributors"
project_copyright = author
release = revela_hub.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_inline_tabs",
    "sphinx_markdown_builder",
    "generated",  # after autodoc, to whose events it connects
]
exclude_patterns = ["README.md"]
# Headings of benchmark pages may skip a level; the output of a search may hold unbalanced quotes.
suppress_warnings = ["config.cache", "myst.header", "misc.highlighting_failure"]
nitpicky = False

# Markdown
myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 4
smartquotes = False
html_math_renderer = "mathml"

# Python API
default_role = "code"
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A site that is read in light and dark, and copied from
html_theme = "furo"
html_title = f"revela-hub {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r"^\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_exclude = ".linenos, .go"

urls = importlib.metadata.metadata("revela-hub").get_all("Project-URL") or []
SOURCE = dict(url.split(", ", 1) for url in urls).get("Source", "")
# Links from the Python API to the source: into the repository where the package names one, and otherwise into the site.
extensions.append("sphinx.ext.linkcode" if SOURCE else "sphinx.ext.viewcode")


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of an object's source: `<Source>/blob/v<release>/<file>#L<first>-L<last>`."""
    if domain != "py" or not info["module"]:
        return None
    found: Any = importlib.import_module(info["module"])
    try:
        for name in info["fullname"].split("."):
            found = getattr(found, name)
        lines, first = inspect.getsourcelines(found)
        module = inspect.getmodule(found)
    except (AttributeError, OSError, TypeError):
        return None
    if module is None or not module.__name__.startswith("revela_hub"):
        return None
    file = Path(*module.__name__.split(".")).with_suffix(".py")
    parts = file.parts[1:] if (Path(__file__).parents[1] / file.parts[1]).is_dir() else ("src", *file.parts)
    return f"{SOURCE}/blob/v{release}/{'/'.join(parts)}#L{first}-L{first + len(lines) - 1}"
