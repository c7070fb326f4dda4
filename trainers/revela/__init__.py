"""Revela: arguments, collator, trainer, checkpoint, export."""

from revela_hub.hub_cards.method import Command, Method, Paper

PAPER = Paper(
    title="Revela: Dense Retriever Learning via Language Modeling",
    authors=(
        "Fengyu Cai and Tong Chen and Xinran Zhao and Sihao Chen and Hongming Zhang and Sherry "
        "Tongshuang Wu and Iryna Gurevych and Heinz Koeppl"
    ),
    arxiv="2506.16552",
    year=2026,
    venue="International Conference on Learning Representations",
    does=(
        "trained on raw text alone: a language model predicts each chunk while attending to the other"
        " chunks of the batch, each weighted by the retriever's similarity"
    ),
)
REVELA = Method(
    name="revela",
    title="Revela",
    paper=PAPER,
    commands={
        "train revela": Command(
            "revela_hub.trainers.revela.command", "learn a retriever from raw text or code with Revela"
        )
    },
    model_type="revela",
    parts=("retriever", "lm", "model"),
    checkpoint_files=("lm", "retriever_tokenizer", "lm_tokenizer"),
    loader="revela_hub.trainers.revela.checkpoint.load_checkpoint",
    assembler="revela_hub.trainers.revela.checkpoint.assemble_revela",
    models=("retriever", "lm"),
)
