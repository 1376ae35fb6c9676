"""Real XLA without a TPU: `make test-xla` runs these where torch_xla is; elsewhere they are not collected."""

import importlib.util
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]
