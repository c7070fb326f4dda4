"""The baselines of the papers, on the same backbones and data: Contriever, REPLUG, RA-IT and RA-DIT."""

from dataclasses import replace

from revela_hub.hub_cards.method import Command, Method, Paper

RA_DIT_PAPER = Paper(
    title="RA-DIT: Retrieval-Augmented Dual Instruction Tuning",
    authors=(
        "Xi Victoria Lin and Xilun Chen and Mingda Chen and Weijia Shi and Maria Lomeli and Rich "
        "James and Pedro Rodriguez and Jacob Kahn and Gergely Szilvasy and Mike Lewis and Luke "
        "Zettlemoyer and Scott Yih"
    ),
    arxiv="2310.01352",
    year=2023,
    does=(
        "tuned to retrieve the passages that make the answer more likely for a language model that "
        "was tuned to read them"
    ),
)
CONTRIEVER = Method(
    name="contriever",
    title="Contriever",
    paper=Paper(
        title="Unsupervised Dense Information Retrieval with Contrastive Learning",
        authors=(
            "Gautier Izacard and Mathilde Caron and Lucas Hosseini and Sebastian Riedel and Piotr "
            "Bojanowski and Armand Joulin and Edouard Grave"
        ),
        arxiv="2112.09118",
        year=2021,
        does=(
            "trained on raw text with a contrastive loss: two random crops of a passage are pulled together, "
            "other passages are pushed away"
        ),
    ),
    commands={
        "train contriever": Command(
            "revela_hub.trainers.baselines.contriever",
            "train a retriever on raw text with a contrastive loss (baseline)",
        )
    },
    models=("retriever",),
)
REPLUG = Method(
    name="replug",
    title="REPLUG",
    paper=Paper(
        title="REPLUG: Retrieval-Augmented Black-Box Language Models",
        authors=(
            "Weijia Shi and Sewon Min and Michihiro Yasunaga and Minjoon Seo and Rich James and Mike "
            "Lewis and Luke Zettlemoyer and Wen-tau Yih"
        ),
        arxiv="2301.12652",
        year=2023,
        does=(
            "trained on raw text with a frozen language model as the teacher: passages become similar if "
            "one makes the other more likely"
        ),
    ),
    commands={
        "train replug": Command(
            "revela_hub.trainers.baselines.replug",
            "train a retriever with a frozen language model as teacher (baseline)",
        )
    },
    models=("retriever", "lm"),
)
RA_IT = Method(
    name="ra_it",
    title="RA-IT",
    paper=replace(
        RA_DIT_PAPER, does="tuned to answer from passages placed before the prompt, one per line: `Passage: ...`"
    ),
    commands={
        "train ra-it": Command(
            "revela_hub.trainers.baselines.ra_it", "tune a decoder to answer from pasted passages (baseline)"
        )
    },
    parts=("model",),
    folders={"model": "model"},
    answerer="revela_hub.trainers.baselines.ra_it.open_reader",
    models=("backbone",),
)
RA_DIT = Method(
    name="ra_dit",
    title="RA-DIT",
    paper=RA_DIT_PAPER,
    commands={
        "train ra-dit": Command(
            "revela_hub.trainers.baselines.ra_dit",
            "tune a retriever with the likelihoods of a frozen reader (baseline)",
        )
    },
    models=("retriever", "backbone", "reader"),
)
