"""Options that have been renamed: the old names still work on the command line, in YAML files and in stored settings.

A class of options names them in `old_names`, a dict from the old to the new name.
"""


def old_names(arguments: type) -> dict[str, str]:
    """Return the old names that a dataclass of options accepts, with their new names.

    >>> class Options:
    ...     old_names = {"passages": "corpus"}
    >>> old_names(Options)
    {'passages': 'corpus'}
    """
    return {old: new for cls in arguments.__mro__ for old, new in vars(cls).get("old_names", {}).items()}
