"""Converting labelled tasks, described in YAML, to pairs with instructions and hard negatives."""
