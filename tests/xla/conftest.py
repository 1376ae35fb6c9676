"""Real XLA without a TPU: `make test-xla` runs these where torch_xla is; elsewhere they are not collected."""

import importlib.util
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]


def pytest_terminal_summary(terminalreporter) -> None:
    """What tests measured, also those of another worker."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", ()):
            if name == "told":
                terminalreporter.write_line(value)
