"""Recipes' tests: torchvision's operators are declared before any test file imports transformers or torchvision."""

import ml_factory.recipes  # noqa: F401
from tests.contract.test_sdce import hub  # noqa: F401 - a fixture
from tests.recipes.image_cases import shards  # noqa: F401 - a fixture
from tests.recipes.text_cases import sdce_settings  # noqa: F401 - a fixture
