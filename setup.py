"""Maps the top-level folders into the one import package; everything else is declared in pyproject.toml."""

from setuptools import setup

SUBPACKAGES = ["modeling", "data", "trainers", "evaluation", "search", "hub_cards"]

setup(
    packages=["revela_hub", "revela_hub.commands", *(f"revela_hub.{name}" for name in SUBPACKAGES)],
    package_dir={"revela_hub": "src/revela_hub", **{f"revela_hub.{name}": name for name in SUBPACKAGES}},
    package_data={"revela_hub": ["py.typed"], "revela_hub.hub_cards": ["*.j2"]},
)
