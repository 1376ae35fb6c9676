"""The command line: python -m ml_factory VERB."""

import sys

try:
    import cyclopts  # noqa: F401
except ModuleNotFoundError:  # the guides' scripts under the system's Python
    sys.exit(f"error: the packages of ml_factory are not installed for this Python. Got {sys.executable}. "
             "Next: make setup, then .venv/bin/python in place of python; or pip install .")  # fmt: skip

from ml_factory.cli import main

if __name__ == "__main__":
    main()
