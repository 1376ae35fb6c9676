"""ResNet-50 on images in shards: python recipes/test_train_mp_wds_cifar.py --num_epochs=5 --wds_traindir=..."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.argv[1:1] = ["recipe", "resnet50"]

from ml_factory.__main__ import main  # noqa: E402 - the checkout itself, installed or not

if __name__ == "__main__":
    main()
