# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tests, in the shape of the tree that they test. A package, so that helpers are found before any other `tests`."""
