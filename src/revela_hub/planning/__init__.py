"""The resources that a training run needs, computed before a GPU is rented (`train METHOD --plan`)."""
