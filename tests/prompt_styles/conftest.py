# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Styles are built anew in each session, also where one process runs several (`make mutants`)."""

import pytest

from tests.prompt_styles import families


@pytest.fixture(scope="session", autouse=True)
def _new_styles():
    families.forget_styles()
