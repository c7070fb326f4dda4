"""NV-Embed: arguments, collator, loss, trainer, checkpoint, export."""

from revela_hub.hub_cards.method import Command, Method, Paper

EMBEDDER = "embedder"  # folder of a run that holds the model
PAPER = Paper(
    title="NV-Embed: Improved Techniques for Training LLMs as Generalist Embedding Models",
    authors=(
        "Chankyu Lee and Rajarshi Roy and Mengyao Xu and Jonathan Raiman and Mohammad Shoeybi and "
        "Bryan Catanzaro and Wei Ping"
    ),
    arxiv="2405.17428",
    year=2024,
    does="trained as a generalist embedder from a decoder, with contrastive instruction tuning",
)
NVEMBED = Method(
    name="nvembed",
    title="NV-Embed",
    paper=PAPER,
    commands={
        "train nvembed": Command(
            "revela_hub.trainers.nvembed.command", "train a generalist embedder from a decoder with NV-Embed"
        )
    },
    model_type="nvembed",
    config_folder=EMBEDDER,
    folders={EMBEDDER: "retriever"},
    checkpoint_files=("prompts.json",),
    loader="revela_hub.trainers.nvembed.checkpoint.load_nvembed",
    assembler="revela_hub.trainers.nvembed.checkpoint.assemble_nvembed",
    models=("backbone",),
)
