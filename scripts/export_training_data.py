"""Bars of the database DATABASE_URL to one file: python scripts/export_training_data.py --output data/bars.parquet."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.argv.insert(1, "export-data")

from ml_factory.__main__ import main  # noqa: E402 - the checkout itself, installed or not

main()
