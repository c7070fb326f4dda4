"""Fine-tuning on query-passage pairs, labelled or natural: the record of `revela-hub train pairs`."""

from revela_hub.hub_cards.method import Command, Method, Paper

PAIR_TUNING = Method(
    name="pair_tuning",
    title="Pairs",
    paper=Paper(
        title="Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
        authors="Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan",
        arxiv="2101.06983",
        year=2021,
        does=(
            "fine-tuned on query-passage pairs with sentence-transformers' CachedMultipleNegativesRankingLoss: "
            "the other passages of a batch are negatives"
        ),
    ),
    commands={
        "train pairs": Command(
            "revela_hub.trainers.pair_tuning.command",
            "fine-tune a retriever on labelled or natural query-passage pairs",
        )
    },
    models=("retriever",),
)
