"""Lock files: every package has versions, hashes and a reason; a closure leaves out what is installed."""

import re

import pytest

from utils.package_lock import locked_closure, normalize_package_name, read_package_lock
from utils.runtime import LOCKED, ROOT, read_requirement_lines

TEXT = """\
alembic==1.20.1 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
    # via optuna
numpy==2.1.3 \\
    --hash=sha256:ba
    # via
    #   -r base.txt
    #   optuna
optuna==5.0.0 ; python_version < '3.13' \\
    --hash=sha256:ca
    # via -r base.txt
optuna==5.1.0 ; python_version >= '3.13' \\
    --hash=sha256:cb
    # via -r base.txt
SQLAlchemy==2.1.9 \\
    --hash=sha256:da
    # via
    #   alembic
    #   optuna
"""


@pytest.fixture
def lock(tmp_path):
    (tmp_path / "lock.txt").write_text(TEXT)
    return read_package_lock(tmp_path / "lock.txt")


def test_read_package_lock_returns_text_and_reasons(lock):
    assert list(lock) == ["alembic", "numpy", "optuna", "sqlalchemy"]
    assert lock["sqlalchemy"].required_by == {"alembic", "optuna"} and lock["numpy"].required_by == {"optuna"}
    assert lock["optuna"].text.count("--hash") == 2 and "5.0.0" in lock["optuna"].text
    assert "".join(package.text for package in lock.values()) == TEXT


def test_locked_closure_leaves_out_installed_packages_and_what_only_they_require(lock):
    names = lambda *installed: [one.name for one in locked_closure(lock, ["Optuna"], lambda name: name in installed)]  # noqa: E731
    assert names() == ["alembic", "numpy", "optuna", "sqlalchemy"]
    assert names("numpy", "optuna") == ["alembic", "optuna", "sqlalchemy"]
    assert names("alembic", "sqlalchemy", "numpy") == ["optuna"]
    with pytest.raises(KeyError, match="absent"):
        locked_closure(lock, ["absent"], lambda name: False)


@pytest.mark.parametrize("path", sorted(LOCKED.glob("*.txt")), ids=lambda path: path.stem)
def test_locked_packages_have_exact_version_hash_and_reason(path):
    listed = {normalize_package_name(re.match(r"[\w.-]+", one)[0]) for file in (ROOT / "requirements").glob("*.txt")
              for one in read_requirement_lines(file)}  # fmt: skip
    names = {name for file in LOCKED.glob("*.txt") for name in read_package_lock(file)}
    packages = read_package_lock(path).values()
    assert packages
    for package in packages:
        assert re.match(r"[\w.-]+==[\w.]+ ", package.text) and package.text.count("--hash=sha256:") >= 1
        assert package.required_by & names or package.name in listed


@pytest.mark.parametrize("name", ["dev-cpu", "dev-cuda"])
def test_locked_closure_of_torch_on_linux_equals_what_it_requires(name):
    """A CUDA build requires its libraries; where the lock lost their reason, nothing would install them."""
    build = read_package_lock(LOCKED / f"{name}.txt")
    lock = read_package_lock(LOCKED / "dev.txt") | build
    closure = {one.name for one in locked_closure(lock, ["torch"], lambda name: False)}
    assert {"filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "torch"} <= closure
    cuda = {one for one in closure if one.startswith(("nvidia-", "triton", "cuda-"))}
    assert (len(cuda) >= 10) == (name == "dev-cuda"), cuda
    assert build.keys() <= closure
