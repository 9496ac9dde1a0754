"""Fetched models are tested with the folders and the pip settings that tests of models have."""

from tests.model.conftest import cache as cache
from tests.model.conftest import index as index
