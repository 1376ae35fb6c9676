"""Train with surrogate-guided cross-entropy: `python train.py --help` lists the flags.

The same as `python -m ml_factory recipe sdce`; with torchrun in front, on several GPUs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ml_factory.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["recipe", "sdce"]
    main()
