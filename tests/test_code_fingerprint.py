"""User code and the library's own."""

import json

from ml_factory.code_fingerprint import is_user_code
from ml_factory.seeding import derive_seed


def test_is_user_code_is_false_for_library_and_installed_packages():
    assert is_user_code(test_is_user_code_is_false_for_library_and_installed_packages)
    assert not is_user_code(json.dumps) and not is_user_code(derive_seed)
