"""User code and the library's own; what of a file counts as its code."""

import io
import json
import tokenize

from ml_factory import code_fingerprint
from ml_factory.code_fingerprint import PACKAGE, _without_comments, is_user_code
from ml_factory.seeding import derive_seed
from ml_factory.settings import CERTIFIED_PACKAGES, NOT_CERTIFIED


def test_is_user_code_is_false_for_library_and_installed_packages():
    assert is_user_code(test_is_user_code_is_false_for_library_and_installed_packages)
    assert not is_user_code(json.dumps) and not is_user_code(derive_seed)


def test_without_comments_equals_tokenize_for_every_file_of_library():
    hard = 'a = ("#"  # one\n     r"\\"  # two\n)\nb = """x # y\n"z" # """  # three\nc = \'it\\\'s #\'#four\n'
    for source in [hard, *(path.read_text() for path in PACKAGE.rglob("*.py"))]:
        lines = source.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        assert _without_comments(source).splitlines() == lines


def test_names_of_files_in_code_lists_exist():
    for name in code_fingerprint.COMPUTES_NOTHING:
        assert (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file(), name
    for name in (*CERTIFIED_PACKAGES, *NOT_CERTIFIED):
        assert (PACKAGE / name).exists(), name
