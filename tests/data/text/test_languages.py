"""Languages by their codes."""

import pytest

from revela_hub.data.text.languages import CODES, check_language
from revela_hub.errors import UserError


def test_codes_of_two_and_of_three_letters() -> None:
    assert len(CODES) == 184
    assert [check_language(code) for code in ("en", "zh", "ast")] == ["en", "zh", "ast"]


@pytest.mark.parametrize("code", ["", "xx", "english", "EN", "a1b"])
def test_no_language(code: str) -> None:
    with pytest.raises(UserError, match="is not an ISO 639 code"):
        check_language(code)
