"""T5 on labelled texts: python recipes/run_train_test.py --data tweets.tsv

The same as `python -m ml_factory recipe t5`. Without --data or --fake_data it says which file it wants.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.argv[1:1] = ["recipe", "t5"]

from ml_factory.__main__ import main  # noqa: E402 - the checkout itself, installed or not

if __name__ == "__main__":
    main()
