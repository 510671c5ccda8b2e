# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Benchmarks: one script per figure, a runner, and the page made from what they measured."""
