"""Language codes: sentencex accepts any string, and treats an unknown one as English."""

from revela_hub.errors import UserError

# All codes of ISO 639-1.
CODES = frozenset(
    """aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
    es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg
    ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn
    no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta
    te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu""".split()
)


def check_language(code: str) -> str:
    """Return a valid language code."""
    if code in CODES or (len(code) == 3 and code.isascii() and code.isalpha() and code.islower()):
        return code
    near = code[:2].lower()
    example = near if near in CODES else "en"
    raise UserError(f"language {code!r} is not an ISO 639 code: use two letters, such as {example}, or three")
