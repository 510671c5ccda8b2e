# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tests of what people look at: page, report, doctor, play, evaluate."""
