# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tests of the pages in docs/ that belong to no single part of the code."""
