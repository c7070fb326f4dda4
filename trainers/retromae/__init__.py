"""RetroMAE: arguments, collator, trainer, checkpoint, export."""

from revela_hub.hub_cards.method import Command, Method, Paper

PAPER = Paper(
    title="RetroMAE: Pre-Training Retrieval-oriented Language Models Via Masked Auto-Encoder",
    authors="Shitao Xiao and Zheng Liu and Yingxia Shao and Zhao Cao",
    arxiv="2205.12035",
    year=2022,
    does=(
        "pre-trained on raw text as a masked auto-encoder: a one-layer decoder has to reconstruct a "
        "passage from its single vector"
    ),
)
RETROMAE = Method(
    name="retromae",
    title="RetroMAE",
    paper=PAPER,
    commands={
        "train retromae": Command(
            "revela_hub.trainers.retromae.command", "pre-train an encoder for retrieval on raw text with RetroMAE"
        )
    },
    model_type="retromae",
    parts=("retriever", "model"),
    folders={"encoder": "retriever"},
    loader="revela_hub.trainers.retromae.checkpoint.load_retromae_checkpoint",
    assembler="revela_hub.trainers.retromae.checkpoint.assemble_retromae",
    models=("encoder",),
)
