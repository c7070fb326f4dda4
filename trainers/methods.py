"""The list of methods. To add one, write its record in `trainers/<method>/__init__.py` and add it here."""

from revela_hub.hub_cards.method import Method
from revela_hub.trainers.baselines import CONTRIEVER, RA_DIT, RA_IT, REPLUG
from revela_hub.trainers.cot_mote import COT_MOTE
from revela_hub.trainers.imprag import IMPRAG
from revela_hub.trainers.nvembed import NVEMBED
from revela_hub.trainers.pair_tuning import PAIR_TUNING
from revela_hub.trainers.retromae import RETROMAE
from revela_hub.trainers.revela import REVELA

METHODS: dict[str, Method] = {
    method.name: method
    for method in (REVELA, PAIR_TUNING, RETROMAE, NVEMBED, COT_MOTE, IMPRAG, CONTRIEVER, REPLUG, RA_IT, RA_DIT)
}
