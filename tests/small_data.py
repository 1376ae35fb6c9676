"""A data set of few columns, for tests that ask nothing of the others: half the time to prepare and to prove."""

from ml_factory.features.build import FeatureSpec
from ml_factory.settings import DataSpec

FEW_COLUMNS = FeatureSpec(frames=(60,), families=("momentum", "calendar"))
SMALL_DATA = DataSpec(features=FEW_COLUMNS)
SMALL_DATA_WORDS = ("--set", "features.frames=[60]", "--set", 'features.families=["momentum", "calendar"]')
