"""User code and the library's own."""

import json

from tests.contract.doors import derive_seed, is_user_code


def test_is_user_code_is_false_for_library_and_installed_packages():
    assert is_user_code(test_is_user_code_is_false_for_library_and_installed_packages)
    assert not is_user_code(json.dumps) and not is_user_code(derive_seed)
