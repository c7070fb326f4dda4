"""What a training run needs, before a GPU is rented (`train METHOD --plan`)."""
